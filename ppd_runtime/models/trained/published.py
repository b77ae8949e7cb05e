"""Draft heads that others publish, in the format of the package `speculators`: EAGLE-3 and DFlash.

A folder has config.json, the card, and safetensors. The layers after which states are read are counted there as here:
after layer n means after n layers; a card that names none means 2, half of all, and all but 3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from ppd_runtime.models.checkpoint.config import model_config, read_json, weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.fingerprint import folder_fingerprint
from ppd_runtime.models.checkpoint.hub import find_model, one_line
from ppd_runtime.models.trained.dflash import DFlashDrafter, DFlashNetwork
from ppd_runtime.models.trained.eagle3 import Eagle3Drafter, Eagle3Network
from ppd_runtime.models.trained.published_network import (
    EMBEDDING,
    FULL,
    HEAD,
    SLIDING,
    PublishedDrafter,
    PublishedNetwork,
)

_KINDS: dict[str, tuple[type[PublishedNetwork], type[PublishedDrafter]]] = {
    "eagle3": (Eagle3Network, Eagle3Drafter),
    "dflash": (DFlashNetwork, DFlashDrafter),
}
_KIND, _LAYERS = "speculators_model_type", "transformer_layer_config"
_FIELDS = {_KIND, _LAYERS, "speculators_config", "draft_vocab_size", "target_hidden_size"}
_IRRELEVANT = {
    *("auto_map", "torch_dtype", "speculators_version", "embed_requires_grad", "has_no_defaults_at_init"),
    *("base_model_ep_plan", "tie_word_embeddings"),
}
"""Fields that say nothing of the network, besides those of every configuration."""
_OF_LAYERS = {
    *("torch_dtype", "tie_word_embeddings", "rope_theta", "rope_scaling"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
}
"""Fields of layers besides those of the library's own configuration."""
_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary tables that do not depend on how long a text is."""
_ROTARY_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_FLOATS = {"F32", "F16", "BF16"}
_UNUSED = ("verifier_norm.", "verifier_lm_head.")
"""Copies of the model's own tensors that training compares with."""
_MAP, _MARKS = "d2t", "t2d"
"""How much larger the model's id of each of a head's tokens is; which of the model's tokens the head has."""
_ANOTHER = "give a head for this model"
_AGAIN = "download the head again, or give another"


@dataclass(frozen=True)
class PublishedInfo:
    """A head that suits a model; `describe_published` reads it."""

    folder: Path
    kind: str
    """eagle3 or dflash."""
    fields: Mapping[str, Any]
    """The fields of its card that are understood, with defaults for those that it lacks."""
    layers: tuple[int, ...]
    """Layers of the model after which it reads states, in rising order."""
    tokens: tuple[int, ...]
    """Tokens that it gives the chances of, in the head's order."""
    takes_head: bool
    """Whether it needs the model's head for its tokens."""
    fingerprint: str
    """Tells it from all others."""
    reads_states: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = True

    @property
    def layers_config(self) -> PretrainedConfig:
        """The library's configuration of the head's own layers."""
        return _layers_config(self.kind, self.fields[_LAYERS])

    def network(self) -> PublishedNetwork:
        """The head's modules, on the meta device."""
        draft_size = self.fields["draft_vocab_size"]
        return _KINDS[self.kind][0](self.layers_config, len(self.layers), draft_size, self.fields)

    def num_weights(self) -> int:
        """How many numbers `load_published` adds to the model's own, copied rows of the model's head among them."""
        network = self.network()
        shapes, stored = network.state_dict(), {name for name, _ in _stored(self.folder)} - network.shared
        copied = {HEAD} if HEAD not in stored and len(self.tokens) < shapes[EMBEDDING].shape[0] else set()
        return sum(tensor.numel() for name, tensor in shapes.items() if name in stored | copied)


