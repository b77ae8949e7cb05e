"""What a `quantization_config` says about how weights are stored."""

from collections.abc import Callable, Mapping
from typing import Any

from ppd_runtime.models.checkpoint.dequantised.mxfp4 import Mxfp4
from ppd_runtime.models.checkpoint.dequantised.packed import Awq, CompressedTensors, Gptq
from ppd_runtime.models.checkpoint.dequantised.scaled import EIGHT_BIT_FLOATS, Scaled
from ppd_runtime.models.checkpoint.dequantised.stored import Scheme

Settings = Mapping[str, Any]


def scheme_of(settings: Any) -> Scheme:
    """How weights are stored by `settings`, the content of a `quantization_config`.

    Raises:
        ValueError: for a way that is not read, in words that follow a model's name.
    """
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(_METHODS)
        raise ValueError(f"its weights are quantised by {method or 'another program'}, which is not read ({known} are)")
    return _METHODS[method](settings)


def whole(settings: Settings, name: str, least: int, default: int | None = None) -> int:
    """A whole number of the settings, `least` or more."""
    found = settings.get(name, default)
    if type(found) is not int or found < least:
        raise ValueError(f"its quantization_config has {name}={found!r:.40}, not a whole number from {least} on")
    return found


def refused(settings: Settings, name: str, found: object) -> ValueError:
    """The error for a field's value that is not read."""
    return ValueError(f"its weights are quantised by {settings['quant_method']} with {name}={found!r:.60}, not read")


def _fp8(settings: Settings) -> Scheme:
    """The scheme of DeepSeek, Qwen and others: floats of eight bits; a scale for each block, or for the matrix."""
    if (fmt := settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise refused(settings, "fmt", fmt)
    return Scaled(EIGHT_BIT_FLOATS[:1], _block(settings, settings.get("weight_block_size")))


def _block(settings: Settings, block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise refused(settings, "weight_block_size", block)
    return block[0], block[1]


def _compressed_tensors(settings: Settings) -> Scheme:
    """The schemes of the library compressed-tensors: one way for all groups of modules."""
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refused(settings, "sparsity_config", sparsity)
    if transforms := settings.get("transform_config"):
        raise refused(settings, "transform_config", transforms)
    groups = settings.get("config_groups")
    found = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not found or not all(isinstance(weights, dict) for weights in found):
        raise refused(settings, "config_groups", groups)
    ways = [{name: weights.get(name) for name in _OF_WEIGHTS} for weights in found]
    if any(way != ways[0] for way in ways):
        raise refused(settings, "config_groups", "several ways")
    way, form = ways[0], settings.get("format")
    if form == "pack-quantized" and way["type"] == "int" and way["num_bits"] in (4, 8):
        return _pack_quantized(settings, way)
    if form not in _FORMS or way["num_bits"] != 8 or way["symmetric"] is False or way["type"] not in _KINDS:
        described = f"{form} of {way['num_bits']} bits ({way['type']}, symmetric={way['symmetric']})"
        raise refused(settings, "format", described)
    return Scaled(_KINDS[way["type"]], _strategy(settings, way))


def _pack_quantized(settings: Settings, way: Settings) -> Scheme:
    if way["strategy"] not in ("channel", "group"):
        raise refused(settings, "strategy", way["strategy"])
    if (order := way["actorder"]) not in (None, False, "weight", "static", *_REORDERS):
        raise refused(settings, "actorder", order)
    block = _strategy(settings, way)
    group = block[1] if block else None
    return CompressedTensors(way["num_bits"], group, way["symmetric"] is False, order in _REORDERS)


def _gptq(settings: Settings) -> Scheme:
    """The scheme of GPTQ's programs."""
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise refused(settings, "checkpoint_format", "marlin" if settings.get("is_marlin_format") else form)
    if (bits := settings.get("bits")) not in (2, 4, 8):
        raise refused(settings, "bits", bits)
    for name, usual in (("dynamic", ({}, [])), ("pack_dtype", ("int32",))):
        if (found := settings.get(name)) is not None and found not in usual:
            raise refused(settings, name, found)
    reorders = settings.get("desc_act", False) is not False
    return Gptq(bits, _group(settings, settings.get("group_size")), form == "gptq", reorders)


def _awq(settings: Settings) -> Scheme:
    """The scheme of AWQ's programs, whose fields have two names each."""
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise refused(settings, "version", form)
    if (bits := settings.get("bits", settings.get("w_bit"))) != 4:
        raise refused(settings, "bits", bits)
    return Awq(_group(settings, settings.get("group_size", settings.get("q_group_size"))))


def _group(settings: Settings, size: Any) -> int | None:
    """Inputs of a group; None for −1, which stands for all."""
    if type(size) is not int or (size < 1 and size != -1):
        raise refused(settings, "group_size", size)
    return None if size == -1 else size


def _strategy(settings: Settings, way: Settings) -> tuple[int, int] | None:
    """The block of a way's scales."""
    if way["strategy"] in ("tensor", "channel"):
        return None
    if way["strategy"] == "group":
        return 1, whole(way, "group_size", 1)
    if way["strategy"] == "block":
        return _block(settings, way["block_structure"])
    raise refused(settings, "strategy", way["strategy"])


_OF_WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder")
_REORDERS = ("group", "dynamic", True)
"""Orders of activations whose groups are not of neighbouring inputs."""
_FORMS = ("float-quantized", "naive-quantized", "int-quantized")
_KINDS = {"float": EIGHT_BIT_FLOATS[:1], "int": ("I8",)}
_METHODS: Mapping[str, Callable[[Settings], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda _: Mxfp4(),
}
