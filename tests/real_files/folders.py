"""Model folders, hub caches and GGUF files as transformers, huggingface_hub and llama.cpp's converter write them.

A line of `OPENED` is a name and what makes the files; its tokens are transformers' own, from the same files. A line of
`REFUSED` has the words of the refusal, too. `tests/models/test_real_folders.py` runs all of them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models_for_tests import build_model, build_tokenizer
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from real_files import converted, hub_cache

NUM_LAYERS, SHARDS = 2, "40KB"
WEIGHTS = "model.safetensors"
HUB_NAME = "somebody/small"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
_ORIGINAL = 64
_YARN = {"factor": 4.0, "original_max_position_embeddings": _ORIGINAL}
MESSAGES = [{"role": "user", "content": "a fox"}, {"role": "assistant", "content": "the dog"}]


@dataclass(frozen=True)
class Made:
    """What a line has made."""

    model: str
    """What is opened here."""
    oracle: str
    """What transformers opens; the same, but for what it opens in another way."""
    tokenizer: str
    """What transformers has the tokenizer from."""
    prompt: str = "a fox"


Make = Callable[[Path], Made]
"""Writes files into a folder of its own."""


def _folder(folder: Path, **others: Any) -> Made:
    """A folder that all open alike."""
    return Made(str(folder), str(folder), str(folder), **others)


def model(**settings: Any) -> PreTrainedModel:
    """A small model."""
    return build_model(settings.pop("family", "llama"), num_layers=NUM_LAYERS, **settings)


def save(folder: Path, saved: PreTrainedModel, shards: str = "5GB", **tokenizer: Any) -> Made:
    """As `save_pretrained` writes a model, whole or its base alone, and its tokenizer."""
    saved.save_pretrained(folder, max_shard_size=shards)
    its_tokenizer(**tokenizer).save_pretrained(folder)
    return _folder(folder)


def its_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """The models' tokenizer, with settings of its own."""
    tokenizer = build_tokenizer()
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def rewrite(file: Path, *without: str, **changes: Any) -> None:
    """Change fields of a file of settings, and take some away."""
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if name not in without}, indent=2))


def base_model(folder: Path, shards: str = "5GB", **settings: Any) -> Made:
    """`LlamaModel.save_pretrained`: there is no `model.` before the tensors' names, and no head."""
    return save(folder, model(**settings).model, shards)


def one_over_shards(folder: Path) -> Made:
    """transformers removes the shards of an earlier save, and leaves their index."""
    save(folder, model(seed=1), SHARDS)
    made = save(folder, model())
    assert (folder / f"{WEIGHTS}.index.json").exists()
    return made


def one_beside_shards(folder: Path) -> Made:
    """Of a program that copies over what was there, the shards are left too."""
    save(folder, model(seed=1), SHARDS)
    save(folder / "new", model())
    shutil.copytree(folder / "new", folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "new")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return _folder(folder)


def shards_over_one(folder: Path) -> Made:
    """The single file is left, and it is what `from_pretrained` loads."""
    save(folder, model(seed=1))
    made = save(folder, model(), SHARDS)
    assert (folder / WEIGHTS).exists()
    return made


def named_weights(folder: Path) -> Made:
    """A configuration that names its file of weights, beside others."""
    made = save(folder, model())
    save(folder / "other", model(seed=1))
    (folder / "other" / WEIGHTS).rename(folder / "consolidated.safetensors")
    shutil.rmtree(folder / "other")
    rewrite(folder / "config.json", transformers_weights="consolidated.safetensors")
    return made


def without_metadata(folder: Path) -> Made:
    """`safetensors.torch.save_file` without the format, as converters call it."""
    made = save(folder, model())
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS)
    return made


def around_the_model(folder: Path) -> Made:
    """A training program's module around the model, whose names all begin with `model.` once more."""
    made = save(folder, model(tied=True))
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return made


def head_beside_a_tied_one(folder: Path) -> Made:
    """Tied weights that a program wrote twice."""
    made = save(folder, model(tied=True))
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return made


