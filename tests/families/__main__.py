"""`PYTHONPATH=tests python -m families docs/families.md`: the guide's table of families; the tests hold to it."""

import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import transformers
from families.specimens import SPECIAL, SUPPORTED, Specimen, every_family

from ppd_runtime.models.checkpoint.description import check_leaving_out, describe
from ppd_runtime.models.checkpoint.wrappers import WRAPPERS
from ppd_runtime.models.stage.library_probe import has_states, runs_in_library
from ppd_runtime.models.stage.paired import counting_layers
from ppd_runtime.models.stage.wide import is_wide

_HEAD = """# Families

This page lists the model types that the runtime supports, and those that it refuses, with the reason.
`PYTHONPATH=tests python -m families docs/families.md` writes it, with transformers {version}.

The tests make a small random model of each supported type and of each special configuration. Ordinary decoding gives
the tokens of transformers' `generate`. Layouts and methods give ordinary decoding's tokens, greedy and sampled, in
float32. `make test` tries one layout and one method for each model, one of them greedy and one sampled.
`make nightly` tries all layouts and methods, with more prompts, and layouts in bfloat16.
[Exactness](exactness.md#what-transformers-does-counts) says how windows and rotary tables are found.
"""
_WRAPPERS = """
## Text models of multimodal models

Of these models the runtime runs the text model alone. Messages with pictures are refused.

{families}"""
_SPECIAL = """
## Special configurations

The tests also try these settings of supported types. "Overlooked" fields are in the configuration, but the model's code
does not read them.
"""
_NEXT = """
## What to read next

- [Exactness](exactness.md): what holds for these models.
- [Running it](runtime.md#models): where models come from.
- [CONTRIBUTING.md](../CONTRIBUTING.md#adding-a-model-family): how to add one."""

_FORMS = {
    "gemma4_text": ({"hidden_size_per_layer_input": 8},),
    "gemma4_unified_text": ({"num_kv_shared_layers": 2},),
}
"""Settings of supported families with which more is refused."""


def main(out: Path) -> None:
    """Ask for each family, without weights, and write the page."""
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    if wrong := sorted(family for family in SUPPORTED if refusal(Specimen(family))):
        raise SystemExit(f"the tests' list of supported families has some that are refused: {', '.join(wrong)}")
    out.write_text(page(refusal, without))


def page(why_refused: Callable[[Specimen], str], why_without: Callable[[Specimen], str]) -> str:
    """The guide's page, whose second column is what these functions say."""
    supported = [f"| `{family}` | {why_without(Specimen(family))} |" for family in SUPPORTED]
    others = [
        f"| `{family}` | {why_refused(Specimen(family))} |"
        for family in every_family()
        if family not in (*SUPPORTED, *WRAPPERS)
    ]
    lines = [
        _HEAD.format(version=transformers.__version__),
        "## Supported\n\n| model type | what is refused for this type |\n|---|---|",
        *supported,
        _WRAPPERS.format(families=", ".join(f"`{family}`" for family in WRAPPERS)),
        _SPECIAL,
        *(f"- {specimen.name}" for specimen in SPECIAL),
        "\n## Refused, or not tried\n\n| model type | why |\n|---|---|",
        *others,
        _NEXT,
    ]
    return "\n".join(lines) + "\n"


def refusal(specimen: Specimen) -> str:
    """Why a family is refused, in a table's cell; empty where it is not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            specimen.config().save_pretrained(folder)
        except Exception:  # noqa: BLE001 (the library's own refusals have every type there is)
            return "not tried: its configuration cannot have the tests' small shape"
        try:
            describe(folder, needs_weights=False)
        except ValueError as error:
            why = _cell(error).partition("): ")[2] or _cell(error).replace(folder, "…")
            return why.removesuffix(why[why.find("; a decoder with") :] if "; a decoder with" in why else "")
    return "" if specimen.family in SUPPORTED else "not tried: the common shape does not make it small"


def without(specimen: Specimen) -> str:
    """The methods and settings that a supported family cannot be run by, and why."""
    reasons = _reasons(specimen)
    for settings in _FORMS.get(specimen.family, ()):
        form = Specimen(specimen.family, settings=specimen.settings | settings)
        reasons += [f"with `{name}` {reason}" for name in settings for reason in _reasons(form)]
    return "; ".join(reasons)


def _reasons(specimen: Specimen) -> list[str]:
    config = specimen.config()
    what = runs_in_library(counting_layers(config))
    users = "compile, kangaroo, training" if is_wide(config) else "compile"
    reasons = [f"{users}: its layers {what}"] if what else []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            check_leaving_out(describe(folder, needs_weights=False), "swift")
        except ValueError as error:
            what = "compile, swift, kangaroo" if has_states(config) else "swift, kangaroo"
            reasons.append(f"{what}: {_cell(error).partition('): ')[2].partition(';')[0]}")
    return reasons


def _cell(error: Exception) -> str:
    return " ".join(str(error).split()).replace("|", "/")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
