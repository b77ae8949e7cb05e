"""A Llama's weights as llama.cpp reads them: GGUF files.

Quantised files hold this project's own numbers and scales, so that all engines multiply by the same weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.native.quantising import quantise

_TYPES = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def gguf_file(model: Path, weights: str, folder: Path) -> Path:
    """The GGUF file that a model is, or one of a Llama in a folder.

    The head of one in int4 is in int8, and embeddings are in bfloat16.

    Raises:
        ValueError: where it is no plain Llama.
    """
    if model.is_file():
        return model
    config = model_config(model)
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"{model}: only plain Llamas are written as GGUF, this is {config.model_type}")
    path = folder / f"{weights}.gguf"
    if not path.exists():
        _write(path, model, config, weights)
    return path


def converted_file(file: Path, kind: str, folder: Path) -> Path:
    """A GGUF file with its matrices in one of llama.cpp's file types, such as Q4_K_M, made by llama.cpp.

    Raises:
        ValueError: for a type that llama.cpp does not have, or where it is not installed.
    """
    lib, path = llama_cpp(), folder / f"{kind}.gguf"
    names = (f"LLAMA_FTYPE_{prefix}{kind}" for prefix in ("MOSTLY_", "ALL_"))
    file_type = next((getattr(lib, name) for name in names if hasattr(lib, name)), None)
    if file_type is None:
        raise ValueError(f"{kind}: choose one of llama.cpp's file types, such as Q8_0 or Q4_K_M")
    settings = lib.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = file_type, True
    if lib.llama_model_quantize(str(file).encode(), str(path).encode(), settings):
        raise ValueError(f"{file.name}: llama.cpp does not make a {kind} of it")
    return path


def llama_cpp() -> Any:
    """llama.cpp's own C interface, which prints nothing; ValueError where it is not installed."""
    try:
        import llama_cpp as lib
    except ModuleNotFoundError:
        raise ValueError("llama.cpp is not installed: run pip install '.[peers]' in the project's folder") from None
    lib.silent = lib.llama_log_callback(lambda *message: None)  # C code holds it, too
    lib.llama_log_set(lib.silent, None)
    return lib


def _write(path: Path, model: Path, config: PretrainedConfig, weights: str) -> None:
    import gguf

    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{_TYPES[weights]}"])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, model, config.vocab_size)
    tensors = AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for full_name, tensor in tensors.items():
        name = str(names.get_name(full_name, try_suffixes=(".weight",)))
        part = name.split(".")[-2]
        kind = {"token_embd": "bfloat16"}.get(part, weights)
        if part == "output" and weights == "int4":
            kind = "int8"
        numbers, of_type = _in_format(_interleaved(tensor, heads[part]) if part in heads else tensor, kind)
        writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType[of_type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def _interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys as GGUF wants a Llama's: the two numbers that rotary turns together side by side."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _in_format(tensor: Tensor, weights: str) -> tuple[np.ndarray, str]:
    """A tensor's bytes and their type; vectors are always in float32."""
    if tensor.dim() == 1:
        return tensor.float().numpy(), "F32"
    if weights == "bfloat16":
        return tensor.bfloat16().contiguous().view(torch.uint8).numpy(), "BF16"
    found = quantise(tensor, weights)
    codes = found.codes
    if weights == "int4":
        low, high = np.split(codes, 2, axis=-1)
        codes = low | high << 4
    else:
        codes = codes - np.uint8(128)
    blocks = np.concatenate([found.scales[..., None].view(np.uint8), codes], axis=-1)
    return blocks.reshape(len(blocks), -1), _TYPES[weights]


def _add_tokenizer(writer: Any, model: Path, vocab_size: int) -> None:
    """Add a tokenizer of byte-level BPE, and unused tokens up to `vocab_size`, which llama.cpp counts."""
    import gguf

    try:
        vocabulary = gguf.BpeVocab(model)
    except FileNotFoundError:  # that there is none of this kind
        writer.add_tokenizer_model("none")
        return
    special = gguf.SpecialVocab(model, load_merges=True)
    control, unused = gguf.TokenType.CONTROL, range(vocabulary.vocab_size, vocab_size)
    tokens = [*vocabulary.all_tokens(), *((f"<unused{token}>", 0, gguf.TokenType.UNUSED) for token in unused)]
    named = special.special_token_ids.values()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_types([control if number in named else kind for number, (_, _, kind) in enumerate(tokens)])
    special.add_to_gguf(writer, quiet=True)
