"""Several ways of decoding in turn over prompts: `compare`, on which every comparison of this project stands."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.results import Stats
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tune.machine_load import LoadMeter

_LEAST_TEXTS = 3
_PROBED = 8  # prompts between two looks at the machine's load


class CannotDecodeError(RuntimeError):
    """One of the ways cannot decode, for the reason that it tells; the others go on."""


@dataclass(frozen=True)
class Drafting:
    """Drafting and verifying after the first full pass, an entry for each verification."""

    lengths: tuple[int, ...]
    """New tokens."""
    drafted: tuple[int, ...]
    """Draft steps."""
    accepted: tuple[int, ...]
    """Drafted tokens that stayed."""
    draft_s: float
    verify_s: float
    reused_share: float = 0.0
    """The share of layers that drafting, not verification, runs over the newest certain token."""


@dataclass(frozen=True)
class Text:
    """One text by one way of decoding; times in seconds."""

    token_ids: tuple[int, ...]
    latency_s: float
    first_s: float
    """Time until the first tokens."""
    first_tokens: int = 1
    """Tokens that came at once from the first full pass."""
    drafting: Drafting | None = None
    stats: Stats | None = None
    """What this project's ways tell of a text."""

    @property
    def step_s(self) -> float | None:
        """Mean time of a token after the first ones; None if there is none."""
        later = len(self.token_ids) - self.first_tokens
        return (self.latency_s - self.first_s) / later if later > 0 else None


class Pair(NamedTuple):
    """The texts of two ways for one prompt."""

    ordinary: Text
    """What the other one is compared with."""
    text: Text

    @property
    def equal(self) -> int:
        """Tokens before the first that differs, or before one text ends."""
        both = zip(self.ordinary.token_ids, self.text.token_ids, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda tokens: tokens[0] == tokens[1], both))

    @property
    def identical(self) -> bool:
        """Whether all tokens are the same."""
        return self.ordinary.token_ids == self.text.token_ids


@dataclass(frozen=True)
class Way:
    """A way of decoding at work."""

    name: str
    decode: Callable[[Sequence[int], SamplingParams], Text]
    """Continues a prompt; raises `CannotDecodeError`."""
    cores: tuple[int, ...] = ()
    """Where this thread stays meanwhile; empty: anywhere."""
    threads: int | None = None
    """Threads of this process that compute meanwhile without waiting; None: it waits for others."""


@dataclass
class Comparison:
    """What each way gave."""

    first: dict[str, Text] = field(default_factory=dict)
    """By way: the first prompt's text that warmed it up, which no figure counts."""
    turns: list[tuple[int, dict[str, Text]]] = field(default_factory=list)
    """A prompt's place among the prompts, and its texts by way."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a way has no further texts."""
    cpu_share: float = 1.0
    """The share that the measurement had of the CPU time that it could use."""

    def pairs(self, name: str, beside: str, places: Sequence[int] | None = None) -> list[Pair]:
        """The texts of a way that did not fail beside those of another one, of all prompts or of those at `places`."""
        if name in self.failures:
            return []
        return [Pair(texts[beside], texts[name]) for place, texts in self.turns if places is None or place in places]


def compare(
    ways: Sequence[Way],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    rounds: int = 1,
    seconds: float | None = None,
    probed: Sequence[int] = (),
    on_prompt: Callable[[int, int], None] = lambda done, of: None,
) -> Comparison:
    """Warm all ways up; then decode each prompt with all before the next one comes, each time beginning with another.

    Args:
        ways: a name for each.
        prompts: token ids.
        params: how all decode; the seed is the first prompt's, each further prompt has the next one.
        rounds: how often all prompts come.
        seconds: go round for so long instead, with three texts of each way at least.
        probed: cores to watch for other programs.
        on_prompt: is told how many prompts are done, and of how many if not for some seconds.
    """
    found, load = Comparison(), LoadMeter(probed)
    seeds = [params.with_later_seed(place) for place in range(len(prompts))]
    found.first = _turn(ways, prompts[0], seeds[0], found.failures, LoadMeter())
    began = time.perf_counter()
    for number in itertools.count():
        over = time.perf_counter() - began > seconds if seconds is not None else number >= rounds * len(prompts)
        if over and (seconds is None or number >= _LEAST_TEXTS):
            break
        if number % _PROBED == 0:
            load.probe()
        place, turned = number % len(prompts), number % len(ways)
        in_turn = [*ways[turned:], *ways[:turned]]
        found.turns.append((place, _turn(in_turn, prompts[place], seeds[place], found.failures, load)))
        on_prompt(number + 1, rounds * len(prompts))
    found.cpu_share = load.share
    return found


def _turn(
    ways: Sequence[Way], prompt: Sequence[int], params: SamplingParams, failures: dict[str, str], load: LoadMeter
) -> dict[str, Text]:
    texts = {}
    for way in ways:
        if way.name not in failures:
            try:
                with on_cores(way.cores), load.computing(way.threads):
                    texts[way.name] = way.decode(prompt, params)
            except CannotDecodeError as error:
                failures[way.name] = str(error)
    return texts
