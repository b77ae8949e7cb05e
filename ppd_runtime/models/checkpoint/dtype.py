"""Measures once which dtype is fastest for one-token passes of a model's shapes on this CPU; keeps the result."""

import contextlib
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ppd_runtime.files.cache_folder import capabilities, with_way_out
from ppd_runtime.files.findings import kept_finding
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.native import library as native
from ppd_runtime.models.stage.decoder_parts import decoder_in

logger = logging.getLogger(__name__)
CLEARLY_FASTER = 1.2
"""float32 stays unless the other dtype's products are this much faster."""
_MOST_WEIGHTS = 32 * 2**20  # 192 MiB in both dtypes
_MOST_SECONDS, _MOST_ROUNDS, _LEAST_ROUNDS = 0.12, 25, 3
Shape = tuple[int, int]
"""Outputs and inputs of a linear layer."""


def fastest_dtype(layer: nn.Module, num_layers: int, stored: torch.dtype, threads: int) -> torch.dtype:
    """float32, or the half precision `stored` if that is clearly faster for one token.

    The first process that asks measures, and others read its result: two starts never differ. If it cannot be kept, it
    is float32.

    Args:
        layer: one of the model's `num_layers`; only its linear layers' shapes count, it may be on the meta device.
        stored: the dtype of the model's files.
        threads: CPU threads for a matrix product.
    """
    shapes = [(m.out_features, m.in_features) for m in layer.modules() if isinstance(m, nn.Linear)]
    if stored not in (torch.bfloat16, torch.float16) or not shapes:
        return torch.float32
    try:
        ratio = _kept_ratio(shapes, num_layers, stored, threads)
    except (OSError, ValueError) as error:
        logger.warning("dtype auto: float32, because no finding can be kept: %s", with_way_out(error))
        return torch.float32
    logger.info("dtype auto: %s products with one token are %.2f times as fast as float32's", stored, ratio)
    return stored if ratio > CLEARLY_FASTER else torch.float32


def measure_ratio(shapes: Sequence[Shape], num_layers: int, stored: torch.dtype, threads: int) -> float:
    """Time of one-token products of all `shapes` in float32 over that in `stored`.

    A round reads the weights of as many layers as the model has, or as fit in 192 MiB, so that caches help it as much
    as the model. Takes some 0.2 s.
    """
    with cpu_threads(threads):
        return _ratio(*(_weights(shapes, num_layers, dtype) for dtype in (torch.float32, stored)))


@contextlib.contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Use `number` threads for matrix products in the block: more wait for each other on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kept_ratio(shapes: Sequence[Shape], num_layers: int, stored: torch.dtype, threads: int) -> float:
    about = {
        "machine": [platform.machine(), *capabilities(torch.device("cpu"))],
        "torch": torch.__version__,
        "shapes": shapes,
        "layers": num_layers,
        "dtype": str(stored),
        "threads": threads,
    }
    measure = partial(measure_ratio, shapes, num_layers, stored, threads)
    (ratio,) = kept_finding("dtype", about, ["float32_over_dtype"], lambda: [measure()])
    return ratio


def _weights(shapes: Sequence[Shape], num_layers: int, dtype: torch.dtype) -> list[Tensor]:
    """Weights of as many layers as fit; of a layer that is too large, as many outputs as fit."""
    size = sum(outputs * inputs for outputs, inputs in shapes)
    share = min(1.0, _MOST_WEIGHTS / size)
    repeats = max(1, min(num_layers, _MOST_WEIGHTS // size))
    return [
        torch.full((max(1, int(outputs * share)), inputs), 0.01, dtype=dtype)
        for _ in range(repeats)
        for outputs, inputs in shapes
    ]


@torch.inference_mode()
def _ratio(plain: list[Tensor], half: list[Tensor]) -> float:
    """Ratio of the shortest rounds, taken in turn: other work on this machine only ever adds time."""
    began = time.perf_counter()
    rounds: list[tuple[float, float]] = []
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - began < _MOST_SECONDS):
        rounds.append((_round_seconds(plain), _round_seconds(half)))
    return min(seconds for seconds, _ in rounds) / min(seconds for _, seconds in rounds)


def _round_seconds(weights: list[Tensor]) -> float:
    vectors = [torch.ones(1, 1, weight.shape[1], dtype=weight.dtype) for weight in weights]
    began = time.perf_counter()
    for weight, vector in zip(weights, vectors, strict=True):
        linear(vector, weight)
    return time.perf_counter() - began


def choose_device(device: str, weights: str | None = None, name: str = "device") -> str:
    """The device for "auto": a GPU if PyTorch sees one, but a CPU for `weights` of few bits, whose products run on
    CPUs; raises ValueError for a GPU that it does not see. `name` is the setting's."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() and not weights else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{name}={device!r}: PyTorch sees no GPU here; choose cpu or auto")
    number = torch.device(device).index
    if number is not None and number >= (count := torch.cuda.device_count()):
        there = "one GPU" if count == 1 else f"{count} GPUs"
        last = "" if count == 1 else f" to cuda:{count - 1}"
        raise ValueError(f"{name}={device!r}: PyTorch sees {there} here; choose cuda:0{last}, or cuda")
    return device


def choose_dtype(dtype: str, device: str, info: ModelInfo, threads: int = 1, *, compiled: bool = False) -> torch.dtype:
    """The dtype that "auto" stands for: the model's own on GPUs; on CPUs `fastest_dtype`, which is kept on disk.

    Two starts on a busy machine could measure different dtypes, and so give different tokens. A model stored in
    bfloat16 is compiled in float32 if products are our own, which then read as few bytes.
    """
    if info.weights:
        return _of_quantised(info.weights, dtype, device)
    if dtype != "auto":
        return getattr(torch, dtype)
    config = model_config(info.folder)
    chosen = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    if device == "cpu":
        layer = decoder_in(skeleton_of(config, 1)).layers[0]
        own_products = compiled and native.is_available(torch.device(device), torch.float32)
        matrices = all(weight.dim() <= 2 for weight in layer.parameters())  # experts would take more memory
        if own_products and matrices and config.dtype == torch.bfloat16:
            chosen = torch.float32
        else:
            chosen = fastest_dtype(layer, info.num_layers, config.dtype, threads)
    logger.info("dtype auto: %s on %s", str(chosen).removeprefix("torch."), device)
    return chosen


def _of_quantised(weights: str, dtype: str, device: str) -> torch.dtype:
    """float32, the dtype of states if weights have few bits; ValueError for another dtype or device."""
    if dtype not in ("auto", "float32"):
        raise ValueError(f"dtype={dtype!r} with weights={weights!r}: its states are in float32, drop one")
    if device != "cpu":
        raise ValueError(f"device={device!r} with weights={weights!r}, whose products run on CPUs: drop one")
    return torch.float32
