"""`PYTHONPATH=tests python -m families docs/families.md`: the guide's table of families; the tests hold to it."""

import logging
import sys
import tempfile
from pathlib import Path

import transformers
from families.specimens import SPECIAL, SUPPORTED, Specimen, every_family

from ppd_runtime.models.checkpoint.description import check_leaving_out, describe
from ppd_runtime.models.checkpoint.hub import one_line

_HEAD = """# Families

Written by `PYTHONPATH=tests python -m families docs/families.md`, with transformers {version}.

The tests make a small random model of each supported family and of each special configuration. Ordinary decoding
gives the tokens of transformers' `generate`; layouts and methods give ordinary decoding's, greedy and sampled, in
float32. `make test` tries a layout and a method for each, `make nightly` all of them, with more prompts, and layouts in
bfloat16.
[exactness.md](exactness.md) says how windows and rotary tables are found.
"""
_NEXT = """
## What to read next

- [Exactness](exactness.md): what holds for these models.
- [Running it](runtime.md#models): where models come from.
- [CONTRIBUTING.md](../CONTRIBUTING.md#adding-a-model-family): how to add one."""


def main(out: Path) -> None:
    """Ask for each family, without weights, and write the table."""
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    refusals = {family: refusal(Specimen(family)) for family in every_family()}
    wrong = sorted(family for family in SUPPORTED if refusals[family])
    if wrong:
        raise SystemExit(f"the tests' list of supported families has some that are refused: {', '.join(wrong)}")
    supported = [f"| `{family}` | {without(Specimen(family))} |" for family in SUPPORTED]
    others = [f"| `{family}` | {why} |" for family, why in refusals.items() if family not in SUPPORTED]
    lines = [
        _HEAD.format(version=transformers.__version__),
        "## Supported\n\n| model type | methods that it is refused for |\n|---|---|",
        *supported,
        "\n## Special configurations\n",
        *(f"- {specimen.name}" for specimen in SPECIAL),
        "\n## Refused, or not tried\n\n| model type | why |\n|---|---|",
        *others,
        _NEXT,
    ]
    out.write_text("\n".join(lines) + "\n")


def refusal(specimen: Specimen) -> str:
    """Why a family is refused, in a table's cell; empty where it is not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            specimen.config().save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 (the library's own refusals have every type there is)
            return f"not tried: its configuration refuses the small shape ({_cell(error)})"
        try:
            describe(folder, needs_weights=False)
        except ValueError as error:
            why = _cell(error).partition("): ")[2] or _cell(error).replace(folder, "…")
            return why.removesuffix(why[why.find("; a decoder with") :] if "; a decoder with" in why else "")
    return "" if specimen.family in SUPPORTED else "not tried: the common shape does not make it small"


def without(specimen: Specimen) -> str:
    """The methods that a supported family cannot be run by, and why."""
    with tempfile.TemporaryDirectory() as folder:
        specimen.config().save_pretrained(folder)
        try:
            check_leaving_out(describe(folder, needs_weights=False), "swift")
        except ValueError as error:
            return f"swift, kangaroo: {_cell(error).partition('): ')[2].partition(';')[0]}"
    return ""


def _cell(error: Exception) -> str:
    return one_line(error).replace("|", "/")[:200]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
