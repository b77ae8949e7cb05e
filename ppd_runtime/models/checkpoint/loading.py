"""A folder, hub name or "demo" → its description, its tokenizer, and a model with only the layers asked for."""

import contextlib
import copy
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ppd_runtime.models.checkpoint.dtype import fastest_dtype
from ppd_runtime.models.checkpoint.hub import find_model, one_line
from ppd_runtime.models.checkpoint.weight_cache import kept_copies, map_tensors
from ppd_runtime.models.native import library as native
from ppd_runtime.models.stage.behaviour import (
    attention_masks,
    cache_windows,
    check_cut_layers,
    embedding_scale,
    recomputed_at,
)
from ppd_runtime.models.stage.caches import PreallocatedLayer, SomeLayersCache
from ppd_runtime.models.stage.emulation import EmulatedDevice, EmulatedStage
from ppd_runtime.models.stage.slicing import check_sub_layers
from ppd_runtime.models.stage.stage import FinalHead, Stage, decoder_of, some_layers

logger = logging.getLogger(__name__)
SEVERAL = 0
"""In the place of a number of tokens: two or more, each behind another one of them or behind the text."""
WITHOUT_ATTENTION, WITHOUT_MLP = -2, -3
"""One token through layers with a sub-layer left out."""
HEAD = -4
"""The final norm and the head, over any few tokens."""
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_IN_LARGE_PAGES = 2**30
"""Bytes of weights up to which compiled code gets a copy that Linux maps in large pages, however they are stored."""


@dataclass(frozen=True)
class ModelInfo:
    """What has to be known of a model before any of its weights is read."""

    name: str
    """As it was given; of a hub's model with the commit, `name@commit`."""
    folder: Path
    num_layers: int
    vocab_size: int
    max_positions: int | None
    eos_token_ids: frozenset[int]
    recomputed_at: int | None = None
    """Tokens of a text at which transformers' `generate` drops its cache and reads the text anew; None: never."""


def describe(model: str, needs_weights: bool = True) -> ModelInfo:
    """Find a model and check that it can be run here, without reading its weights.

    Args:
        model: a local folder, a hub name, one with a revision (`name@commit`), or "demo".
        needs_weights: False where its shape and tokenizer are enough.

    Raises:
        ValueError: no such model, no safetensors weights, or an architecture that cannot be cut into stages.
    """
    name, folder = find_model(model)
    config = _read_config(model, folder)
    skeleton = _check_architecture(model, config)
    if needs_weights and not weight_files(folder):
        raise ValueError(f"model {model!r}: {folder} holds no safetensors weights; convert or download them first")
    return ModelInfo(
        name=name,
        folder=folder,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_positions=(most := getattr(config, "max_position_embeddings", None)),
        recomputed_at=_recomputed_at(model, skeleton, most) if most else None,
        eos_token_ids=_eos_token_ids(folder, config),
    )


