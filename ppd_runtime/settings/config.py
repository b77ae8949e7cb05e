"""How a runtime is laid out: settings, frozen and checked where they are made."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ppd_runtime.settings.checks import (
    check_bool,
    check_choice,
    check_depth,
    check_device,
    check_exit_layer,
    check_int,
    check_shared_rows,
    check_workers,
    joined_cuts,
    parsed_cuts,
)
from ppd_runtime.settings.fields import check_known
from ppd_runtime.settings.placement import Placed


class HeadLike(Protocol):
    """An exit head that is an object of this process, such as an `OracleHead`."""

    def candidates(self, hidden: Any, history: Sequence[int], k: int) -> list[int]:
        """Like `ExitHead.candidates`."""
        ...


FORMATS = ("int8", "int4")
"""Formats of few bits that the weights of a model in floats may get."""
STORED, GGUF = "stored", "gguf"
"""What weights are called whose matrices have formats of their own: a quantised folder's, or a GGUF file's."""
ALL_FORMATS = (*FORMATS, STORED, GGUF)
"""All formats of weights of few bits."""
FLOATS = "floats"
"""What weights of no such format are called."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
AUTO, ALWAYS, NEVER = SPECULATION = ("auto", "always", "never")
"""When to guess: where it saves time, whatever it takes, or not at all."""
UNSET: Any = object()
"""Stands for an argument that was not given."""
SHARED = "shared"
"""Names the model's own final norm and head where an exit head is chosen."""
NONE = "none"
"""Stands for no drafter."""
USUAL_K = 3
"""Candidates, where nothing says how many."""
_MOST_ROWS = 64
_USUAL_PREFIXES = 8192  # tokens
_USUAL_DRAFT_MB = 64
_NUMBERS = (  # least and most
    ("rows", 1, _MOST_ROWS),
    ("max_requests", 1, 256),
    ("max_cache_tokens", 2, None),
    ("prefix_cache_tokens", 0, None),
    ("draft_memory_mb", 0, None),
)
ROOM = ("max_requests", "max_cache_tokens", "prefix_cache_tokens", "draft_memory_mb")
"""Settings of the staged layout alone, of how much it holds."""
_FOR_STAGES = ("drafter", "drafter_device", "rows", "repetitions", *ROOM)
"""Settings of the staged layout alone."""
_LAYOUT_CHOICES = "k stages cuts drafter drafter_device rows repetitions guess_vocab exit_layer workers"
_PLACE_CHOICES = (
    "threads_per_worker transport launcher ray_address bind_interface speculation run_ahead placement gpus_per_worker"
)
_CHOSEN = (*_LAYOUT_CHOICES.split(), *_PLACE_CHOICES.split())
"""Settings that `layout` decides."""


