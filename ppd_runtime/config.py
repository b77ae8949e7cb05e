"""Settings, frozen and checked where they are made: how a runtime is laid out, and how one call samples."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSPORTS = ("auto", "local", "unix", "zeromq", "collective")
LAUNCHERS = ("auto", "ray", "processes")
PLACEMENTS = ("auto", "pack", "spread", "strict-pack", "strict-spread")
MOST_STOPS, MOST_STOP_CHARACTERS = 1000, 2**16
_MOST = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # far below, logits divided by it are no longer finite
_MOST_PENALTY = 2.0  # OpenAI's range, and vLLM's
_ADDED = {"added": True}
"""Marks settings that files of earlier versions do not name; see `SamplingParams.as_dict`."""

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""From the tokens so far, `[1, tokens]`, and scores for the next one, `[1, vocab_size]`, to other scores."""


class UnknownSettingError(ValueError):
    """A setting that its owner does not have; `known` are those that it has."""

    def __init__(self, owner: str, name: str, known: Iterable[str]) -> None:
        self.owner, self.name, self.known = owner, name, tuple(sorted(known))
        super().__init__(f"{owner} has no setting {name!r}: it has {', '.join(self.known)}")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one call are chosen and when it stops.

    Scores are changed in the order of transformers' `generate`: repetition penalty, frequency and presence penalty,
    `logits_processors`, temperature, top-k, top-p, min-p.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0, or -1, is all."""
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
    min_p: float = field(default=0.0, metadata=_ADDED)
    """Leave out tokens less probable than this share of the likeliest one's probability, in [0, 1]; 0 leaves out none.
    As the other filters, it needs a temperature above 0."""
    presence_penalty: float = field(default=0.0, metadata=_ADDED)
    """Taken off the score of each token that was generated before, in [-2, 2] (OpenAI's, and vLLM's: the prompt's
    tokens do not count)."""
    frequency_penalty: float = field(default=0.0, metadata=_ADDED)
    """Taken off the score of a token for each time that it was generated before, in [-2, 2]."""
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_ADDED)
    """Further tokens that end the generation, with the finish reason "stop", also with `ignore_eos`. The token itself
    is in `token_ids`, and in the text unless it is a special one."""
    timeout_s: float | None = field(default=None, metadata=_ADDED)
    """Seconds after which the request ends with the finish reason "timeout" and what there is so far. They count from
    when its turn has come and the workers are there; a pass that has begun, over a long prompt for example, is
    finished. None: as long as it takes."""
    logits_processors: tuple[LogitsProcessor, ...] = field(default=(), metadata=_ADDED)
    """Functions of the tokens so far, `[1, tokens]`, and float32 scores, `[1, vocab_size]`, that give other scores:
    transformers' `LogitsProcessor` objects, or your own. They must give the same scores for the same text, for they
    are applied to guesses too, in several threads. They stay in this process: with `PPDRuntime` they need
    transport="local"."""
    num_generated: int = field(default=0, metadata=_ADDED)
    """So many tokens at the prompt's end count as generated: for a request that goes on with an earlier one."""

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, 1, _MOST)
        _check_int("top_k", self.top_k, -1, _MOST)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_int("seed", self.seed, 0, 2**64 - 1)
        temperatures = f"0, or {_LOWEST_TEMPERATURE} or more"
        _check_float("temperature", self.temperature, lambda t: t == 0 or t >= _LOWEST_TEMPERATURE, temperatures)
        _check_float("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]")
        _check_float("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), lambda penalty: abs(penalty) <= _MOST_PENALTY, "in [-2, 2]")
        _check_float("min_p", self.min_p, lambda p: 0 <= p <= 1, "in [0, 1]")
        if self.timeout_s is not None:
            _check_float("timeout_s", self.timeout_s, lambda seconds: seconds > 0, "above 0")
        self._check_stops()
        _check_int("num_generated", self.num_generated, 0, _MOST)
        if not isinstance(self.logits_processors, tuple) or not all(map(callable, self.logits_processors)):
            given = f"{self.logits_processors!r:.200}"
            raise ValueError(f"logits_processors={given}: give a tuple of functions of token ids and scores")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple):
            raise ValueError(f"stop={self.stop!r:.200}: give a tuple of texts")
        for text in self.stop:
            if not _is_stop_text(text):
                raise ValueError(f"stop={text!r:.200}: give texts of 1 to {MOST_STOP_CHARACTERS} Unicode characters")
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r:.200}: give a tuple of token ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, _MOST)
        for name in ("stop", "stop_token_ids"):
            if len(given := getattr(self, name)) > MOST_STOPS:
                raise ValueError(f"{name}={given!r:.100}…: {len(given)} of them, give at most {MOST_STOPS}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0

    def as_dict(self) -> dict[str, Any]:
        """The settings by name, for files that outlive a version: those added later only where they are not default."""
        names = [
            setting.name
            for setting in fields(self)
            if not setting.metadata.get("added") or getattr(self, setting.name) != setting.default
        ]
        return {name: getattr(self, name) for name in names}


SAMPLING_SETTINGS = tuple(setting.name for setting in fields(SamplingParams))
"""The names of `SamplingParams`' settings."""


def sampling_from(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """The settings of a call, which come as `params` or by name; stops may be lists, and a single one may stand alone.

    Raises:
        ValueError: for both, for a setting that there is not, or one that cannot work.
    """
    unknown = sorted(set(settings) - set(SAMPLING_SETTINGS))
    if unknown:
        raise UnknownSettingError("sampling", unknown[0], SAMPLING_SETTINGS)
    if params is None:
        several = {name: _as_tuple(settings[name]) for name in _SEVERAL if name in settings}
        return SamplingParams(**{**settings, **several})
    if settings:
        raise ValueError(f"params and {next(iter(settings))} are both given: give one of them")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params={params!r:.200}: give SamplingParams(...), or settings by name")
    return params


_SEVERAL = ("stop", "stop_token_ids", "logits_processors")


def _as_tuple(given: Any) -> Any:
    """None, one or several as a tuple; what is neither is left for the check to name."""
    if given is None:
        return ()
    if isinstance(given, str | int) or (callable(given) and not isinstance(given, Iterable)):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) else given


def model_name(model: Any) -> Any:
    """The text of a path to a model; anything else as it is."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def dtype_name(dtype: Any) -> Any:
    """The name of a number format, such as bfloat16, where it comes as PyTorch's own; anything else as it is."""
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype


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
    """A running Ray cluster, auto for one that runs on this host, or local for a node of our own."""
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
    launcher: str = "auto"
    """ray (actors, on a node of our own or a cluster's), processes (plain ones of this host, without Ray), or auto:
    what `ppd_runtime.launch.choice.choose_launcher` says."""
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
        if self.placement != "auto" and (self.launcher == "processes" or self.transport == "local"):
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
