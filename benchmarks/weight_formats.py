"""What weights of few bits cost in quality: the loss on held-out text, and the greedy tokens that stay the same.

    python -m benchmarks.weight_formats --json figures.json
    python -m benchmarks.weight_formats --model FOLDER --data texts.jsonl --rows 100

All are compared with the weights as they are stored, in passes in float32. The loss is over `--rows` rows of held-out
text, spread evenly over it; the standard error is that of the rows' differences. Equal tokens are those that are chosen
behind the same text, the greedy one of the stored weights. Equal texts are each way's own; one goes on otherwise behind
its first other token, so what is equal at the start is counted up to there, or to the end.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.config import FORMATS
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.loading import weight_bytes
from ppd_runtime.models.checkpoint.quantised import PackedModel
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.training.texts import read_texts, token_rows
from ppd_runtime.tune.comparison.methods import common_start
from ppd_runtime.tune.match_rates import cpu_threads
from ppd_runtime.tune.prompt_files import read_prompts


@dataclass(frozen=True)
class Way:
    """One way of holding a model's weights."""

    weights: str
    states: str
    """The dtype of all else."""
    num_bytes: int
    """Of the weights, as they lie in a model's folder."""
    settings: Mapping[str, str]
    """Those of `OrdinaryDecoding`."""


@dataclass(frozen=True)
class Found:
    """What a way gave."""

    losses: Sequence[float]
    """Of each row of held-out text, nats a token."""
    texts: Sequence[Sequence[int]]
    """Behind each prompt."""
    choices: Sequence[Sequence[int]]
    """Behind each prompt and each start of the first way's text."""


def measure(options: argparse.Namespace) -> Figures:
    """Try every way, one after the other; the figures by name."""
    data, prompts = read_texts(options.data), read_prompts(options.prompts, options.limit)
    with model_folder(options.model) as model, cpu_threads(1):
        info, found = describe(model), list[tuple[Way, Found]]()
        for way in ways(options.model, info):
            with OrdinaryDecoding(model, **way.settings) as decoding:
                held_out = token_rows(decoding.tokenizer, data.held_out, options.length, info.vocab_size)
                rows = _some(held_out, options)
                ids = [decoding.tokenizer.encode(prompt.text)[: options.prompt_tokens] for prompt in prompts]
                first = found[0][1].texts if found else None
                found.append((way, _try(decoding, rows, ids, options.tokens, first)))
    return {
        "model": options.model,
        "layers": info.num_layers,
        "data": options.data,
        "data_sha256": data.sha256,
        "held_out_tokens": len(found[0][1].losses) * options.length,
        "prompts": len(prompts),
        "tokens": options.tokens,
        "formats": [_figures(way, one, found[0][1]) for way, one in found],
    }


def ways(name: str, info: ModelInfo) -> Iterator[Way]:
    """The weights as stored, in passes in float32 and in half precision, and in each format of few bits.

    Raises:
        ValueError: for a model whose weights have few bits already.
    """
    if info.weights:
        raise ValueError(f"--model {name}: has {info.weights} weights; give the model that they were made of")
    stored = model_config(info.folder).dtype or torch.float32
    half = torch.bfloat16 if stored == torch.float32 else stored
    for weights, states in ((stored, torch.float32), (half, half)):
        size = weight_bytes(info, 0, info.num_layers, weights)
        yield Way(_name(weights), _name(states), size, {"dtype": _name(states)})
    for weights in FORMATS:
        with PackedModel(describe(str(info.folder), weights)) as packed:
            size = packed.num_bytes
        yield Way(weights, "float32", size, {"weights": weights})


def _try(
    decoding: OrdinaryDecoding,
    rows: Tensor,
    prompts: Sequence[list[int]],
    tokens: int,
    first: Sequence[Sequence[int]] | None,
) -> Found:
    """A way, on rows of held-out text and behind prompts; `first` is the first way's texts, None where this is it."""
    stage = decoding.stage
    texts = [decoding.generate(ids, max_new_tokens=tokens, ignore_eos=True).token_ids for ids in prompts]
    choices = [_choices(stage, ids, text) for ids, text in zip(prompts, first or texts, strict=True)]
    return Found([_loss(stage, row) for row in rows], texts, choices)


