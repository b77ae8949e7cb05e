"""A trace's first tokens drawn as in the paper's Figure 2: a row for each process, a box for each piece of work.

Needs the `plots` extra.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppd_runtime.files.images import new_figure, save_figure
from ppd_runtime.settings.layouts import StagedLayout
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span
from ppd_runtime.tracing.trace import Hop, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HIT, MISS = "#3d9a50", "#c0392b"
COLOURS = {
    "layers up to the exit": "#2f6fb0",
    "layers behind the exit": "#7fb0de",
    "layers across the exit": "#5791c8",
    "head and choice": "#17405f",
    "a candidate that was right": HIT,
    "a candidate that was wrong": "#d98a2b",
    "a sub-process' own cache": "#b9c2cb",
}
STAGE_COLOURS = {
    "a certain token": "#2f6fb0",
    "tokens in flight": "#7fb0de",
    "head and choice": "#17405f",
}
_ORDINARY_LAYERS = {"layers up to the exit": "layers"}
_HEIGHT = 0.64  # of a row's box
_CHARACTER_INCHES = 0.075
_LONGEST_WORD = 10
_UNPRINTABLE = "�"


@dataclass(frozen=True)
class Box:
    """A piece of work: its process' row, times in milliseconds, what it is, and words for it."""

    row: int
    began: float
    ended: float
    kind: str
    label: str = ""


@dataclass(frozen=True)
class TokenOutcome:
    """When a token was certain, in milliseconds, and whether its early start was used (None: none was asked for)."""

    time: float
    token: int
    hit: bool | None


class Timeline:
    """What is drawn of a trace: its first `num_tokens` tokens; `word` gives a token's text."""

    def __init__(self, trace: Trace, num_tokens: int, word: Callable[[int], str]) -> None:
        self.trace, self._word = trace, word
        if not trace.processes or trace.processes[0].rank != 0:
            raise ValueError("there are no spans of the main process: nothing to draw")
        main = trace.processes[0].spans
        chosen = [span for span in main if span.kind == Kind.CHOOSE][:num_tokens]
        self._origin = main[0].began_ns
        self.end = self._ms(chosen[-1].ended_ns)
        self.begin = self._beginning(chosen)
        found = {span.position: span.kind == Kind.HIT for span in main if span.kind in (Kind.HIT, Kind.MISS)}
        self.verdicts = [TokenOutcome(self._ms(s.ended_ns), s.token, found.get(s.position)) for s in chosen]
        self._chosen = {span.position: span.token for span in main if span.kind == Kind.CHOOSE}
        self._certain_at = {span.position: span.ended_ns for span in main if span.kind == Kind.CHOOSE}
        self._winners = {(span.peer, span.position) for span in main if span.kind == Kind.HIT}

    def boxes(self) -> Iterator[Box]:
        """Every piece of work that begins before the end."""
        for process in self.trace.processes:
            if isinstance(self.trace.layout, StagedLayout):
                boxes = self._stage_boxes(process)
            else:
                boxes = self._sub_boxes(process) if process.rank else self._main_boxes(process)
            yield from (box for box in boxes if box.began < self.end and box.ended > self.begin)

    def early_starts(self) -> Iterator[tuple[Hop, float, float]]:
        """The winners' hidden states on their way, with the times of sending and arrival."""
        used = {}
        for hop in self.trace.hops():
            won = (hop.sender, hop.sent.position) in self._winners
            if hop.sent.message == "HeadStart" and won and self._is_right(hop.sender, hop.sent):
                used[hop.sent.position] = hop  # the newest of a sub-process that began again
        for hop in used.values():
            sent, received = self._ms(hop.sent.began_ns), self._ms(hop.received.ended_ns)
            if received < self.end:
                yield hop, sent, received

    def word(self, token: int) -> str:
        """A token's text, with visible spaces and line ends; empty for what is no single token."""
        if token < 0:
            return ""
        text = self._word(token).replace("\n", "⏎").replace(" ", "·")
        text = "".join(character if character.isprintable() else _UNPRINTABLE for character in text)
        short = text if len(text) <= _LONGEST_WORD else text[: _LONGEST_WORD - 1] + "…"
        return short.replace("$", r"\$")

    def _stage_boxes(self, process: ProcessSpans) -> Iterator[Box]:
        """A pass is for a certain token if that was chosen before the pass began."""
        for span in process.spans:
            if span.kind == Kind.LAYERS:
                is_certain = self._certain_at.get(span.position, 0) <= span.began_ns  # as the prompt is
                kind = "a certain token" if is_certain else "tokens in flight"
                yield self._box(process, span, kind, str(span.position))
            elif span.kind in (Kind.HEAD, Kind.CHOOSE):
                yield self._box(process, span, "head and choice")

    def _main_boxes(self, process: ProcessSpans) -> Iterator[Box]:
        behind = self.trace.exit_layer if self.trace.exit_layer is not None else self.trace.num_layers
        for span in process.spans:
            if span.kind == Kind.LAYERS:
                kind = "layers behind the exit" if span.first >= behind else "layers up to the exit"
                kind = "layers across the exit" if span.first < behind < span.last else kind
                yield self._box(process, span, kind, f"{span.first + 1}–{span.last}")
            elif span.kind in (Kind.HEAD, Kind.CHOOSE):
                yield self._box(process, span, "head and choice")

    def _sub_boxes(self, process: ProcessSpans) -> Iterator[Box]:
        """A pass is for a candidate if that was named, and the token was not certain yet when it began."""
        last_named = {span.position: span for span in process.spans if span.message == "Candidate"}
        named: dict[int, Span] = {}
        begun: set[int] = set()
        for span in process.spans:
            candidate = named.get(span.position)
            if span.kind == Kind.SEND and span.message == "Candidate":
                named[span.position] = span
                begun.discard(span.position)
            elif span.kind == Kind.RECEIVE and span.message == "Token" and candidate is not None:
                if span.position not in begun or candidate.token != span.token:
                    del named[span.position]
            elif span.kind in (Kind.HEAD, Kind.CHOOSE):
                yield self._box(process, span, "head and choice")
            elif span.kind == Kind.LAYERS and candidate is not None:
                begun.add(span.position)
                restarted = candidate is not last_named[span.position]  # it was started from another text
                right = not restarted and self._is_right(process.rank, candidate)
                kind = "a candidate that was right" if right else "a candidate that was wrong"
                yield self._box(process, span, kind, self.word(candidate.token))
            elif span.kind == Kind.LAYERS:
                yield self._box(process, span, "a sub-process' own cache")

    def _is_right(self, rank: int, named: Span) -> bool:
        """Whether a candidate became the token; of several in one message, whether one of them was used."""
        if named.token < 0:
            return (rank, named.position) in self._winners
        return named.token == self._chosen.get(named.position)

    def _box(self, process: ProcessSpans, span: Span, kind: str, label: str = "") -> Box:
        return Box(self.trace.row(process.rank), self._ms(span.began_ns), self._ms(span.ended_ns), kind, label)

    def _beginning(self, chosen: list[Span]) -> float:
        """The drawn begin: at most two tokens' time before the first token."""
        first = self._ms(chosen[0].ended_ns)
        per_token = (self.end - first) / max(len(chosen) - 1, 1)
        return max(0.0, first - 2 * per_token) if len(chosen) > 1 else 0.0

    def _ms(self, nanoseconds: int) -> float:
        return (nanoseconds - self._origin) / 1e6