def load_tokenizer(info: ModelInfo) -> PreTrainedTokenizerBase:
    """The model's tokenizer; raises ValueError where the folder has none."""
    try:
        return AutoTokenizer.from_pretrained(info.folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain ones
        raise ValueError(f"model {info.name!r}: no usable tokenizer in {info.folder}: {one_line(error)}") from error


def load_layers(info: ModelInfo, last: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A causal language model with the embedding, layers 1 to `last` of the original, the final norm and the head.

    Only these tensors are read from the files, mapped into memory; on CPUs in another dtype from a copy of the files
    that is kept, so that all processes of a host share them. With `last` below the model's depth this is what a
    sub-process needs: its first layers, and norm and head for the exit.
    """
    config = first_layers_config(_config(info.folder), last)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    tensors = _read_tensors(info, last, dtype if device == "cpu" else None)
    with no_progress_bar(), errors_only():
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for complaint, names in (
        ("lack", sorted(report["missing_keys"])),
        ("have another shape than config.json says for", sorted(key for key, *_ in report["mismatched_keys"])),
    ):
        if names:
            raise ValueError(f"model {info.name!r}: its files {complaint} {names[0]} ({len(names)} tensors in all)")
    model = model.to(device).eval()
    _check_cuts(info, model)
    return model


def new_model(info: ModelInfo, seed: int, device: str) -> PreTrainedModel:
    """A model of the same shape with freshly drawn weights, in float32."""
    config = _config(info.folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    model = model.to(device).eval()
    _check_cuts(info, model)
    return model


def load_stage(
    info: ModelInfo,
    last: int,
    dtype: torch.dtype,
    device: str,
    code: Mapping[int, Sequence[Path]] | None = None,
    emulate: EmulatedDevice | None = None,
) -> Stage:
    """`load_layers` as a stage; with `code`, as `compile_ahead` gives it, passes over few tokens run that."""
    model = load_layers(info, last, dtype, device)
    compiled = None
    if code:
        from ppd_runtime.models.compiled.passes import CompiledLayers  # only compiled code needs all that it imports

        shares_halves = dtype == torch.float32 and device == "cpu"
        compiled = CompiledLayers(model, code, _halves(info, last) if shares_halves else {})
    return EmulatedStage(model, compiled, emulate) if emulate else Stage(model, compiled)


def share_weights(info: ModelInfo, dtype: torch.dtype, device: str, compiled: bool) -> None:
    """Make the copies of weights that `load_stage` maps into memory, before processes with deadlines do so."""
    if device == "cpu":
        _kept_copies(info, dtype)
        if compiled and dtype == torch.float32:
            _kept_halves(info)


def _kept_copies(info: ModelInfo, dtype: torch.dtype) -> dict[Path, Path]:
    """Of the model's files in another dtype than they have."""
    may_round = partial(_rounds_everything, info, dtype)
    return kept_copies(weight_files(info.folder), dtype, partial(_names, info), may_round=may_round)


def _rounds_everything(info: ModelInfo, dtype: torch.dtype) -> bool:
    """Whether the library loads each of the model's tensors in `dtype`; some architectures keep a few in float32."""
    skeleton = _skeleton(_config(info.folder), info.num_layers, dtype)
    kept = (getattr(skeleton, f"_keep_in_fp32_modules{kind}", "a name of other versions") for kind in ("", "_strict"))
    return not any(kept) and all(t.dtype == dtype for t in skeleton.state_dict().values() if t.is_floating_point())


def _kept_halves(info: ModelInfo) -> dict[Path, Path]:
    """Of files that are in bfloat16 anyway, for compiled code to read in large pages."""
    files, order = weight_files(info.folder), partial(_names, info)
    return kept_copies(files, torch.bfloat16, order, _MOST_IN_LARGE_PAGES, even_as_stored=True)


def _halves(info: ModelInfo, last: int) -> dict[str, Tensor]:
    """The first layers' tensors in bfloat16 as all processes share them, where they are stored that way."""
    copies = _kept_halves(info)
    tensors = [pair for path in weight_files(info.folder) for pair in _first_layers(path, copies.get(path), last)]
    return {name: tensor for name, tensor in tensors if tensor.dtype == torch.bfloat16}


def compile_ahead(
    info: ModelInfo, dtype: torch.dtype, device: str, passes: Iterable[int] = (1,)
) -> dict[int, tuple[Path, ...]]:
    """Each layer's file of compiled code for passes over so many tokens, or over `SEVERAL`, and the `HEAD`'s alone
    where it is compiled; makes those that no earlier run has made.

    Raises:
        ValueError: where the model cannot be compiled, or not on this machine.
    """
    # only compiled code needs all that it imports
    from ppd_runtime.models.compiled.export import compile_head, compile_layers

    config, place = _config(info.folder), torch.device(device)
    code = {kind: tuple(compile_layers(config, dtype, place, kind)) for kind in passes}
    head = compile_head(config, dtype, place)
    return code | {HEAD: (head,)} if head else code


def first_layers_config(config: PretrainedConfig, last: int) -> PretrainedConfig:
    """The configuration of the same model cut off after layer `last`."""
    config = copy.deepcopy(config)
    full = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == full and "layer" in name:
            setattr(config, name, value[:last])
    config.num_hidden_layers = last
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, in a fixed order; empty where there are none."""
    index = folder / _INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"model {str(folder)!r}: {index.name} has no weight_map")
        return [folder / name for name in sorted(set(weight_map.values()))]
    return [folder / _SINGLE] if (folder / _SINGLE).exists() else []


def choose_device(device: str) -> str:
    """The device that "auto" stands for: a GPU where PyTorch sees one; raises ValueError for a GPU it does not see."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: PyTorch sees no GPU here; choose cpu or auto")
    return device


def choose_dtype(dtype: str, device: str, info: ModelInfo, threads: int = 1, *, compiled: bool = False) -> torch.dtype:
    """The dtype that "auto" stands for: the model's own on GPUs; on CPUs `fastest_dtype`, which is kept on disk.

    Not measured at each start: two starts on a busy machine could differ, and with them the tokens. A model stored in
    bfloat16 is compiled in float32 where products are our own, which read as little then.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    config = _config(info.folder)
    chosen = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    if device == "cpu":
        layer = _skeleton(config, 1).model.layers[0]
        own_products = compiled and native.is_available(torch.device(device), torch.float32)
        matrices = all(weight.dim() <= 2 for weight in layer.parameters())  # experts are stacked, and not ours
        if own_products and matrices and config.dtype == torch.bfloat16:
            chosen = torch.float32
        else:
            chosen = fastest_dtype(layer, info.num_layers, config.dtype, threads)
    logger.info("dtype auto: %s on %s", str(chosen).removeprefix("torch."), device)
    return chosen


def _config(folder: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)  # else transformers asks whoever sits there


def _read_config(model: str, folder: Path) -> PretrainedConfig:
    if _needs_own_code(folder):
        raise ValueError(
            f"model {model!r}: its config.json asks for code of its own (auto_map), which is never run; "
            "give a model whose architecture transformers itself has"
        )
    try:
        return _config(folder)
    except Exception as error:  # a config's own checks raise many kinds
        raise ValueError(f"model {model!r}: no usable config.json in {folder}: {one_line(error)}") from error


def _needs_own_code(folder: Path) -> bool:
    try:
        fields = _read_json(folder / "config.json")
    except ValueError:
        return False
    return "auto_map" in fields and fields.get("model_type") not in CONFIG_MAPPING


def _check_architecture(model: str, config: PretrainedConfig) -> PreTrainedModel:
    """A skeleton of the model, with a layer of each kind; ValueError for one that cannot be cut into stages."""
    refuse = f"model {model!r} ({config.model_type}): "
    needed = "a decoder with `model.layers`, `model.norm` and `lm_head` is needed, such as Llama, Mistral or Qwen"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{refuse}an encoder-decoder cannot be pipelined here; {needed}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "num_hidden_layers"):
        raise ValueError(f"{refuse}not a causal language model; {needed}")
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{refuse}its weights are quantised; give the model in float32, bfloat16 or float16")
    try:
        windows = cache_windows(config)
        skeleton, deeper = _skeleton(config, 1), _skeleton(config, _depth_of_all_kinds(config, windows))
    except Exception as error:  # every architecture checks its settings in its own way
        raise ValueError(f"{refuse}cannot be built from its config.json: {one_line(error)}") from error
    base = getattr(skeleton, "model", None)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise ValueError(f"{refuse}{needed}")
    if not hasattr(base, "norm") or not hasattr(skeleton, "lm_head"):
        raise ValueError(f"{refuse}{needed}")
    if _constants(layers[0]) != _constants(deeper.model.layers[0]):
        raise ValueError(f"{refuse}what a layer computes depends on how many there are, so they cannot be cut")
    try:
        scale = embedding_scale(deeper)
        _check_layers(deeper, windows, scale)
    except Exception as error:  # every architecture asks for its own inputs
        raise ValueError(f"{refuse}its layers cannot run one by one: {one_line(error)}; {needed}") from error
    return deeper


def _recomputed_at(model: str, skeleton: PreTrainedModel, most_tokens: int) -> int | None:
    try:
        return recomputed_at(skeleton, most_tokens)
    except Exception as error:  # every architecture prepares its inputs in its own way
        kind, reason = skeleton.config.model_type, one_line(error)
        raise ValueError(f"model {model!r} ({kind}): does not say how it goes on with a text: {reason}") from error


def check_leaving_out(info: ModelInfo, user: str) -> None:
    """Raise ValueError where attentions and MLPs of the model cannot be left out, as `user` would; reads no weights."""
    config = _config(info.folder)
    try:
        check_sub_layers(_skeleton(config, _depth_of_all_kinds(config, cache_windows(config))))
    except ValueError as error:
        raise ValueError(
            f"{user} cannot run model {info.name!r} ({config.model_type}): {error}; choose another method"
        ) from error


def _depth_of_all_kinds(config: PretrainedConfig, windows: Sequence[int | None]) -> int:
    """Layers up to the first one of the last kind; 2 at least, if there are so many."""
    names = getattr(config, "layer_types", None) or [""] * len(windows)
    kinds = list(zip(names, windows, strict=False))
    return min(len(windows), max(2, *(1 + kinds.index(kind) for kind in set(kinds))))


def _check_layers(skeleton: PreTrainedModel, windows: Sequence[int | None], scale: str | None) -> None:
    """Refuse layers that a token's pass cannot run one by one, from hidden states and a cache alone."""
    layers = skeleton.model.layers
    position = 1 + max(window or 1 for window in windows)
    cache = DynamicCache(config=skeleton.config)
    for layer in cache.layers:
        entries = torch.zeros(1, 1, position, 1, device="cpu")
        layer.update(entries, entries)
    kinds = getattr(skeleton.config, "layer_types", None) or ["one kind"] * len(layers)
    for kind, mask in zip(kinds, attention_masks(skeleton, cache, 1, position), strict=True):
        if mask is not None and not mask.all():
            raise ValueError(f"in layers of {kind} a token attends to less than their caches hold")
    check_cut_layers(skeleton, lambda decoder, number: some_layers(decoder, [number]))
    states = torch.zeros(1, 1, skeleton.config.hidden_size, device="meta", dtype=skeleton.dtype)
    for number, layer in enumerate(layers):
        view = SomeLayersCache([PreallocatedLayer(1, windows[number])], [number])
        piece = decoder_of(skeleton, {number: layer}, scale)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without numbers experts cannot be chosen
            piece(inputs_embeds=states, past_key_values=view, use_cache=True)
    FinalHead(skeleton).module(inputs_embeds=states, use_cache=False)


def _skeleton(config: PretrainedConfig, num_layers: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The first layers without their weights."""
    with torch.device("meta"):
        cut = first_layers_config(config, num_layers)
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(cut, **({"dtype": dtype} if dtype else {}))


def _constants(layer: nn.Module) -> dict[tuple[str, str], float]:
    """The numbers that a layer's modules were built with."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float)
    }


def _check_cuts(info: ModelInfo, model: PreTrainedModel) -> None:
    """Refuse a decoder whose pass does more than embed, run layers and norm: a cut would lose or repeat that."""
    probe = torch.linspace(-1, 1, model.config.hidden_size, device=model.device, dtype=model.dtype).view(1, 1, -1)
    bare = decoder_of(model, {}, embedding_scale(model))
    bare.norm = model.model.norm
    with torch.inference_mode():
        normed = bare(inputs_embeds=probe, use_cache=False).last_hidden_state
        if not torch.equal(normed, model.model.norm(probe)):
            raise ValueError(f"model {info.name!r} does more than run layers and a final norm, so it cannot be cut")


def _eos_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids = generation.get("eos_token_id", config.eos_token_id)
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset([ids])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model {str(path.parent)!r}: {path.name} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model {str(path.parent)!r}: {path.name} holds no JSON object")
    return content


def _read_tensors(info: ModelInfo, last: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of the first layers; in `dtype` where copies are kept, else as they are stored."""
    tensors = dict[str, Tensor]()
    copies = _kept_copies(info, dtype) if dtype else {}
    for path in weight_files(info.folder):
        try:
            tensors |= _first_layers(path, copies.get(path), last)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model {info.name!r}: {path.name} cannot be read: {one_line(error)}") from error
    return tensors


def _names(info: ModelInfo) -> list[str]:
    """The model's tensors in the order in which a pass reads them."""
    return list(_skeleton(_config(info.folder), info.num_layers).state_dict())


def _first_layers(path: Path, copy: Path | None, last: int) -> Iterator[tuple[str, Tensor]]:
    """A file's tensors up to layer `last`, mapped into memory: the copy's where there is one."""
    if copy:
        try:
            mapped = dict(map_tensors(copy))
        except (OSError, ValueError) as error:
            logger.warning("reading %s itself, for its copy cannot be: %s", path, one_line(error))
        else:
            yield from ((name, tensor) for name, tensor in mapped.items() if _layer_number(name) < last)
            return
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            if _layer_number(name) < last:
                yield name, file.get_tensor(name)


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """None of transformers' advice, such as its table of missing tensors, which `load_layers` says in one line."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """A stage loads in a moment, and k + 1 bars at once help nobody; the caller's own setting comes back."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _layer_number(tensor_name: str) -> int:
    """The layer a tensor belongs to, -1 for the embedding, norm and head."""
    parts = tensor_name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdecimal() else -1