@dataclass(frozen=True)
class RuntimeConfig(Placed):
    """How the processes are laid out, and what they run; what depends on the model is checked by `check_against`.

    Paths and PyTorch's own dtypes, such as torch.bfloat16, are taken too, and become their names.

    Raises:
        ValueError: naming the value and the way out.
    """

    model: str = "demo"
    """A local folder, a GGUF file, a hub name (`name@revision` pins a commit), "demo" or "smollm2". The demo model is
    shipped; SmolLM2-135M-Instruct comes with the extra `smollm2`."""
    layout: str | None = None
    """auto: take the layout and threads that were the fastest here for this model, by measurement. The first start
    measures them, for about a minute with a small model, and the finding is kept; `ppd plan` shows the figures and
    measures again. Every setting that decides the layout or where it runs is refused beside it. In stages that it
    chooses, `max_requests` and the other settings of their room hold."""
    k: int | None = None
    """Early candidates for each token, 3 by default; with `stages`, at each boundary, as many as suit its `rows`."""
    stages: int | None = None
    """Split the model over so many stages in a row, each layer in one place; default: the paper's layout. Behind each
    stage but the last k tokens are named that may come next, and enter the first stage before the last one decides.
    1: all layers in this process; each pass also verifies the tokens that the text's repetitions or a drafter name."""
    cuts: "str | tuple[int, ...] | None" = None
    """The stages' borders, such as 3,6,9: layers before each; default: so that all take as long, heads included."""
    rows: int | None = None
    """Tokens of a stage's pass, at the most; default: as many as a pass runs with little more time, by measurement.
    Compiled float32 passes on CPUs run them at once; others one by one, and only tokens that stand one behind the
    other. Whatever is given, a further token runs where its chance is above what it adds to the pass' time."""
    repetitions: bool = True
    """With `stages`, also name what followed the same tokens earlier in the text, which needs no layer."""
    guess_vocab: int | None = None
    """Guess among so many tokens only, the most frequent ones: exit heads hold and multiply only those rows. Default:
    8,192 where the model's head has more weights than one of its layers, else all of them, as with the vocabulary's own
    size."""
    guess_counts: str | None = None
    """A JSON file of token ids and counts, by which `guess_vocab` chooses; default: the tokenizer's order."""
    max_requests: int | None = None
    """With `stages`, requests that are decoded at once; further calls wait for their turn. Default: one for every 1,024
    tokens of `max_cache_tokens`, at most 16."""
    max_cache_tokens: int | None = None
    """With `stages`, tokens of all requests at once, prompts' and new ones: further calls wait until there is room.
    Default: half of the memory that weights leave free on the workers' devices, by the model's bytes a token, at most
    1,048,576; no bound where workers are on other hosts."""
    prefix_cache_tokens: int | None = None
    """With `stages`, tokens of earlier prompts whose entries stages keep, 8192 by default. A prompt that begins alike
    takes them over, in whole chunks."""
    draft_memory_mb: int | None = None
    """With `stages`, megabytes of earlier requests' texts, in which guesses are looked up, 64 by default. A request's
    time may tell what earlier ones said, so `ppd serve` has 0 by default."""
    exit_layer: int | None = None
    """The layer after which the next token is predicted early; default: a trained exit head's, or half depth. Half
    depth is rounded up."""
    workers: int | None = None
    """Sub-processes, at most k; default: k. Fewer than k run their share of the candidates as one pass, on fewer
    devices. That needs float32: elsewhere a pass with several rows rounds differently, and the setting is refused."""
    exit_head: "str | HeadLike | None" = None
    """"shared" (the model's own norm and head), or a trained one's folder; default: what `ppd adapt` has kept. `ppd
    train exit-head` writes such a folder. A folder of such folders is taken too: with `stages` each head serves the
    boundary after its layer, else one serves at the exit layer, by default the one nearest behind half depth. What has
    no head shares the model's. An `OracleHead` is for tests and benchmarks."""
    drafter: str | None = None
    """With `stages`, a drafter's folder or hub name, mtp, a smaller model or none; default: the one of `ppd adapt`.

    A drafter is a trained one, or a head of EAGLE-3 or DFlash in the format of speculators; mtp is the layer
    behind the model's last in its own files; a smaller model has the same vocabulary."""
    drafter_device: str | None = None
    """auto, cpu, cuda or cuda:<number>: the smaller model drafts in its own process; default: the first stage's."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto. Auto is what `choose_dtype` finds fastest, the same for
    `OrdinaryDecoding`."""
    weights: str | None = None
    """On CPUs int8 or int4: so many bits; or stored: a quantised folder's own few bits; default: as the files have
    them. A folder of `ppd quantize` has its own. Tokens are those of `OrdinaryDecoding` with the same weights."""
    device: str = "auto"
    """cpu, cuda, or auto: GPUs where there are any; CPUs for `weights` of few bits."""
    transport: str = "auto"
    """How messages travel: local (threads), unix, zeromq or collective (processes), or auto. With unix and zeromq
    there are sockets between processes; with collective hidden states and key/value entries go from device to device
    (NCCL on GPUs and Gloo on CPUs), the rest over ZeroMQ; local is threads of this process. Auto is zeromq with a
    `bind_interface` and unix without."""
    launcher: str = "auto"
    """What starts the processes: processes (plain ones of this host), ray, or auto. Plain ones need no Ray. Auto is Ray
    where there is one to join or several hosts are asked for, else processes;
    `ppd_runtime.launch.choice.choose_launcher` has the rule. A Ray that the program has started is joined and never
    shut down; it may call `ray.init` later where the runtime has processes, and with `ignore_reinit_error=True` where
    it has a Ray node of its own."""
    ray_address: str | None = None
    """host:port of a running Ray cluster, auto (one of this host) or local (a node of our own); default: RAY_ADDRESS.
    All runtimes of a program share the node of our own, which is also what there is without RAY_ADDRESS."""
    bind_interface: str | None = None
    """An IP address of this host: processes talk over TCP, encrypted. Both ends of every connection are authenticated
    (CURVE, keys made for each run). None: sockets in a folder that only this user may enter, for processes of one
    host."""
    threads_per_worker: int = 1
    """CPU threads for each worker's matrix products."""
    compile: bool | None = None
    """Run passes over few tokens in compiled code. Default: on Linux CPUs where there is a C++ compiler. A first start
    with a model takes some ten seconds more, then its code is kept on disk. Tokens are those of `OrdinaryDecoding` with
    the same setting."""
    rows_share_weights: bool = False
    """Read weights once for guesses and requests, in any number format: passes are uncompiled and padded to 8 rows.
    Tokens are those of `OrdinaryDecoding` with the same setting."""
    speculation: str = AUTO
    """When to guess: auto, always or never. Auto compares the time of a token without guesses, with guesses from the
    text's repetitions and with exit heads', and keeps what it finds. Always is for measuring match rates."""
    run_ahead: bool = True
    """Let a lone sub-process (k=1, exit at half depth) start the next token before it hears what became of the last.
    That saves a hit its hops; after a miss the work that ran ahead is dropped."""
    max_restarts: int = 3
    """Restarts of a lost worker, in a row. A lost sub-process costs time only; a new main process goes on behind the
    tokens already delivered. 0: a lost main process is an error at once."""
    placement: str = "auto"
    """Where Ray puts the workers: auto (one host where they fit), pack, spread, strict-pack or strict-spread. There is
    a placement group with a bundle for each. Sockets in a folder reach one host only."""
    placement_timeout_s: float = 0.0
    """Seconds to wait for room in a Ray cluster; 0: too little is an error at once. A cluster with an autoscaler makes
    room."""
    gpus_per_worker: float | None = None
    """GPUs of a Ray cluster for each worker, 0.5: two share one; default: one. On a Ray node of our own, and as plain
    processes, they share what there is unless this says how many may."""
    generation_config: bool = True
    """Take what the model's `generation_config.json` says as defaults of requests, as transformers' `generate` does.
    What a request says itself wins."""
    trace: bool = False
    """Record what every process does and when; results have a `trace` then."""

    def __post_init__(self) -> None:
        self._name_objects()
        self._check_layout()
        if self.k is None and self.stages is None and self.cuts is None and self.layout is None:
            object.__setattr__(self, "k", USUAL_K)
        if self.k is not None:
            check_int("k", self.k, 1)
        check_int("threads_per_worker", self.threads_per_worker, 1)
        check_int("max_restarts", self.max_restarts, 0)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r}: give a folder, a hub name or 'demo'")
        check_choice("dtype", self.dtype, DTYPES)
        if self.weights is not None:
            check_choice("weights", self.weights, ALL_FORMATS)
        check_choice("speculation", self.speculation, SPECULATION)
        check_device("device", self.device)
        self._check_placement()
        if self.compile is not None:
            check_bool("compile", self.compile)
        for name in ("run_ahead", "trace", "repetitions", "generation_config", "rows_share_weights"):
            check_bool(name, getattr(self, name))
        if self.rows_share_weights:
            check_shared_rows(self.compile, self.weights, self.layout)
            object.__setattr__(self, "compile", False)
        if self.workers is not None:
            check_int("workers", self.workers, 1)
        self._check_stages()
        self._check_single_stage()
        self._check_network()

    def _check_layout(self) -> None:
        if self.layout is None:
            return
        check_choice("layout", self.layout, (AUTO,))
        for name, value in self._given(_CHOSEN):
            raise ValueError(f"{name}={value!r} with layout={self.layout!r}, which decides it: drop one")
        if not isinstance(self.exit_head, str | None):
            refused = f"exit_head={self.exit_head!r:.200} with layout={self.layout!r}"
            raise ValueError(f"{refused}, which is measured in another process: give a folder, or drop one")

    def _given(self, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
        """The settings among `names` that are not as usual, with their values."""
        usual = {field.name: field.default for field in fields(self)}
        return ((name, value) for name in names if (value := getattr(self, name)) != usual[name])

    def _check_stages(self) -> None:
        for name, least, most in _NUMBERS:
            if (number := getattr(self, name)) is not None:
                check_int(name, number, least, most)
        if self.guess_vocab is not None:
            check_int("guess_vocab", self.guess_vocab, 1)
        elif self.guess_counts is not None:
            raise ValueError(f"guess_counts={self.guess_counts!r:.200}: is for guess_vocab, give that too")
        if isinstance(self.cuts, str):
            object.__setattr__(self, "cuts", parsed_cuts(self.cuts))
        if self.cuts is not None:
            self._check_cuts()
        if self.stages is None:
            check_workers(self.num_candidates, self.workers)
            for name, value in self._given(_FOR_STAGES if self.layout is None else ()):
                raise ValueError(f"{name}={value}: is for the staged layout, give stages too or leave it out")
            return
        check_int("stages", self.stages, 1)
        for name in ("exit_layer", "workers"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value} with stages={self.stages}: is for the paper's layout, drop one")
        if not self.run_ahead:
            raise ValueError(f"run_ahead=False with stages={self.stages}: is for the paper's layout, drop one")
        if self.drafter_device is not None:
            self._check_drafter_device()

    def _check_drafter_device(self) -> None:
        check_device("drafter_device", self.drafter_device)
        if self.drafter in (None, NONE):
            raise ValueError(f"drafter_device={self.drafter_device}: is for a model that drafts, give drafter=MODEL")
        if self.stages == 1:
            raise ValueError(f"drafter_device={self.drafter_device} with stages=1: one stage drafts between its passes")

    def _check_single_stage(self) -> None:
        """One stage guesses by the text and a drafter; unless more is asked for, it is a thread of this process."""
        if self.stages != 1:
            return
        if not self.repetitions and self.drafter in (None, NONE):
            raise ValueError("repetitions=False with stages=1: give drafter, then there is something to guess from")
        if self.exit_head not in (None, SHARED):
            raise ValueError(f"exit_head={self.exit_head!r} with stages=1: is for boundaries of stages, drop one")
        asks = (self.launcher, self.placement, self.ray_address, self.bind_interface, self.gpus_per_worker)
        if self.transport == "auto" and asks == ("auto", "auto", None, None, None):
            object.__setattr__(self, "transport", "local")

    def _check_cuts(self) -> None:
        if not isinstance(self.cuts, tuple) or not self.cuts:
            raise ValueError(f"cuts={self.cuts!r}: give layers in ascending order, such as 3,6,9")
        for cut in self.cuts:
            check_int("cuts", cut, 1)
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"cuts={joined_cuts(self.cuts)}: give layers in ascending order")
        if self.stages is None:
            object.__setattr__(self, "stages", len(self.cuts) + 1)
        if self.stages != len(self.cuts) + 1:
            wanted = f"{len(self.cuts)} borders make {len(self.cuts) + 1} stages"
            raise ValueError(f"cuts={joined_cuts(self.cuts)} with stages={self.stages}: {wanted}, drop one")

    def _name_objects(self) -> None:
        """Put names in the place of paths and of PyTorch's dtypes."""
        for name in ("model", "exit_head", "drafter", "guess_counts"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        if type(self.dtype).__module__ == "torch":
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))

    @property
    def num_subs(self) -> int:
        """Processes beside the main one, which decides: sub-processes, or the stages before the last."""
        if self.stages is not None:
            return self.stages - 1
        return self.num_candidates if self.workers is None else self.workers

    @property
    def prefix_tokens(self) -> int:
        """Tokens of earlier prompts whose entries are kept; none in the paper's layout."""
        if self.stages is None:
            return 0
        return _USUAL_PREFIXES if self.prefix_cache_tokens is None else self.prefix_cache_tokens

    @property
    def draft_memory(self) -> int:
        """Megabytes of earlier requests' texts; none in the paper's layout, or where nothing repeated is named."""
        if self.stages is None or not self.repetitions:
            return 0
        return _USUAL_DRAFT_MB if self.draft_memory_mb is None else self.draft_memory_mb

    @property
    def num_candidates(self) -> int:
        """k; with stages, where it is not given, what it is until it has been chosen."""
        return self.k or USUAL_K

    def check_against(self, num_layers: int, vocab_size: int) -> int:
        """The exit layer for a model of `num_layers` layers; raises ValueError for a k or exit layer it lacks."""
        check_depth(num_layers, "pipelined decoding", self.model)
        if self.k is not None and self.k > vocab_size:
            raise ValueError(f"k={self.k} is more than the {vocab_size} tokens of the vocabulary: choose fewer")
        if self.guess_vocab is not None and self.guess_vocab > vocab_size:
            raise ValueError(f"guess_vocab={self.guess_vocab}: the vocabulary has {vocab_size} tokens, choose fewer")
        if self.k is not None and self.guess_vocab is not None and self.k > self.guess_vocab:
            raise ValueError(f"k={self.k} is more than guess_vocab={self.guess_vocab} tokens: choose fewer")
        exit_layer = math.ceil(num_layers / 2) if self.exit_layer is None else self.exit_layer
        check_int("exit_layer", exit_layer)
        check_exit_layer(exit_layer, num_layers)
        return exit_layer


