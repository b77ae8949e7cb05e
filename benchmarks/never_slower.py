"""Each layout beside ordinary decoding on one core, in turn, with default settings: is it ever slower?

    python -m benchmarks.never_slower --model smollm2 --prompts prompts.jsonl --json figures.json
    python -m benchmarks.never_slower --model random:300m --layouts stages=2 --weights int8
    python -m benchmarks.never_slower --model smollm2 --never-right

Prompts are chats where the model has a template. Times are for a token after the first; the first request of a layout
is told by itself, with nothing known of earlier starts. With --never-right exit heads name wrong tokens alone.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch import guessing_times
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.tune.comparison.in_turn import on_core_of
from ppd_runtime.tune.prompt_files import read_prompts

LAYOUTS: Mapping[str, dict[str, int]] = {"stages=2": {"stages": 2}, "k=1": {"k": 1}, "k=3": {"k": 3}}
_MOST_PROMPT = 256  # tokens of a text without a template


def measure(options: argparse.Namespace) -> Figures:
    """The ratios of each layout, and of its first request."""
    place = {"weights": options.weights, "dtype": options.dtype}
    with model_folder(options.model) as model, OrdinaryDecoding(model, **place) as ordinary:
        prompts = _prompts(ordinary, options)
        rows = [_row(name, model, place, ordinary, prompts, options) for name in options.layouts.split(",")]
    about = {"model": options.model, "weights": options.weights, "compiled": ordinary.config.compile}
    return {**about, "tokens": options.tokens, "prompts": len(prompts), "rows": rows}


def _prompts(ordinary: OrdinaryDecoding, options: argparse.Namespace) -> list[list[int]]:
    texts = [prompt.text for prompt in read_prompts(options.prompts, options.limit)]
    if not ordinary.tokenizer.chat_template:
        return [ordinary.prompt_ids(text)[:_MOST_PROMPT] for text in texts]
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [ordinary.prompt_ids(ordinary.chat_prompt(chat), add_special_tokens=False) for chat in chats]


def _row(
    name: str,
    model: str,
    place: Mapping[str, Any],
    ordinary: OrdinaryDecoding,
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> Figures:
    layout: dict[str, Any] = dict(LAYOUTS[name])
    ask = {"max_new_tokens": options.tokens, "ignore_eos": True}
    if options.never_right:
        texts = tuple((*ids, *ordinary.generate(ids, **ask).token_ids) for ids in prompts)
        layout["exit_head"] = OracleHead(texts, 0.0, ordinary.info.vocab_size)
    with _nothing_known(), PPDRuntime(model, **place, **layout) as runtime:
        pairs = []
        for number in range(1 + options.rounds):
            for ids in prompts[:1] if number == 0 else prompts:  # the first request has a time of its own
                with on_core_of(runtime):
                    expected = ordinary.generate(ids, **ask)
                pairs.append((expected, runtime.generate(ids, **ask)))
    ratios = [got.stats.time_per_token_s / expected.stats.time_per_token_s for expected, got in pairs]
    by_prompt = [statistics.median(ratios[1 + i :: len(prompts)]) for i in range(len(prompts))]
    return {
        "layout": name,
        "ordinary_ms": 1e3 * statistics.median(expected.stats.time_per_token_s for expected, _ in pairs[1:]),
        "layout_ms": 1e3 * statistics.median(got.stats.time_per_token_s for _, got in pairs[1:]),
        "ratio": statistics.median(ratios[1:]),
        "slowest_prompt": max(by_prompt),
        "first_request": ratios[0],
        "match_rate": _rate(pairs),
        "identical": all(expected.token_ids == got.token_ids for expected, got in pairs),
    }


def _rate(pairs: Sequence[tuple[Any, Any]]) -> float | None:
    found = [got.stats.match_rate for _, got in pairs if got.stats.match_rate is not None]
    return statistics.mean(found) if found else None


@contextlib.contextmanager
def _nothing_known() -> Iterator[None]:
    """No finding of an earlier start counts; compiled code and copies of weights do."""
    known, guessing_times.noted = guessing_times.noted, lambda *_: ()
    try:
        yield
    finally:
        guessing_times.noted = known


def table(figures: Figures) -> str:
    """A row a layout."""
    columns = [
        *("layout", "ordinary, ms a token", "layout, ms a token", "ratio"),
        *("slowest prompt", "first request", "match rate", "tokens identical"),
    ]
    names = (
        "layout",
        "ordinary_ms",
        "layout_ms",
        "ratio",
        "slowest_prompt",
        "first_request",
        "match_rate",
        "identical",
    )
    return markdown(columns, [[row[name] for name in names] for row in figures["rows"]])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="smollm2", help=MODEL_HELP)
    found.add_argument("--weights", choices=["int8", "int4"])
    found.add_argument("--dtype", default="auto")
    found.add_argument("--prompts", default="demo", help="JSON lines with a prompt each, or demo")
    found.add_argument("--limit", type=positive, default=12)
    found.add_argument("--tokens", type=positive, default=64)
    found.add_argument("--rounds", type=positive, default=1)
    found.add_argument("--layouts", default=",".join(LAYOUTS))
    found.add_argument("--never-right", action="store_true")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
