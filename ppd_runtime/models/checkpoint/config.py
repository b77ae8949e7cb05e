"""A model's configuration: read from its folder, cut to its first layers, built without weights."""

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.checkpoint.wrappers import WRAPPERS, text_names, text_part
from ppd_runtime.models.stage.decoder_parts import DECODERS, decoder_in
from ppd_runtime.models.stage.library_probe import unlike_layers
from ppd_runtime.models.stage.paired import counting_layers
from ppd_runtime.models.stage.wide import is_wide

QUANTISED_CARD, QUANTISED = "ppd_weights.json", "ppd-weights.safetensors"
"""Files that `ppd quantize` writes: the description of the weights, and the weights."""
GENERATION = "generation_config.json"
"""The file with a model's own generation defaults."""
AGAIN = "copy or download the model again"
"""Advice if a model's files are damaged."""
_INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Files of an ordinary folder: the index of shards, and the single file of tensors."""
_MOST_LAYERS = 10_000  # the library lists them one by one, before the files are looked into


def first_layers_config(config: PretrainedConfig, last: int) -> PretrainedConfig:
    """The configuration of the same model cut off after layer `last`; a layer behind the model's is as its last one.

    Where states are wide it stays whole, see `is_wide`; `drop_layers` cuts the model.
    """
    config = copy.deepcopy(config)
    if is_wide(config):
        return config
    full = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == full and "layer" in name:
            setattr(config, name, (value + value[-1:] * (last - full))[:last])
    config.num_hidden_layers = last
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, in a fixed order; empty if there are none.

    The choice is transformers': the file that config.json names, else the single file, else an index with its shards,
    which may be left from an earlier save.
    """
    if (folder / QUANTISED_CARD).exists():
        return [folder / QUANTISED]
    there = (name for name in (SINGLE, _INDEX) if (folder / name).is_file())
    chosen = _named_weights(folder) or next(there, None)
    if chosen is None or not chosen.endswith(".index.json"):
        return [folder / chosen] if chosen else []
    weight_map = read_json(folder / chosen).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"model {str(folder)!r}: {chosen} has no weight_map; {AGAIN}")
    names = sorted({name if isinstance(name, str) else "" for name in weight_map.values()})
    return [folder / _check_in_folder(folder, name, f"{chosen} names") for name in names]


def _named_weights(folder: Path) -> str | None:
    """The file of weights, or the index, that config.json names."""
    config = folder / "config.json"
    named = read_json(config).get("transformers_weights") if config.is_file() else None
    return None if named in (None, "") else _check_in_folder(folder, named, "config.json names as transformers_weights")


def _check_in_folder(folder: Path, named: Any, who: str) -> str:
    if not isinstance(named, str) or not named or Path(named).is_absolute() or ".." in Path(named).parts:
        raise ValueError(f"model {str(folder)!r}: {who} {str(named)[:40]!r}, which is no file in it; {AGAIN}")
    return named


def layer_number(tensor_name: str) -> int:
    """The layer a tensor belongs to, -1 for the embedding, norm and head."""
    parts = tensor_name.split(".")
    in_layers = len(parts) > 2 and parts[0] in DECODERS and parts[1] == "layers" and parts[2].isdecimal()
    return int(parts[2]) if in_layers else -1


def model_config(folder: Path) -> PretrainedConfig:
    """The configuration of a folder's text model."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # else transformers asks
    return counting_layers(text_part(config))


def text_names_in(folder: Path) -> Callable[[str], str | None]:
    """See `text_names`."""
    return text_names(model_type(folder))


def model_type(folder: Path) -> str:
    """The kind of model, which may be a wrapper, as config.json names it."""
    return str(read_json(folder / "config.json").get("model_type", ""))


def heavy_length(folder: Path, dtype: torch.dtype) -> float:
    """About the number of tokens whose keys and values equal the weights in bytes; infinite without weights."""
    config, files = model_config(folder), [path for path in weight_files(folder) if path.is_file()]
    kv_heads, head_dim = entry_size(config)
    entries = 2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize
    return (entries and sum(path.stat().st_size for path in files) / entries) or math.inf


def entry_size(config: PretrainedConfig) -> tuple[int, int]:
    """Heads of a layer's keys and numbers of a head; of the largest layer, if layers differ; 0 without attention."""

    def of(layer: PretrainedConfig) -> tuple[int, int]:
        if not (heads := getattr(layer, "num_attention_heads", 0)):
            return 0, 0
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        return getattr(layer, "num_key_value_heads", None) or heads, head_dim

    return max(map(of, unlike_layers(config)), key=math.prod)