def draw_timeline(trace: Trace, path: Path, word: Callable[[int], str], num_tokens: int = 12) -> None:
    """Draw the first tokens of a trace; `word` gives a token's text.

    Raises:
        ValueError: if matplotlib is not installed, or the file cannot be written.
    """
    timeline = Timeline(trace, num_tokens, word)
    num_rows = len(trace.processes)
    width = 3 + 0.95 * len(timeline.verdicts)
    figure = new_figure(width, 1.9 + 0.5 * num_rows)
    axes = figure.subplots()
    axes.set_xlim(timeline.begin, timeline.end + 0.01 * (timeline.end - timeline.begin))
    inches_per_ms = (width - 1.5) / (timeline.end - timeline.begin)
    for box in timeline.boxes():
        _draw_box(axes, box, timeline, inches_per_ms)
    for hop, sent, received in timeline.early_starts():
        _arrow(axes, (sent, hop.sender - _HEIGHT / 2), (received, _HEIGHT / 2))
    for verdict in timeline.verdicts:
        _draw_verdict(axes, verdict, timeline)
    axes.set_ylim(num_rows - 0.5, -0.95)
    axes.set_yticks([trace.row(p.rank) for p in trace.processes], [trace.name(p.rank) for p in trace.processes])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("ms since the request arrived")
    figure.suptitle(_title(timeline), size="medium")
    _legend(figure, trace)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a script that the font lacks: a box is drawn
        save_figure(figure, path, dpi=110)


def _draw_box(axes: "Axes", box: Box, timeline: Timeline, inches_per_ms: float) -> None:
    began, ended = max(box.began, timeline.begin), min(box.ended, timeline.end)
    bottom = box.row - _HEIGHT / 2
    axes.broken_barh(
        [(began, ended - began)],
        (bottom, _HEIGHT),
        facecolors=(COLOURS | STAGE_COLOURS)[box.kind],
        edgecolor="white",
        lw=0.5,
    )
    if len(box.label) * _CHARACTER_INCHES < (ended - began) * inches_per_ms:
        axes.text((began + ended) / 2, box.row, box.label, ha="center", va="center", size=7, color="white")


def _draw_verdict(axes: "Axes", verdict: TokenOutcome, timeline: Timeline) -> None:
    """The token, above the moment at which it was certain."""
    colour = {True: HIT, False: MISS, None: "black"}[verdict.hit]
    axes.plot([verdict.time] * 2, [-_HEIGHT / 2, -_HEIGHT / 2 - 0.12], color=colour, lw=1)
    axes.text(verdict.time, -0.5, timeline.word(verdict.token), ha="right", va="bottom", size=7.5, color=colour)


def _arrow(axes: "Axes", start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": HIT, "lw": 1.3, "shrinkA": 0, "shrinkB": 0})


def _title(timeline: Timeline) -> str:
    trace, hits = timeline.trace, [v.hit for v in timeline.verdicts if v.hit is not None]
    parts = [f"first {len(timeline.verdicts)} tokens", f"{trace.num_layers} layers"]
    if isinstance(trace.layout, StagedLayout):
        parts.append(f"{trace.layout.num_stages} stages")
    if trace.exit_layer is not None:
        parts += [f"exit after layer {trace.exit_layer}", f"hits {sum(hits)}, misses {len(hits) - sum(hits)}"]
    return ", ".join(filter(None, [*parts, trace.conditions]))


def _legend(figure: "Figure", trace: Trace) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(COLOURS) if trace.exit_layer is not None else ["layers up to the exit", "head and choice"]
    labels = _ORDINARY_LAYERS if trace.exit_layer is None else {}
    staged = isinstance(trace.layout, StagedLayout)
    colours = STAGE_COLOURS if staged else {labels.get(name, name): COLOURS[name] for name in names}
    handles: list[Patch | Line2D] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if trace.exit_layer is not None:
        handles.append(Line2D([], [], color=HIT, label="hit: its hidden state is used"))
        handles.append(Line2D([], [], color=MISS, label="miss"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
