"""Settings, frozen and checked where they are made: how a runtime is laid out, and how one call samples."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSPORTS = ("auto", "local", "unix", "zeromq", "collective")
LAUNCHERS = ("ray", "processes")
PLACEMENTS = ("auto", "pack", "spread", "strict-pack", "strict-spread")
MOST_STOPS, MOST_STOP_CHARACTERS = 1000, 2**16
_MOST = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # far below, logits divided by it are no longer finite


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one call are chosen and when it stops.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this share of the probability, in (0, 1]."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the prompt or text become less likely."""
    seed: int = 0
    """Key of the shared noise; the same seed gives the same text, whatever the layout."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the result's text."""
    ignore_eos: bool = False
    """Go on after an end-of-text token."""

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, 1, _MOST)
        _check_int("top_k", self.top_k, 0, _MOST)
        _check_int("seed", self.seed, 0, 2**64 - 1)
        temperatures = f"0, or {_LOWEST_TEMPERATURE} or more"
        _check_float("temperature", self.temperature, lambda t: t == 0 or t >= _LOWEST_TEMPERATURE, temperatures)
        _check_float("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]")
        _check_float("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0")
        if not isinstance(self.stop, tuple) or not all(_is_stop_text(text) for text in self.stop):
            most = MOST_STOP_CHARACTERS
            raise ValueError(f"stop={self.stop!r:.200}: give a tuple of texts of 1 to {most} Unicode characters")
        if len(self.stop) > MOST_STOPS:
            raise ValueError(f"stop={self.stop!r:.100}…: {len(self.stop)} texts, give at most {MOST_STOPS}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One text, several or none as the tuple that `SamplingParams` holds."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


@dataclass(frozen=True)
class RuntimeConfig:
    """How the processes are laid out; what depends on the model is checked by `check_against`.

    Raises:
        ValueError: naming the value and the way out.
    """

    model: str = "demo"
    """A local folder, a hub name, or "demo" for the embedded model."""
    k: int = 3
    """Early candidates for each token."""
    exit_layer: int | None = None
    """The layer after which the next token is predicted early; None is half depth, rounded up."""
    workers: int | None = None
    """Sub-processes, at most k; None is one for each candidate. Fewer run their share of them as one pass."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: float32 on CPUs, the model's own on GPUs."""
    device: str = "auto"
    """cpu, cuda, or auto: GPUs where there are any."""
    transport: str = "auto"
    """local (threads of one process), unix or zeromq (sockets between processes), collective (tensors from device to
    device), or auto: collective where each worker has a GPU of its own, else zeromq between hosts and unix on one."""
    ray_address: str | None = None
    """A running Ray cluster; None starts one on this machine, for this runtime alone."""
    threads_per_worker: int = 1
    """CPU threads for one worker's matrix products."""
    compile: bool = False
    """Run one-token passes in compiled code; the first time takes a while, then it is kept on disk."""
    run_ahead: bool = True
    """Let a lone sub-process (k=1, exit at half depth) go on without waiting for exit states."""
    max_restarts: int = 3
    """New lives for a lost worker in a row, before it is given up; a main process that is given up is an error."""
    bind_interface: str | None = None
    """An IP address of this host: workers reach each other over TCP, encrypted, and not over sockets in a folder."""
    launcher: str = "ray"
    """ray (actors, on a node of our own or a cluster's) or processes (plain ones of this host, without Ray)."""
    placement: str = "auto"
    """Where Ray puts the workers: auto (on one host where they fit), pack, spread, strict-pack or strict-spread."""
    placement_timeout_s: float = 0.0
    """Seconds to wait for room in a Ray cluster, as one with an autoscaler makes; 0: too little is an error at once."""
    gpus_per_worker: float | None = None
    """GPUs of a Ray cluster for each worker, 0.5: two share one; None: one, on a node of our own what there is."""

    def __post_init__(self) -> None:
        _check_int("k", self.k, 1)
        _check_int("threads_per_worker", self.threads_per_worker, 1)
        _check_int("max_restarts", self.max_restarts, 0)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r}: give a folder, a hub name or 'demo'")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_choice("launcher", self.launcher, LAUNCHERS)
        self._check_placement()
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r}: choose auto, cpu, cuda or cuda:<number>")
        for name in ("compile", "run_ahead"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r}: give True or False")
        if self.workers is not None:
            _check_int("workers", self.workers, 1)
            if self.workers > self.k:
                raise ValueError(
                    f"workers={self.workers} with k={self.k}: a worker needs a candidate, give {self.k} or fewer"
                )
        if self.ray_address is not None and self.transport == "local":
            raise ValueError(f"ray_address={self.ray_address!r} with transport='local', which uses no Ray: drop one")
        if self.ray_address is not None and self.launcher == "processes":
            raise ValueError(f"ray_address={self.ray_address!r} with launcher='processes', without Ray: drop one")
        if self.bind_interface is not None and self.transport not in ("auto", "zeromq", "collective"):
            raise ValueError(
                f"bind_interface={self.bind_interface!r} with transport={self.transport!r}, which stays on one host: "
                "choose transport auto, zeromq or collective"
            )
        if self.launcher == "processes" and self.transport == "local":
            raise ValueError("launcher='processes' with transport='local', which runs threads: drop one")

    def _check_placement(self) -> None:
        _check_choice("placement", self.placement, PLACEMENTS)
        _check_float("placement_timeout_s", self.placement_timeout_s, lambda seconds: seconds >= 0, "0 or more")
        if self.gpus_per_worker is not None:
            range_text = "above 0, and whole from 1 on"
            _check_float(
                "gpus_per_worker", self.gpus_per_worker, lambda g: 0.001 <= g <= 1 or g == int(g) > 0, range_text
            )
        if self.placement != "auto" and (self.launcher != "ray" or self.transport == "local"):
            raise ValueError(
                f"placement={self.placement!r} is for Ray's workers: drop it, or the launcher or transport"
            )
        if "spread" in self.placement and self.one_host:
            raise ValueError(
                f"placement={self.placement!r} with bind_interface={self.bind_interface!r}, where only processes of "
                "this host reach each other: give bind_interface an address that others know, or choose auto or pack"
            )

    @property
    def one_host(self) -> bool:
        """Whether only processes of this host reach each other."""
        interface = self.bind_interface
        return interface is None or interface == "localhost" or interface.startswith("127.") or interface == "::1"

    @property
    def num_subs(self) -> int:
        """Sub-processes that there are."""
        return self.k if self.workers is None else self.workers

    def check_against(self, num_layers: int, vocab_size: int) -> int:
        """The exit layer for a model of `num_layers` layers; raises ValueError for a k or exit layer it lacks."""
        lowest = math.ceil(num_layers / 2)
        if num_layers < 2:
            raise ValueError(f"the model has {num_layers} layer: pipelined decoding needs at least 2")
        if self.k > vocab_size:
            raise ValueError(f"k={self.k} is more than the {vocab_size} tokens of the vocabulary: choose fewer")
        exit_layer = lowest if self.exit_layer is None else self.exit_layer
        if isinstance(exit_layer, bool) or not isinstance(exit_layer, int):
            raise ValueError(f"exit_layer={exit_layer!r}: give a whole number")
        if not lowest <= exit_layer < num_layers:
            raise ValueError(
                f"exit_layer={exit_layer}: with {num_layers} layers choose {lowest} to {num_layers - 1} "
                "(at least half depth, before the last layer)"
            )
        return exit_layer


def can_run_ahead(num_layers: int, exit_layer: int, k: int) -> bool:
    """Whether the layout is one in which a lone sub-process' last state is the next exit state."""
    return k == 1 and num_layers == 2 * exit_layer


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: give a whole number")
    if value < low:
        raise ValueError(f"{name}={value}: must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value}: must be at most {high}")


def _is_stop_text(text: object) -> bool:
    if not isinstance(text, str) or not 0 < len(text) <= MOST_STOP_CHARACTERS:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)  # half of a UTF-16 pair


def _check_float(name: str, value: object, allowed: Callable[[float], bool], range_text: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: give a number {range_text}")
    if not (abs(value) <= sys.float_info.max and allowed(value)):
        raise ValueError(f"{name}={value}: must be finite and {range_text}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")