RUNTIME_SETTINGS = tuple(setting.name for setting in fields(RuntimeConfig))
"""The names of `RuntimeConfig`'s settings."""

IN_PROCESS_SETTINGS: Mapping[str, str] = {
    "model": "model",
    "dtype": "dtype",
    "weights": "weights",
    "device": "device",
    "threads": "threads_per_worker",
    "compile": "compile",
    "rows_share_weights": "rows_share_weights",
    "generation_config": "generation_config",
    "trace": "trace",
}
"""The settings of `RuntimeConfig` that decoding in one process has, by the names that it has for them."""


def without_earlier_texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a server or a measurement: unless it is asked for, no request gains by the text of an earlier one."""
    return {"draft_memory_mb": 0, **settings} if settings.keys() & {"stages", "cuts", "layout"} else {**settings}


def runtime_config(config: RuntimeConfig | None, settings: Mapping[str, Any]) -> RuntimeConfig:
    """The settings of a runtime, which come as `config` or by name.

    Raises:
        ValueError: for both, for a setting that there is not, or one that cannot work.
    """
    check_known("PPDRuntime", settings, RUNTIME_SETTINGS)
    if config is None:
        return RuntimeConfig(**settings)
    if settings:
        raise ValueError(f"config and {next(iter(settings))} are both given: give one of them")
    if not isinstance(config, RuntimeConfig):
        raise ValueError(f"config={config!r:.200}: give RuntimeConfig(...), or settings by name")
    return config


def in_process_config(owner: str, settings: Mapping[str, Any]) -> RuntimeConfig:
    """The settings of decoding in one process by name, those of `IN_PROCESS_SETTINGS`; `owner` names who has them.

    Raises:
        ValueError: for a setting that there is not, or one that cannot work.
    """
    check_known(owner, settings, IN_PROCESS_SETTINGS)
    return RuntimeConfig(**{IN_PROCESS_SETTINGS[name]: value for name, value in settings.items()})