def as_transformers_4(folder: Path) -> Made:
    """The spelling of earlier versions: `torch_dtype`, `rope_theta` and no scaling."""
    made = save(folder, model(dtype="bfloat16"))
    changes = {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": None, "transformers_version": "4.44.2"}
    rewrite(folder / "config.json", "dtype", "rope_parameters", **changes)
    return made


def scaled(folder: Path, scaling: Mapping[str, Any], family: str = "llama") -> Made:
    """As model cards tell people: `rope_scaling` is added, and `max_position_embeddings` stays the original length."""
    save(folder, model(family=family, max_position_embeddings=_ORIGINAL))
    rewrite(folder / "config.json", "rope_parameters", rope_theta=1e6, rope_scaling=scaling)
    return _folder(folder, prompt="the fox waits " * 30)


def added_tokens(folder: Path, resized: bool) -> Made:
    """`add_special_tokens` and `add_tokens`, and perhaps `resize_token_embeddings`."""
    tokenizer, grown = build_tokenizer(), model()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens(["<tool>"])
    if resized:
        grown.resize_token_embeddings(len(tokenizer))
    grown.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _folder(folder, prompt="a <tool> fox<pad>" if resized else "a fox")


def slow_tokenizer(folder: Path) -> Made:
    """`vocab.json` and `merges.txt` alone, which slow tokenizers of earlier versions saved."""
    tokenizer = build_tokenizer()
    model().save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": tokenizer.eos_token, "unk_token": tokenizer.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": tokenizer.eos_token}))
    return _folder(folder)


def template_in_the_configuration(folder: Path, template: Any = TEMPLATE) -> Made:
    """Earlier versions kept the chat template in `tokenizer_config.json`, or several by name."""
    made = save(folder, model())
    rewrite(folder / "tokenizer_config.json", chat_template=template)
    return made


def ends_as_llama_3(folder: Path) -> Made:
    """Several tokens end a text, and sampling is what `generate` does unless it is told otherwise."""
    saved = model()
    ends = {"bos_token_id": 1, "eos_token_id": [0, 17, 18], "pad_token_id": 0}
    saved.generation_config = GenerationConfig(**ends, do_sample=True, temperature=0.6, top_p=0.9)
    return save(folder, saved)


