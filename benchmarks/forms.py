"""What a JSON schema costs: a token with its masks beside one without, in turn, in ordinary decoding.

python -m benchmarks.forms --model smollm2 --rounds 5 --json figures.json
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, new_parser, positive, run, table_of
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.results import GenerationResult
from ppd_runtime.sampling.constraint import Constraint

PROMPT = "Anna Berg is 31 years old, likes chess and rowing, and lives in Oslo. As JSON: "
_STRINGS = {name: {"type": "string", "maxLength": 200} for name in ("name", "town", "about")}
SCHEMA = {
    "type": "object",
    "properties": {**_STRINGS, "age": {"type": "integer"}, "likes": {"type": "array", "items": {"type": "string"}}},
    "required": [*_STRINGS, "age", "likes"],
    "additionalProperties": False,
}
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.8": {"temperature": 0.8, "seed": 1}}


def measure(options: argparse.Namespace) -> Figures:
    """For each kind of sampling the pairs of times a token, and the masks' times."""
    rows = []
    with model_folder(options.model) as model, OrdinaryDecoding(model) as ordinary, _timed() as spent:
        for name, settings in SETTINGS.items():
            pairs = []
            for _ in range(1 + options.rounds):  # the first one warms up
                spent.clear()
                formed = ordinary.generate(PROMPT, max_new_tokens=options.tokens, schema=SCHEMA, **settings)
                tokens = formed.stats.new_tokens
                free = ordinary.generate(PROMPT, max_new_tokens=tokens, ignore_eos=True, **settings)
                pairs.append((_token_ms(formed), _token_ms(free)))
            rows.append({"sampling": name, "tokens": tokens, "pairs": pairs[1:], "mask_us": 1e6 * median(spent)})
    return {"model": options.model, "rows": rows}


@contextmanager
def _timed() -> Iterator[list[float]]:
    """The seconds of each masking of scores."""
    spent, masked = list[float](), Constraint.masked

    def timed(self: Constraint, scores: Tensor, text: Any) -> Tensor:
        began = time.perf_counter()
        found = masked(self, scores, text)
        spent.append(time.perf_counter() - began)
        return found

    Constraint.masked = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Constraint.masked = masked  # type: ignore[method-assign]


def _token_ms(result: GenerationResult) -> float:
    """Milliseconds of a token after the first."""
    return 1000 * result.stats.time_per_token_s


def table(figures: Figures) -> str:
    """A row for each kind of sampling."""
    rows = []
    for row in figures["rows"]:
        formed, free = ([*times] for times in zip(*row["pairs"], strict=True))
        ratios = [one / other for one, other in row["pairs"]]
        rows.append({**row, "formed": formed, "free": free, "ratios": ratios, "mask_us": round(row["mask_us"])})
    heads = {"formed": "with a schema, ms a token", "free": "without", "ratios": "ratio", "mask_us": "a mask, µs"}
    return table_of(rows, sampling=figures["model"], tokens="tokens", **heads)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="smollm2", help=MODEL_HELP)
    found.add_argument("--rounds", type=positive, default=5, help="pairs of each kind of sampling")
    found.add_argument("--tokens", type=positive, default=64, help="most new tokens of a text")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
