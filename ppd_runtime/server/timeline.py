"""What a stream tells of the pipeline while it runs: boundaries, and if asked for the passes of every process."""

from typing import Any

from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.results import News
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.settings.layouts import StagedLayout
from ppd_runtime.tracing.spans import Kind, Span

_WHAT = {Kind.LAYERS: "layers", Kind.HEAD: "head", Kind.CHOOSE: "choice"}


def layout_of(generator: TextGenerator) -> dict[str, Any]:
    """The processes by rank, and what the cost model needs to predict from boundaries, or hits, so far."""
    names, layers = list(generator.process_names), generator.info.num_layers
    if not isinstance(generator, PPDRuntime):
        return {"processes": names, "num_layers": layers, "stages": None, "exit_layer": None}
    layout = generator.layout
    stages = layout.num_stages if isinstance(layout, StagedLayout) else None
    return {
        "processes": names,
        "num_layers": layers,
        "stages": stages,
        "exit_layer": None if stages else generator.exit_layer,
    }


def as_told(news: News, prompt_tokens: int, origin_ns: int) -> dict[str, Any]:
    """The news as members of a `ppd` object: tokens count from the first new one, times in ms from `origin_ns`."""
    told: dict[str, Any] = {}
    if news.boundaries:
        told["foreseen"] = [[position - prompt_tokens, boundary] for position, boundary in news.boundaries]
    if news.spans:
        told["passes"] = [
            [process.rank, *_pass(span, prompt_tokens, origin_ns - process.wall_offset_ns)]
            for process in news.spans
            for span in process.spans
        ]
    return told


def _pass(span: Span, prompt_tokens: int, origin_ns: int) -> list[Any]:
    began, ended = ((ns - origin_ns) / 1e6 for ns in (span.began_ns, span.ended_ns))
    token = None if span.position < 0 else span.position - prompt_tokens
    return [_WHAT[Kind(span.kind)], round(began, 3), round(ended, 3), token]
