"""What each device holds of a model, in bytes: weights, and the keys and values of so many tokens.

The paper's layout has the whole model in the main process, and layers 1 to d − d̄, the embedding and an exit head in
each of its W sub-processes: d + W(d − d̄) layers. Stages have each layer in one place, the embedding in the first one,
and a head in every one: the final one, or its boundary's. Tensor parallelism on N devices has 1/N of every layer on
each, and the embedding and the head whole, as in gpt-fast. Every layer holds the keys and values of the tokens that it
has run. Activations, candidates' entries and what a process takes besides are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppd_runtime.checks import check_bool, check_number, check_whole, stage_layers

GB, _MB, _KB = 1e9, 1e6, 1e3
USUAL_TOKENS = 4096


@dataclass(frozen=True)
class Memory:
    """What a model's parts take, and what a device has, in bytes.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    layer: float
    """A layer's weights."""
    head: float = 0.0
    """The final head's weights."""
    entry: float = 0.0
    """One token's keys and values in one layer."""
    device: float | None = None
    """What a device has; None: unknown, and everything fits."""
    tied: bool = False
    """Whether the embedding and the final head are one matrix, which a process with both holds once."""
    shared: bool = False
    """Whether all devices are one host's cores: `device` is the host's memory, and processes map one copy of the
    weights."""
    tokens: int = USUAL_TOKENS
    """Tokens of all requests at once, prompts' and new ones, whose keys and values are kept."""
    embedding: float | None = None
    """The embedding's weights, which stay floats where the head's have few bits; None: as large as the head's."""

    def __post_init__(self) -> None:
        for name in ("layer", "head", "entry"):
            check_number(name, getattr(self, name))
        for name in ("device", "embedding"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value)
        check_whole("tokens", self.tokens, 1)
        check_bool("tied", self.tied)
        check_bool("shared", self.shared)

    def process(self, layers: float, embeds: bool = True) -> tuple[float, float]:
        """Weights and entries of a process with a head and so many layers, and with the embedding if it `embeds`."""
        embedding = self.head if self.embedding is None else self.embedding
        beside = self.head + (embedding if embeds and not self.tied else 0)
        return layers * self.layer + beside, layers * self.entry * self.tokens

    def needed(self, processes: Sequence[tuple[float, float]], num_layers: int) -> float:
        """What the fullest device has to hold; where devices share a memory, what all hold together."""
        if self.shared:
            weights, _ = self.process(num_layers)
            return weights + sum(entries for _, entries in processes)
        return max(weights + entries for weights, entries in processes)

    def ordinary(self, num_layers: int) -> float:
        """Ordinary decoding's."""
        return self.needed([self.process(num_layers)], num_layers)

    def paper(self, num_layers: int, exit_layer: int, workers: int) -> float:
        """The paper's layout's: the main process has the fullest device."""
        subs = [self.process(num_layers - exit_layer)] * workers
        return self.needed([self.process(num_layers), *subs], num_layers)

    def stages(self, num_layers: int, cuts: Sequence[int]) -> float:
        """The staged layout's."""
        layers = stage_layers(num_layers, cuts)
        return self.needed([self.process(n, embeds=not stage) for stage, n in enumerate(layers)], num_layers)

    def parallel(self, num_layers: int, devices: int) -> float:
        """Tensor parallelism's."""
        return self.needed([self.process(num_layers / devices)] * devices, num_layers)


@dataclass(frozen=True)
class GivenMemory:
    """What is given of a `Memory`, in place of what was measured.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    memory_gb: float | None = None
    """Memory of a device in GB; default: this machine's, where something is measured."""
    layer_mb: float | None = None
    """Weights of a layer in MB, instead of measuring them."""
    head_mb: float | None = None
    """Weights of the final head in MB, and of the embedding, each."""
    entry_kb: float | None = None
    """Keys and values of a token in a layer in KB."""
    cache_tokens: int | None = None
    """Tokens whose keys and values are kept, of all requests at once; default: 4096."""

    def __post_init__(self) -> None:
        for name in ("memory_gb", "layer_mb", "head_mb", "entry_kb"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value)
        for name in ("memory_gb", "layer_mb"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}=0: give a number above 0")
        if self.cache_tokens is not None:
            check_whole("cache_tokens", self.cache_tokens, 1)

    def over(self, measured: Memory | None) -> Memory | None:
        """What was measured with this in its place; None where neither says how large a layer is.

        Raises:
            ValueError: for a memory that nothing can be held against.
        """
        given = {"layer": (self.layer_mb, _MB), "head": (self.head_mb, _MB), "entry": (self.entry_kb, _KB)}
        sizes: dict[str, Any] = {name: value * unit for name, (value, unit) in given.items() if value is not None}
        if measured is None and "layer" not in sizes:
            for name in ("memory_gb", "head_mb", "entry_kb"):
                if (value := getattr(self, name)) is not None:
                    way_out = "give a layer's size too, or leave a time out to have the model measured"
                    raise ValueError(f"{name}={value:g}: nothing says how large a layer is; {way_out}")
            return None
        if "head" in sizes:
            sizes["embedding"] = None  # which has the head's size then
        memory = replace(measured, **sizes) if measured else Memory(**sizes)
        if self.cache_tokens is not None:
            memory = replace(memory, tokens=self.cache_tokens)
        if self.memory_gb is not None:
            memory = replace(memory, device=self.memory_gb * GB, shared=False)
        return memory
