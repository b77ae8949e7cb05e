"""Measures on this machine what the parts of a token cost, the way the runtime runs them.

This process decodes as a main process does, on a core of its own; a second one echoes its messages over the real
transport. The parts are timed inside that decoding, some tokens each in turn, with caches as warm as in a runtime.
"""

import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ppd_runtime.calibration.model_memory import measured_memory
from ppd_runtime.calibration.peer import CalibrationPeerProcess, CalibrationPeerSpec
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.launch.cpu_affinity import assign_cores, on_cores, own_cores
from ppd_runtime.launch.socket_folder import SocketFolder
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.measure.machine_load import LoadMeter
from ppd_runtime.measure.measured_on import machine
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.trained.exit_heads import SharedHead
from ppd_runtime.pipeline.messages import CLIENT, MAIN, MISS, ExitState, HeadStart, Shutdown, Token
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.text import StopRule
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.sockets import open_endpoint

_MOST_NEIGHBOURS = 3
_ECHO, _REQUEST = 1, 1
_ANSWER_DEADLINE_S = 5.0
_LEAST_ROUNDS, _MOST_ROUNDS, _BUDGET_S = 1, 40, 8.0
_CONTENTION_ROUNDS = 3
_WIDTH_ROUNDS, _WIDTH_PASSES = 3, 7
_BEGINNING_S = 0.05


@dataclass(frozen=True)
class CalibrationConditions:
    """What is measured, and under which conditions."""

    max_devices: int
    """Devices that plans may have: so many processes at the most work at the same time."""
    k: int = 1
    """Candidates that the exit head names."""
    prompts: Sequence[Sequence[int]] = ((0,),)
    """Prompts to decode after, in turn, as token ids."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are chosen, and how many: attention costs more behind longer texts."""
    widths: Sequence[int] = ()
    """Numbers of candidates, 2 or more, that a worker runs as one pass."""