def checked_config(model: str, folder: Path) -> PretrainedConfig:
    fields = _told(folder)
    if "auto_map" in fields and str(fields.get("model_type")) not in CONFIG_MAPPING:
        raise ValueError(
            f"model {model!r}: its config.json asks for code of its own (auto_map), which is never run; "
            "give a model whose architecture transformers itself has"
        )
    for part in (fields, *fields.values()):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise ValueError(f"model {model!r}: config.json has {layers} layers, at most {_MOST_LAYERS} run; {AGAIN}")
    kind = fields.get("model_type")
    if kind in WRAPPERS and not fields.get("text_config") and "num_hidden_layers" not in fields:  # older files are flat
        missing = "config.json has no text_config, which describes the text model"
        raise ValueError(f"model {model!r} ({kind}): {missing}; {AGAIN}")
    try:
        return model_config(folder)
    except Exception as error:  # a config's own checks raise many kinds
        reason = f"no usable config.json in {folder}: {one_line(error)}"
        raise ValueError(f"model {model!r}: {reason}; {AGAIN}, or give another") from error


def _told(folder: Path) -> dict[str, Any]:
    """What config.json says, as it stands there; nothing if that cannot be read, which transformers then says."""
    try:
        return read_json(folder / "config.json")
    except ValueError:
        return {}


def skeleton_of(config: PretrainedConfig, num_layers: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The first layers without their weights."""
    with torch.device("meta"):
        model = without_weights(first_layers_config(config, num_layers), dtype)
    return drop_layers(model, num_layers)


def without_weights(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with any numbers as weights, each in the dtype in which the library loads it; `config` stays as it is.

    The library keeps some weights in float32, such as the bias of deepseek_v3's router, when it loads 16 bits.
    """
    of_type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = of_type._from_config(copy.deepcopy(config), **({"dtype": dtype} if dtype else {})).eval()
    dtypes = {pattern.replace("*", ".*"): kept for pattern, kept in model._get_dtype_plan(model.dtype).items()}
    for name in model.state_dict():
        kept = next((kept for pattern, kept in dtypes.items() if re.search(pattern, name)), None)
        if kept is not None:
            module, _, attribute = name.rpartition(".")
            _convert(model.get_submodule(module), attribute, kept)
    return model


def _convert(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    tensor = getattr(module, name)
    converted = tensor.detach().to(dtype)
    setattr(module, name, nn.Parameter(converted, tensor.requires_grad) if name in module._parameters else converted)


def drop_layers(model: PreTrainedModel, last: int) -> PreTrainedModel:
    """The model without the layers behind `last`, if it has such."""
    layers = getattr(getattr(model, "model", None), "layers", ())
    if len(layers) > last and is_wide(model.config):
        decoder_in(model).layers = layers[:last]
    return model


def eos_token_ids_of(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    path = folder / GENERATION
    generation = read_json(path) if path.exists() else {}
    given = generation.get("eos_token_id", config.eos_token_id)
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(token) is not int for token in ids):
        named = GENERATION if "eos_token_id" in generation else "config.json"
        raise ValueError(f"model {str(folder)!r}: {named}: eos_token_id={given!r:.100}: give token ids; mend the file")
    return frozenset(ids)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{path.name} cannot be read: {one_line(error)}"
        raise ValueError(f"model {str(path.parent)!r}: {reason}; {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model {str(path.parent)!r}: {path.name} holds no JSON object; {AGAIN}")
    return content
