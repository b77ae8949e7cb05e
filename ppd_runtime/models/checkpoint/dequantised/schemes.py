"""What a `quantization_config` says about how weights are stored."""

from collections.abc import Callable, Mapping
from typing import Any

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
    """Of DeepSeek, Qwen and others: floats of eight bits; a scale for each block, or for the matrix."""
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
    """Of the library compressed-tensors: one way for all groups of modules."""
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
    eight = way["num_bits"] == 8 and way["symmetric"] is not False and way["type"] in _KINDS
    if form not in _FORMS or not eight:
        bits = f"{form} of {way['num_bits']} bits ({way['type']}, symmetric={way['symmetric']})"
        raise refused(settings, "format", bits)
    return Scaled(_KINDS[way["type"]], _strategy(settings, way))


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
_FORMS = ("float-quantized", "naive-quantized", "int-quantized")
_KINDS = {"float": EIGHT_BIT_FLOATS[:1], "int": ("I8",)}
_METHODS: Mapping[str, Callable[[Settings], Scheme]] = {"fp8": _fp8, "compressed-tensors": _compressed_tensors}
