"""`ppd quantize`: a folder of a model with weights of few bits."""

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import AsJson
from ppd_runtime.settings.config import FORMATS, RuntimeConfig
from ppd_runtime.settings.fields import summary

Format = Enum("Format", {name: name for name in FORMATS}, type=str)  # type: ignore[misc]


def quantize(
    model: Annotated[str, typer.Argument(help=summary(RuntimeConfig, "model"))],
    out: Annotated[Path, typer.Argument(help="The folder to write, which is not there yet.")],
    weights: Annotated[Format, typer.Option(help="The format of the layers' matrices; the head has int8 in both.")],
    as_json: AsJson = False,
) -> None:
    """Write a model with int8 or int4 weights, which opens wherever a model's folder does."""
    with one_line_errors(quantize):
        from ppd_runtime.models.checkpoint.quantised_folder import quantise_model

        card = quantise_model(model, out, weights.value)
    if as_json:
        print(json.dumps(asdict(card)))
    else:
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        print(f"{out}: {card.source} with {card.weights} weights, {size / 1e6:.3g} MB")
