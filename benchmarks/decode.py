"""Ordinary decoding on one core beside the time to read its weights, in each format, and what formats cost in quality.

    python -m benchmarks.decode --json figures.json
    python -m benchmarks.decode --model random:512x12 --rounds 3 --no-quality

Times are `benchmarks.peers`' of this project and of transformers' `generate`. Quality is beside the stored weights in
float32 passes: the loss on held-out text, with the standard error of the rows' differences; the greedy tokens that are
the same behind the same text; and the whole texts that are. Models of few bits and GGUF files have times alone.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks import peers
from benchmarks.engines import COMPILED, EAGER
from benchmarks.models import model_folder
from benchmarks.recording import Figures, positive, run, table_of
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.settings.config import FORMATS
from ppd_runtime.training.texts import read_texts, token_rows
from ppd_runtime.tune.prompt_files import read_prompts

_LENGTH, _PROMPT = 512, 200  # tokens of a row of text, and of a prompt at the most


def measure(options: argparse.Namespace) -> Figures:
    """The times, and the quality of each format where the model has weights in floats."""
    held_out = read_texts(options.data).held_out  # before anything that takes long
    figures = peers.measure(options)
    with model_folder(options.model) as model:
        if options.no_quality or describe(model).weights:
            return figures | {"quality": []}
        ways: list[dict[str, Any]] = [{"dtype": one} for one in ("float32", "bfloat16")]
        ways += [{"weights": one} for one in FORMATS]
        found = list[tuple[list[float], list[list[int]], list[list[int]]]]()
        for way in ways:
            found.append(_try(model, way, held_out, options, found[0][1] if found else None))
    return figures | {"quality": [_beside(way, one, found[0]) for way, one in zip(ways, found, strict=True)]}


@torch.inference_mode()
def _try(
    model: str, way: dict[str, Any], held_out: Any, options: argparse.Namespace, first: Sequence[list[int]] | None
) -> tuple[list[float], list[list[int]], list[list[int]]]:
    """Losses of rows of held-out text, greedy texts, and the likeliest tokens behind each start of the first way's."""
    with OrdinaryDecoding(model, **way) as decoding:
        stage, vocab_size = decoding.stage, decoding.info.vocab_size
        rows = token_rows(decoding.tokenizer, held_out, _LENGTH, vocab_size)
        prompts = [decoding.tokenizer.encode(prompt.text)[:_PROMPT] for prompt in read_prompts("demo", options.texts)]
        ask = {"max_new_tokens": options.tokens, "ignore_eos": True}
        texts = [list(decoding.generate(prompt, **ask).token_ids) for prompt in prompts]

        def logits(ids: list[int], behind: int) -> torch.Tensor:
            stage.begin(len(ids))
            return stage.token_logits(stage.run(0, stage.num_layers, ids, 0)[:, behind:])

        wanted = min(options.rows, len(rows))
        some = [rows[number * len(rows) // wanted] for number in range(wanted)]
        losses = [cross_entropy(logits(row[:-1].tolist(), 0), row[1:]).item() for row in some]
        choices = [
            logits([*prompt, *text[:-1]], len(prompt) - 1).argmax(-1).tolist()
            for prompt, text in zip(prompts, first or texts, strict=True)
        ]
    return losses, texts, choices


def _beside(way: dict[str, Any], found: Any, first: Any) -> Figures:
    """The quality of a way beside the first one's."""
    losses, texts, choices = found
    more = [loss - its for loss, its in zip(losses, first[0], strict=True)]
    same = [a == b for ours, its in zip(choices, first[1], strict=True) for a, b in zip(ours, its, strict=True)]
    return {
        "weights": way.get("weights", f"{way.get('dtype')} passes"),
        "loss": statistics.fmean(losses),
        "more_loss": statistics.fmean(more),
        "standard_error": statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0,
        "equal_tokens": statistics.fmean(same),
        "equal_texts": statistics.fmean(text == its for text, its in zip(texts, first[1], strict=True)),
    }


def table(figures: Figures) -> str:
    """The times, then the quality."""
    heads = {"weights": "weights", "loss": "loss, nats a token", "more_loss": "more", "standard_error": "±"}
    quality = table_of(figures["quality"], **heads, equal_tokens="greedy tokens equal", equal_texts="texts equal")
    return "\n\n".join([peers.table(figures), *[quality] * bool(figures["quality"])])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = peers.parser(__doc__)
    found.set_defaults(engines=[EAGER, COMPILED, "transformers"], threads=[1])
    found.add_argument("--no-quality", action="store_true", help="times alone")
    found.add_argument("--data", default="demo", help="texts as `ppd train` takes them; those it holds out are read")
    found.add_argument("--rows", type=positive, default=32, help="of 512 tokens of held-out text, at the most")
    found.add_argument("--texts", type=positive, default=24, help="of the shipped prompts, for equal tokens and texts")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
