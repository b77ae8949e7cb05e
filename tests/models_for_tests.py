"""Small random models with a byte-level tokenizer, saved as folders like those that the hub gives."""

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.decoder_parts import decoder_in, final_norm
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.state_range import range_class

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3")
"""Model types that `build_model` knows; mistral, gemma2 and gemma3_text have sliding windows."""

END = "<|end|>"
"""The tokenizer's only special token, its id is `END_ID`."""
END_ID = 0
VOCAB_SIZE = 300
SLIDING_WINDOW = 6
_LAST_PRODUCT = re.compile(r"\b(o_proj|out_proj|down_proj|dense|output_linear|output_projection|c_proj|w2)\b")
"""What a sub-layer adds to the residual stream comes out of it, by its usual names."""

_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog waits for the next fox.",
    "A model writes one token after another: the next token waits for the last layer of the one before.",
    "Whoever may compute the next token holds the keys and values of every token before it.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich – naïve café, 東京, Ελλάδα, 🦊.",
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `VOCAB_SIZE` tokens; every text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def build_model(
    family: str,
    *,
    num_layers: int = 4,
    hidden_size: int = 32,
    vocab_size: int = VOCAB_SIZE,
    dtype: str = "float32",
    seed: int = 0,
    eos_token_id: int | None = None,
    tied: bool | None = None,
    quiet_from: int | None = None,
    **settings: object,
) -> PreTrainedModel:
    """A random model of a Hugging Face model type, with weights large enough for varied greedy text.

    Layers from `quiet_from` on (counted from 0) change little, so that earlier ones often predict the token.
    """
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": END_ID,
    }
    if tied is not None:
        shape["tie_word_embeddings"] = tied
    config = CONFIG_MAPPING[family](**shape | _own_settings(family, num_layers, hidden_size) | settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    vary(model)
    quieten(model, num_layers if quiet_from is None else quiet_from)
    model = model.to(getattr(torch, dtype)).eval()
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id, pad_token_id=END_ID)
    return model


def save_model(folder: Path, family: str, max_shard_size: str = "5GB", **settings: object) -> Path:
    """Save the tokenizer and what `build_model` builds from `settings` as a model folder."""
    build_model(family, **settings).save_pretrained(folder, max_shard_size=max_shard_size)
    build_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def vary(model: PreTrainedModel) -> None:
    """Make norms and biases that are not all alike, and no tied head that names the input token again and again."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    if model.config.tie_word_embeddings:
        model.get_input_embeddings().weight.mul_(0.1)
        decoder = _decoder(model)
        getattr(decoder, final_norm(decoder)).weight.add_(9)


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The model's decoder; Llama 4's `get_decoder` gives the whole model, as Mamba's does."""
    found = model.get_decoder()
    return found if hasattr(found, "layers") else decoder_in(found)


@torch.no_grad()
def quieten(model: PreTrainedModel, first: int) -> None:
    """Have the layers from `first` on (counted from 0) change little, so that earlier ones often predict the token."""
    for layer in _decoder(model).layers[first:]:
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 1 and _LAST_PRODUCT.search(name):
                parameter.mul_(0.2)
        if hasattr(layer, "post_feedforward_layernorm"):  # it would make up for that
            layer.post_attention_layernorm.weight.mul_(0.2)
            layer.post_feedforward_layernorm.weight.mul_(0.2)


def _own_settings(family: str, num_layers: int, hidden_size: int) -> dict[str, object]:
    """What a family needs besides the common sizes; windows are shorter than the tests' texts."""
    alternating = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    return {
        "mistral": {"sliding_window": SLIDING_WINDOW},
        "qwen2": {"use_sliding_window": False},
        "gemma2": {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": alternating,
            "query_pre_attn_scalar": hidden_size // 4,
        },
        "gemma3_text": {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": alternating,
            "query_pre_attn_scalar": hidden_size // 4,
        },
        "smollm3": {"no_rope_layers": [int(i % 3 != 2) for i in range(num_layers)]},
    }.get(family, {})


def load_stage(folder: Path, dtype: str = "float32", last: int | None = None) -> LayerRange:
    """The first `last` layers of a model folder (None: all of them) as a stage on the CPU."""
    info = describe(str(folder))
    model = load_layers(info, info.num_layers if last is None else last, getattr(torch, dtype), "cpu")
    return range_class(model.config)(model)


@torch.inference_mode()
def greedy_with_transformers(
    folder: Path, prompt_ids: list[int], num_new_tokens: int, dtype: str = "float32"
) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens, and the float32 logits that gave each, by transformers' own forward pass and cache.

    The passes are those of its `generate`: the prompt with logits for its last token only, then one token at a time.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokens: list[int] = []
    logits: list[Tensor] = []
    cache, inputs = None, prompt_ids
    for _ in range(num_new_tokens):
        output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits.append(output.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
        inputs = tokens[-1:]
    return tokens, logits