class Calibrator:
    """Measures with the model of `ordinary`, whose device, dtype and threads a worker would have too.

    Use it in a `with` block, which starts the other processes. `measure` keeps this thread on the main process' core
    meanwhile, and may be called again, to follow a machine that changes.

    Raises:
        RuntimeError: when another process fails, with its last words.
    """

    def __init__(
        self, ordinary: OrdinaryDecoding, conditions: CalibrationConditions, progress: Progress = lambda line: None
    ) -> None:
        self._ordinary, self._conditions, self._progress = ordinary, conditions, progress
        self._threads = ordinary.config.threads_per_worker
        self._on_cpu = ordinary.stage.device.type == "cpu"
        self._all_cores = own_cores()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Calibrator":
        with contextlib.ExitStack() as stack:
            self._progress("starting the processes to measure with")
            folder = stack.enter_context(SocketFolder()).path
            main_cores, *other_cores = self._cores()
            self._peers = [
                stack.enter_context(CalibrationPeerProcess(self._spec(rank, cores, folder)))
                for rank, cores in enumerate(other_cores, start=1)
            ]
            self._main_cores = main_cores
            with _pinned(main_cores, self._threads):  # its own thread stays there, as a worker's does
                self._endpoint = open_endpoint(Network(folder=folder), MAIN, has_own_core=bool(main_cores))
            stack.callback(self._endpoint.close)
            self._decoder = _TimedDecoder(self._ordinary, self._conditions, self._endpoint)
            for peer in self._peers:
                peer.wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self) -> Calibration:
        """Measure every time once more."""
        load = self._load_meter()
        with _pinned(self._main_cores, self._threads):
            self._progress("measuring layers, heads and messages")
            load.probe()
            with self._echoing():
                texts = self._texts()
            load.probe()
            half_ms, contention = self._half_pass(load)
            widths = self._widths()
        load.probe()
        times = self._decoder.times(texts)
        half = self._decoder.upper_layers * times["layer_ms"]
        parallel_speedups = self._parallel_speedups()
        load.probe()
        return Calibration(
            **times,
            stages={},  # see `with_stages_at_work`
            contention=contention,
            half_factor=max(0.0, half_ms - times["pass_ms"]) / half,
            parallel_speedups=parallel_speedups,
            widths=widths,
            machine=f"{machine()}, {self._ordinary.stage.device.type}",
            devices=self._devices(),
            cpu_share=load.share if self._on_cpu else None,
            memory=measured_memory(self._ordinary),
            weights=self._ordinary.info.weights_name,
            compiled=bool(self._ordinary.config.compile),
        )

    def _load_meter(self) -> LoadMeter:
        """Of the cores that the processes to measure with use; elsewhere than on the CPU they matter little."""
        processes = max(2, self._conditions.max_devices) if self._on_cpu else 0
        return LoadMeter(self._all_cores[: processes * self._threads], self._threads)

    def _devices(self) -> int:
        """Devices that this process may use: GPUs, or `threads` cores each."""
        return max(1, len(self._all_cores) // self._threads) if self._on_cpu else torch.cuda.device_count()

    def _cores(self) -> list[tuple[int, ...]]:
        """The main process' cores and those of its peers, as the runtime's workers would have them."""
        fitting = len(self._all_cores) // self._threads - 1
        neighbours = min(self._conditions.max_devices - 1, fitting, _MOST_NEIGHBOURS)
        return assign_cores(1 + max(1, neighbours), self._threads, device=str(self._ordinary.stage.device))

    def _spec(self, rank: int, cores: tuple[int, ...], folder: str) -> CalibrationPeerSpec:
        return CalibrationPeerSpec(
            rank=rank,
            model=str(self._ordinary.info.folder),
            weights=self._ordinary.info.weights,
            dtype=self._ordinary.dtype,
            device=str(self._ordinary.stage.device),
            compile=bool(self._ordinary.config.compile),
            threads=self._threads,
            cores=cores,
            folder=folder,
            prompt_ids=list(self._conditions.prompts[0]),
            num_new_tokens=self._conditions.sampling.max_new_tokens,
        )

    @contextlib.contextmanager
    def _echoing(self) -> Iterator[None]:
        self._peers[0].ask("echo")
        try:
            yield
        finally:
            self._endpoint.send(_ECHO, Shutdown(CLIENT, 0))
        self._peers[0].wait()

    def _texts(self) -> list["_Times"]:
        """The times of several texts, after one to warm up, until the budget is spent."""
        began = time.perf_counter()
        texts: list[_Times] = []
        prompts = itertools.cycle(self._conditions.prompts)
        while len(texts) <= _LEAST_ROUNDS or (len(texts) <= _MOST_ROUNDS and time.perf_counter() - began < _BUDGET_S):
            prompt = next(prompts)
            ordinary = self._decoder.text(prompt, [self._decoder.whole])
            parts = self._decoder.text(prompt, self._decoder.all_steps())
            texts.append(parts | {f"ordinary {name}": times for name, times in ordinary.items()})
        return texts[1:]

    def _half_pass(self, load: LoadMeter) -> tuple[float, float]:
        """Milliseconds of the upper half of the layers alone, token after token, and the factor on them while the
        peers work, by texts in turn; 1 where devices do not share anything."""
        self._progress("measuring how processes slow each other down")
        shares = self._on_cpu and len(self._all_cores) >= 2 * self._threads
        alone, ratios = [], []
        for prompt in itertools.islice(itertools.cycle(self._conditions.prompts), _CONTENTION_ROUNDS + 1):
            with load.computing.running():
                alone.append(self._decoder.upper_text(prompt))
            if shares:
                with self._working(alone[-1] * (1.2 * self._conditions.sampling.max_new_tokens) + 0.2):
                    ratios.append(self._decoder.upper_text(prompt) / alone[-1])
        return 1000 * statistics.median(alone[1:]), max(1.0, statistics.median(ratios[1:])) if shares else 1.0

    def _widths(self) -> dict[int, float]:
        """What passes over several candidates at one position take, in passes over one, by their number."""
        self._ordinary.stage.compile_for(*self._conditions.widths)
        texts = itertools.islice(itertools.cycle(self._conditions.prompts), _WIDTH_ROUNDS + 1)
        rounds = [self._decoder.widths(prompt) for prompt in texts] if self._conditions.widths else []
        return {n: max(1.0, statistics.median(one[n] for one in rounds[1:])) for n in self._conditions.widths}

    @contextlib.contextmanager
    def _working(self, seconds: float) -> Iterator[None]:
        """Have every peer work for so long."""
        for peer in self._peers:
            peer.ask("work", seconds)
        time.sleep(_BEGINNING_S)
        yield
        for peer in self._peers:
            peer.wait()

    def _parallel_speedups(self) -> dict[int, float]:
        """Ordinary decoding with n times the threads on n times the cores, where there are so many."""
        most = min(self._conditions.max_devices, len(self._all_cores) // self._threads)
        if not self._on_cpu or most < 2:
            return {}
        self._progress("measuring ordinary decoding on several cores")
        speedups = {}
        for devices in range(most, 1, -1):  # the most first: a smaller team is then part of the larger one
            cores = self._all_cores[: devices * self._threads]
            self._peers[0].ask("speed_up", devices * self._threads, cores)
            speedups[devices] = self._peers[0].wait()
        return dict(sorted(speedups.items()))


_Times = defaultdict[str, list[float]]
_Step = Callable[[int, int], int]
"""Decodes one token: the newest token and its position → the next token."""


class _TimedDecoder:
    """Decodes texts by one way of running a token after another, and keeps the time of each part by name."""

    def __init__(self, ordinary: OrdinaryDecoding, conditions: CalibrationConditions, endpoint: Endpoint) -> None:
        self._stage, self._conditions, self._endpoint = ordinary.stage, conditions, endpoint
        self._num_layers = ordinary.info.num_layers
        self._exit = (self._num_layers + 1) // 2
        self._sampler = Sampler(conditions.sampling)
        self._stop = StopRule(conditions.sampling, frozenset(), None)
        self._exit_head = SharedHead(self._stage, self._sampler)
        self._history: list[int] = []
        self._times: _Times = defaultdict(list)

    def text(self, prompt: Sequence[int], steps: Sequence[_Step]) -> _Times:
        """Decode one text, the steps in turn; what each part took, in seconds."""
        self._history, self._times = list(prompt), defaultdict(list)
        num_new = max(self._conditions.sampling.max_new_tokens, 1 + len(steps))  # each step at least once
        self._stop = StopRule(self._conditions.sampling, frozenset(), None)
        self._stage.begin(len(prompt) + num_new)
        token = self._finish(self._stage.run(0, self._num_layers, self._history, 0))
        run = (num_new - 1) // len(steps)  # tokens one after the other by each step, whose code stays in caches
        for number in range(num_new - 1):
            token = steps[number // run % len(steps)](token, len(self._history) - 1)
        return self._times

    @property
    def upper_layers(self) -> int:
        """Layers that `upper_text` runs."""
        return self._num_layers - self._num_layers // 2

    def upper_text(self, prompt: Sequence[int]) -> float:
        """Seconds of a pass over the upper half of the layers alone, where tokens follow each other so."""
        half, num_new = self._num_layers // 2, self._conditions.sampling.max_new_tokens
        self._stage.begin(len(prompt) + num_new)
        hidden = self._stage.run(0, self._num_layers, list(prompt), 0)[:, -1:]
        began = time.perf_counter()
        for position in range(len(prompt), len(prompt) + num_new):
            self._stage.run(half, self._num_layers, hidden, position)
        return (time.perf_counter() - began) / num_new

    def widths(self, prompt: Sequence[int]) -> dict[int, float]:
        """What passes over so many candidates take, in passes over one, each the first to go on behind the prompt."""
        stage, widths, length = self._stage, self._conditions.widths, len(prompt)
        stage.begin(length + max(widths))
        stage.run(0, self._num_layers, list(prompt), 0)
        self._times = defaultdict(list)
        for n in [1, *widths] * _WIDTH_PASSES:
            with self._timed(str(n)):
                stage.run_candidates(range(n), length)
                stage.keep_candidate(length, n - 1)
            stage.truncate(length)
        usual = {n: statistics.median(self._times[str(n)]) for n in (1, *widths)}
        return {n: usual[n] / usual[1] for n in widths}

    def all_steps(self) -> list[_Step]:
        """Every way of running a token."""
        usual = [self.whole, self.split, self.exchange]
        return [*usual, self.round_trip, *usual, self.entries]

    def whole(self, token: int, position: int) -> int:
        """All layers in one pass, as ordinary decoding runs them."""
        with self._timed("whole"):
            hidden = self._stage.run(0, self._num_layers, [token], position)
        with self._timed("head"):
            return self._finish(hidden)

    def split(self, token: int, position: int) -> int:
        """In two passes."""
        with self._timed("split"):
            hidden = self._stage.run(0, self._exit, [token], position)
            hidden = self._stage.run(self._exit, self._num_layers, hidden, position)
            return self._finish(hidden)

    def exchange(self, token: int, position: int) -> int:
        """In two passes, with two messages sent and one taken in."""
        with self._timed("exchange"):
            hidden = self._stage.run(0, self._exit, [token], position)
            self._endpoint.send(_ECHO, ExitState(MAIN, _REQUEST, position, hidden))
            hidden = self._stage.run(self._exit, self._num_layers, hidden, position)
            new = self._finish(hidden)
            while self._endpoint.receive(0):
                pass
            self._endpoint.send(_ECHO, Token(MAIN, _REQUEST, position, new, MISS))
        return new

    def round_trip(self, token: int, position: int) -> int:
        """A hidden state there and back, with nothing else to do."""
        hidden = self._stage.run(0, self._exit, [token], position)
        with self._timed("round trip"):
            self._endpoint.send(_ECHO, ExitState(MAIN, _REQUEST, position, hidden))
            self._await_echo(position)
        return self._finish(self._stage.run(self._exit, self._num_layers, hidden, position))

    def entries(self, token: int, position: int) -> int:
        """An exit head, and the token's entries out of the first layers and into them again."""
        early = self._num_layers - self._exit
        hidden = self._stage.run(0, early, [token], position)
        with self._timed("exit head"):
            self._exit_head.candidates(hidden, self._history, self._conditions.k)
        with self._timed("export"):
            entries = self._stage.export_entries(position, position + 1, early)
        self._stage.truncate(position)
        with self._timed("import"):
            self._stage.import_entries(list(entries))
        return self._finish(self._stage.run(early, self._num_layers, hidden, position))

    def times(self, texts: Sequence[_Times]) -> dict[str, float]:
        """The times of a calibration, in milliseconds: medians over texts.

        Layers and head are the mean of a text that nothing but ordinary decoding ran, as its time per token is; what is
        short or a small difference is a median, which a passing disturbance does not move.
        """
        mean = _over_texts(texts, statistics.fmean)
        usual = _over_texts(texts, statistics.median)
        one_pass = usual["split"] - usual["whole"] - usual["head"]
        one_pass = min(max(one_pass, 0.0), mean["ordinary whole"] / 2)  # a disturbed machine makes anything of it
        return {
            "layer_ms": (mean["ordinary whole"] - one_pass) / self._num_layers,
            "pass_ms": one_pass,
            "head_ms": mean["ordinary head"],
            "exit_head_ms": usual["exit head"],
            "hop_ms": usual["round trip"] / 2,
            "message_ms": max(0.0, usual["exchange"] - usual["split"]) / 3,
            "export_ms": usual["export"],
            "import_ms": usual["import"],
        }

    def _finish(self, hidden: torch.Tensor) -> int:
        token = self._sampler.choose(self._stage.logits(hidden), self._history)
        self._history.append(token)
        self._stop.finish_reason(token)
        return token

    def _await_echo(self, position: int) -> None:
        deadline = time.perf_counter() + _ANSWER_DEADLINE_S
        while (left := deadline - time.perf_counter()) > 0:
            message = self._endpoint.receive(left)
            if isinstance(message, HeadStart) and message.position == position:
                return
        raise RuntimeError(f"the process that echoes messages said nothing for {_ANSWER_DEADLINE_S:.0f} s")

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._times[name].append(time.perf_counter() - began)


def _over_texts(texts: Sequence[_Times], average: Callable[[list[float]], float]) -> dict[str, float]:
    """Milliseconds by name: the median over the texts of each one's average."""
    return {name: 1000 * statistics.median(average(text[name]) for text in texts) for name in texts[0]}


@contextlib.contextmanager
def _pinned(cores: Sequence[int], threads: int) -> Iterator[None]:
    """Keep this thread on `cores`, if any, with so many threads for matrix products."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with on_cores(cores):
            yield
    finally:
        torch.set_num_threads(threads_before)