@torch.inference_mode()
def _loss(stage: Stage, row: Tensor) -> float:
    """Mean cross-entropy to the next token."""
    inputs, labels = row[:-1].tolist(), row[1:]
    stage.begin(len(inputs))
    logits = stage.token_logits(stage.run(0, stage.num_layers, inputs, 0))
    return F.cross_entropy(logits, labels).item()


@torch.inference_mode()
def _choices(stage: Stage, prompt: list[int], text: Sequence[int]) -> list[int]:
    """The likeliest token behind the prompt and every start of the text but the whole."""
    inputs = [*prompt, *text[:-1]]
    stage.begin(len(inputs))
    hidden = stage.run(0, stage.num_layers, inputs, 0)[:, len(prompt) - 1 :]
    return stage.token_logits(hidden).argmax(-1).tolist()


def _figures(way: Way, found: Found, first: Found) -> Figures:
    """A way's, beside the first one's."""
    more = [loss - before for loss, before in zip(found.losses, first.losses, strict=True)]
    pairs = list(zip(found.choices, first.texts, strict=True))
    same = sum(ours == its for choices, text in pairs for ours, its in zip(choices, text, strict=True))
    tokens = sum(len(text) for text in first.texts)
    equal = [common_start(text, its) for text, its in zip(found.texts, first.texts, strict=True)]
    return {
        "weights": way.weights,
        "states": way.states,
        "bytes": way.num_bytes,
        "loss": statistics.fmean(found.losses),
        "more_loss": statistics.fmean(more),
        "more_loss_standard_error": statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else None,
        "compared_tokens": tokens,
        "equal_tokens": same,
        "equal_tokens_share": same / tokens,
        "equal_texts": sum(n == len(its) for n, its in zip(equal, first.texts, strict=True)),
        "equal_at_the_start": equal,
        "mean_equal_at_the_start": statistics.fmean(equal),
    }


def _some(rows: Tensor, options: argparse.Namespace) -> Tensor:
    """As many rows as are asked for, or as there are, spread evenly."""
    if not len(rows):
        raise ValueError(f"--length {options.length}: {options.data}'s held-out text has fewer tokens; give fewer")
    wanted = min(options.rows, len(rows))
    return rows[[number * len(rows) // wanted for number in range(wanted)]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(figures: Figures) -> str:
    """A row for each way, in Markdown."""
    columns = ["model", "weights", "all else", "MB", f"loss, {figures['held_out_tokens']} tokens", "more"]
    columns += ["tokens equal", "texts equal", f"equal at the start, mean of {figures['tokens']}"]
    rows = [
        [
            figures["model"],
            row["weights"],
            row["states"],
            f"{row['bytes'] / 1e6:.4g}",
            f"{row['loss']:.4f}",
            _more(row),
            f"{row['equal_tokens_share']:.2%} of {row['compared_tokens']}",
            f"{row['equal_texts']} of {figures['prompts']}",
            f"{row['mean_equal_at_the_start']:.1f}",
        ]
        for row in figures["formats"]
    ]
    return markdown(columns, rows)


def _more(row: Figures) -> str:
    error = row["more_loss_standard_error"]
    return f"{row['more_loss']:+.5f} ± {error:.5f}" if error else f"{row['more_loss']:+.5f}"


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--data", default="demo", help="texts as `ppd train` takes them; those it holds out are read")
    options.add_argument("--rows", type=positive, default=32, help="of held-out text, at the most")
    options.add_argument("--length", type=positive, default=512, help="tokens of a row")
    options.add_argument("--prompts", default="demo", help="a JSON Lines file, or the embedded prompts")
    options.add_argument("--limit", type=positive, default=24, help="prompts")
    options.add_argument("--prompt-tokens", type=positive, default=200, help="of each prompt, at the most")
    options.add_argument("--tokens", type=positive, default=64, help="new tokens for each prompt")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