def is_published(folder: Path) -> bool:
    """Whether a folder says that it has a head of this format."""
    try:
        return _KIND in read_json(folder / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def describe_published(folder: str | Path, info: ModelInfo) -> PublishedInfo:
    """Find a head, in a folder or by its name on the hub, and check that it can be run for this model.

    Only headers of its files and the map of its vocabulary are read. A card that names the model as the hub does is
    compared with a model that was given by its hub name; a model in a local folder can have any name.

    Raises:
        ValueError: in a line, naming the value and the way out: no head, one for another model, vocabulary or hidden
            size, or fields or tensors that are not understood.
    """
    _, path = find_model(str(folder))
    try:
        kind, fields = _read_card(path)
        _check_model(fields, info)
        config = _layers_config(kind, fields[_LAYERS])
        _check_sizes(fields, config, info)
        layers = _layers(fields, _KINDS[kind][0].LAYERS, info.num_layers)
        parts = {name: file.get_slice(name) for name, file in _stored(path)}
        if config.num_hidden_layers > len(parts):  # before so many are built
            raise ValueError(f"num_hidden_layers={config.num_hidden_layers}, for {len(parts)} tensors; {_AGAIN}")
        tokens = _tokens(path, fields["draft_vocab_size"], info.vocab_size)
        found = PublishedInfo(path, kind, fields, layers, tokens, False, folder_fingerprint(path, "the head"))
        network = found.network()
        _check_tensors(network, {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()})
        found = replace(found, takes_head=HEAD in network.shared or HEAD not in parts)
    except ValueError as error:
        raise ValueError(f"drafter={str(folder)!r}: {error}") from error
    except (OSError, SafetensorError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"drafter={str(folder)!r}: cannot be read ({one_line(error)}); {_AGAIN}") from error
    return found


def load_published(head: PublishedInfo, model: PreTrainedModel) -> PublishedDrafter:
    """The head's drafter beside `model`, which is whole, with its dtype, on its device."""
    network = head.network()
    left_out = {_MARKS, _MAP, *network.shared}
    tensors = {name: file.get_tensor(name) for name, file in _stored(head.folder) if name not in left_out}
    weights = {name: tensor.to(model.device, model.dtype) for name, tensor in tensors.items()}
    network.load_state_dict(weights, strict=False, assign=True)
    network.take_rest(model, head.tokens, {EMBEDDING, HEAD} - weights.keys())
    network.rotary.to(model.device)
    return _KINDS[head.kind][1](network.requires_grad_(False).eval(), head.layers, head.tokens)


def _read_card(folder: Path) -> tuple[str, dict[str, Any]]:
    """The kind of a head, and the fields that are understood, with their defaults."""
    card = read_json(folder / "config.json")
    if (kind := card.get(_KIND)) not in _KINDS:
        kinds = " or ".join(_KINDS)
        raise ValueError(f"config.json has {_KIND}={kind!r:.50}; give a head of {kinds} in the format of speculators")
    own = _KINDS[kind][0].FIELDS
    known = {*own, *_FIELDS, _KINDS[kind][0].LAYERS}
    _check_names("config.json", card, known | _IRRELEVANT | PretrainedConfig().to_dict().keys())
    fields = {"draft_vocab_size": 32000, **own, **{name: card[name] for name in card if name in known}}
    for name, default in own.items():
        if type(fields[name]) is not (default if default is int else type(default)):
            given = None if fields[name] is int else fields[name]
            raise ValueError(f"config.json has {name}={given!r:.50}, which is not understood; {_AGAIN}")
    if fields.get("norm_before_fc") and fields.get("fc_norm"):
        raise ValueError(f"norm_before_fc and fc_norm exclude each other; {_AGAIN}")
    return kind, fields


def _check_names(place: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{place} has {unknown[0]}={given[unknown[0]]!r:.50}, which is not understood; {_AGAIN}")


def _check_model(fields: Mapping[str, Any], info: ModelInfo) -> None:
    """Raise ValueError if a card names another model or another architecture."""
    model = fields["speculators_config"]["verifier"]
    name, made_for = model.get("name_or_path") or "", set(model.get("architectures") or [])
    ours = set(model_config(info.folder).architectures or [])
    if made_for and ours and not made_for & ours:
        raise ValueError(f"was made for {name!r}, a {min(made_for)}, not for a {min(ours)}; {_ANOTHER}")
    on_hub, _, commit = info.name.rpartition("@")
    if commit and name and not Path(info.name).exists() and _last(name) != _last(on_hub):
        raise ValueError(f"was made for {name!r}, not for {info.name!r}; {_ANOTHER}")


def _last(name: str) -> str:
    """What copies of a model have in common."""
    return Path(name).name.lower()


def _check_sizes(fields: Mapping[str, Any], config: PretrainedConfig, info: ModelInfo) -> None:
    size, target = model_config(info.folder).hidden_size, fields.get("target_hidden_size")
    for name, given in (("hidden_size", config.hidden_size), ("target_hidden_size", target or size)):
        if given != size:
            raise ValueError(f"has {name}={given}, the model {size}; {_ANOTHER}")
    if config.vocab_size != info.vocab_size:
        raise ValueError(
            f"is for a vocabulary of {config.vocab_size} tokens, the model's has {info.vocab_size}; {_ANOTHER}"
        )
    for name, least, most in (
        ("draft_vocab_size", 1, info.vocab_size),
        ("mask_token_id", 0, info.vocab_size - 1),
        ("block_size", 2, 1024),
    ):
        if name in fields and (type(fields[name]) is not int or not least <= fields[name] <= most):
            raise ValueError(f"has {name}={fields[name]!r:.50}, not {least} to {most}; {_AGAIN}")


def _layers_config(kind: str, given: Mapping[str, Any]) -> PretrainedConfig:
    """The library's configuration of a head's layers; ValueError for what they cannot be."""
    given = dict(given)
    model_type = given.pop("model_type", "qwen3")
    if model_type not in _KINDS[kind][0].MODEL_TYPES:
        known = " or ".join(_KINDS[kind][0].MODEL_TYPES)
        raise ValueError(f"{_LAYERS} has model_type={model_type!r:.50}; give a head with layers of {known}")
    make = CONFIG_MAPPING[model_type]
    _check_names(_LAYERS, given, make().to_dict().keys() | _OF_LAYERS)
    try:
        config: PretrainedConfig = make(**given, attn_implementation="sdpa")
    except Exception as error:  # a config's own checks raise many kinds
        raise ValueError(f"{_LAYERS} cannot be used: {one_line(error)}; {_AGAIN}") from error
    rotary = config.rope_parameters
    if rotary.get("rope_type") not in _ROTARY:
        raise ValueError(f"{_LAYERS} has rope_type={rotary.get('rope_type')!r:.50}, which is not understood; {_AGAIN}")
    _check_names("rope_parameters", rotary, _ROTARY_FIELDS)
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= {FULL, SLIDING}:
        raise ValueError(f"{_LAYERS} has layer_types={kinds!r:.80}, which is not understood; {_AGAIN}")
    return config


def _layers(fields: Mapping[str, Any], name: str, num_layers: int) -> tuple[int, ...]:
    given = fields.get(name)
    layers = [2, num_layers // 2, num_layers - 3] if given is None else given
    whole = all(type(layer) is int and 1 <= layer <= num_layers for layer in layers)
    if not layers or not whole or layers != sorted({*layers}):
        raise ValueError(f"has {name}={layers!r:.80}, no rising numbers of the model's {num_layers} layers; {_ANOTHER}")
    return tuple(layers)


def _tokens(folder: Path, draft_size: int, vocab_size: int) -> tuple[int, ...]:
    """The model's ids of a head's tokens, from the map of its vocabulary."""
    if draft_size == vocab_size:
        return tuple(range(vocab_size))
    maps = {name: file.get_tensor(name) for name, file in _stored(folder) if name in (_MAP, _MARKS)}
    tokens = (maps[_MAP] + torch.arange(draft_size)).tolist() if len(maps[_MAP]) == draft_size else []
    marked = maps[_MARKS].nonzero().flatten().tolist() if _MARKS in maps else sorted(tokens)
    if sorted({*tokens}) != marked or len(marked) != draft_size or not 0 <= marked[0] <= marked[-1] < vocab_size:
        raise ValueError(f"d2t and t2d do not map {draft_size} tokens into {vocab_size}; {_AGAIN}")
    return tuple(tokens)


def _check_tensors(network: PublishedNetwork, stored: Mapping[str, tuple[str, list[int]]]) -> None:
    """Raise ValueError where a head's files have other tensors than its network; `stored` are dtypes and shapes."""
    expected = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    missing = sorted(expected.keys() - stored.keys() - {EMBEDDING, HEAD})
    unknown = sorted(stored.keys() - expected.keys() - {_MAP, _MARKS})
    if missing or unknown:
        found = f"lack {missing[0]}" if missing else f"have {unknown[0]}, which is not understood"
        raise ValueError(f"its files {found}; {_AGAIN}")
    for name in sorted(expected.keys() & stored.keys() - network.shared):
        dtype, shape = stored[name]
        if shape != expected[name] or dtype not in _FLOATS:
            raise ValueError(f"its files have {name} as {dtype} {shape}, not as floats {expected[name]}; {_AGAIN}")


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    """The names of a head's tensors, and the open files that have them."""
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if not name.startswith(_UNUSED):
                    yield name, file