def with_by_products(folder: Path) -> Made:
    """What trainers, git and `hf download --local-dir` leave in a folder."""
    made = save(folder, model())
    for name in ("training_args.bin", "optimizer.pt", "README.md", ".gitattributes", ".git/config", "onnx/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    save(folder / "checkpoint-500", model(seed=1))
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(f"{hub_cache.NEW}\n{'0' * 40}\n1764250000.0\n")
    return made


def cached(folder: Path, shards: str = "5GB", without: tuple[str, ...] = (), listed: bool = True, at: str = "") -> Made:
    """A hub cache that another program filled; the hub itself is out of reach."""
    save(folder / "files", model(), shards)
    files = hub_cache.of_folder(folder / "files", *without)
    others = ("README.md", "onnx/config.json", "onnx/model.onnx", *without) if listed else None
    snapshot = hub_cache.fill(folder / "hub", HUB_NAME, files, refs=("main", "v1"), others=others)
    return Made(f"{HUB_NAME}{at}", str(snapshot), str(snapshot))


def gguf(folder: Path, **changes: Any) -> Made:
    """A file as llama.cpp's converter writes it of a folder that transformers saved."""
    made = save(folder / "saved", model(tied=changes.pop("tied", False)))
    file = converted.convert(folder / "saved", folder / "model.gguf", **changes)
    return Made(str(file), made.oracle, made.tokenizer)


def gguf_with_equal_tokens(folder: Path, beside: bool) -> Made:
    """A converter that has two tokens' texts mixed up, as in official files; perhaps the tokenizer lies beside it."""
    made = gguf(folder, equal_tokens=(290, 190))
    if beside:
        shutil.copy(folder / "saved" / "tokenizer.json", folder)
    return made


OPENED: Mapping[str, Make] = {
    "LlamaForCausalLM": lambda path: save(path, model()),
    "LlamaForCausalLM in shards": lambda path: save(path, model(), SHARDS),
    "LlamaForCausalLM, tied": lambda path: save(path, model(tied=True)),
    "LlamaForCausalLM in float16": lambda path: save(path, model(dtype="float16")),
    "LlamaModel": partial(base_model, tied=True),
    "LlamaModel in shards": partial(base_model, shards=SHARDS, tied=True),
    "LlamaModel in bfloat16": partial(base_model, tied=True, dtype="bfloat16"),
    "Gemma3TextModel": partial(base_model, family="gemma3_text"),
    "one file over shards": one_over_shards,
    "one file beside shards": one_beside_shards,
    "shards over one file": shards_over_one,
    "weights that config.json names": named_weights,
    "safetensors without metadata": without_metadata,
    "a module around the model": around_the_model,
    "a head beside a tied one": head_beside_a_tied_one,
    "config.json of transformers 4": as_transformers_4,
    "linear rope_scaling, as Vicuna 16k": partial(scaled, scaling={"type": "linear", "factor": 4.0}),
    "dynamic rope_scaling, as InternLM2": partial(scaled, scaling={"type": "dynamic", "factor": 4.0}),
    "yarn, as Qwen2.5's model card": partial(scaled, scaling={**_YARN, "type": "yarn"}, family="qwen2"),
    "yarn, as Qwen3's model card": partial(scaled, scaling={**_YARN, "rope_type": "yarn"}, family="qwen3"),
    "added tokens, resized": partial(added_tokens, resized=True),
    "added tokens that no prompt has": partial(added_tokens, resized=False),
    "a slow tokenizer": slow_tokenizer,
    "chat_template.jinja": lambda path: save(path, model(), chat_template=TEMPLATE),
    "a template in tokenizer_config.json": template_in_the_configuration,
    "templates by name": partial(
        template_in_the_configuration,
        template=[{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}],
    ),
    "Llama 3's generation_config.json": ends_as_llama_3,
    "by-products": with_by_products,
    "a hub cache": cached,
    "a hub cache of shards": partial(cached, shards=SHARDS),
    "a hub cache without a listing": partial(cached, listed=False),
    "a hub cache at a tag": partial(cached, at="@v1"),
    "a hub cache at a commit": partial(cached, at=f"@{hub_cache.NEW}"),
    "GGUF in F32": gguf,
    "GGUF in F16": partial(gguf, kind="F16"),
    "GGUF, tied": partial(gguf, tied=True),
    "GGUF with equal tokens": partial(gguf_with_equal_tokens, beside=False),
    "GGUF with equal tokens and its tokenizer": partial(gguf_with_equal_tokens, beside=True),
}


def pickled(folder: Path) -> Made:
    """`pytorch_model.bin`, which earlier versions wrote."""
    made, saved = save(folder, model()), model()
    torch.save(saved.state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    return made


def variant(folder: Path) -> Made:
    """`save_pretrained(variant="fp16")`."""
    saved = model(dtype="float16")
    saved.save_pretrained(folder, variant="fp16")
    build_tokenizer().save_pretrained(folder)
    return _folder(folder)


def adapter_alone(folder: Path) -> Made:
    """What PEFT saves."""
    build_tokenizer().save_pretrained(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": HUB_NAME, "peft_type": "LORA"}))
    save_file(
        {"base_model.model.model.layers.0.q.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors"
    )
    return _folder(folder)


def shard_lost(folder: Path) -> Made:
    """A copy that was broken off."""
    made = save(folder, model(), SHARDS)
    (folder / "model-00002-of-00004.safetensors").unlink()
    return made


_SHARD = "model-00002-of-00004.safetensors"
REFUSED: Mapping[str, tuple[Make, str]] = {
    "LlamaModel without a tied head": (base_model, "its files lack lm_head.weight (1 tensor"),
    "pytorch_model.bin": (pickled, "holds no safetensors weights; convert or download them first"),
    "a variant": (variant, "holds no safetensors weights; convert or download them first"),
    "an adapter alone": (adapter_alone, "no usable config.json in"),
    "a shard lost": (shard_lost, f"lacks {_SHARD} (1 of 4 files of weights); copy or download the model again"),
    "a hub cache that lacks a shard": (
        partial(cached, shards=SHARDS, without=(_SHARD,)),
        f"lacks {_SHARD} (1 of 4 files of weights); fetch it where the hub can be reached, with `hf",
    ),
    "a hub cache at a commit that is not there": (
        partial(cached, at=f"@{hub_cache.OLD}"),
        "is neither a folder here nor a model that the hub gave",
    ),
    "GGUF with a broken merge": (
        partial(gguf, merges=["q zz"]),
        "is damaged: the merge 'q zz' is not of its tokens",
    ),
}
