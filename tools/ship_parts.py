"""Ships parts for SmolLM2: copies what `ppd adapt` wrote into the package, and writes their card.

ppd adapt smollm2 --minutes 20 --out FOLDER
python -m tools.ship_parts FOLDER
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.packages import SMOLLM2
from ppd_runtime.models.trained.drafter import describe_drafter
from ppd_runtime.models.trained.heads import describe_heads
from ppd_runtime.models.trained.kept_heads import DRAFTER, SHIPPED, folder_name
from ppd_runtime.tune.measured_on import machine, versions

REPORT, CARD = "report.json", "README.md"
MOST_BYTES = 15_000_000
_KS = ("1", "3", "5")


def ship(made: Path, info: ModelInfo, place: Path = SHIPPED) -> Path:
    """Put the parts of a folder in place of those that are shipped for the model; gives their folder.

    Raises:
        ValueError: for parts of another model, or too large ones.
    """
    describe_heads(made, info)
    describe_drafter(made / DRAFTER, info)
    size = sum(path.stat().st_size for path in made.rglob("*"))
    if size > MOST_BYTES:
        raise ValueError(f"{made} has {size:,} bytes, more than the {MOST_BYTES:,} that may ship")
    shipped = place / folder_name(info)
    shutil.rmtree(shipped, ignore_errors=True)
    place.mkdir(exist_ok=True)
    with atomic_file(shipped) as folder:
        shutil.copytree(made, folder)
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        for of_this_machine in ("folder", "plan"):
            report.pop(of_this_machine, None)
        report |= {"machine": machine(), "versions": versions()}
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(card(report), encoding="utf-8")
    return shipped


def card(report: dict[str, Any]) -> str:
    """The parts' card, by the report that ships with them."""
    model, tokens, kinds = report["model"], sum(report["held_out"].values()), ", ".join(report["held_out"])
    greedy, sampled = report["greedy"], report["sampled"]
    columns = [f"{way}k = {k}" for way in ("", "temperature 1, ") for k in _KS]
    return f"""# Parts for {model}

Heads for the boundaries of 2 and of 4 stages, and a drafter. They are found by themselves where the model is opened.
`ppd adapt {model}` makes others, which take their place.

- made by `ppd adapt {model} --minutes 20` in {report["minutes"]:.1f} minutes on {report["machine"]}, \
with torch {report["versions"]["torch"]}
- learned from {report["places"]:,} tokens of {report["texts"]:,} answers of the model to prompts of the package
- name {report["shortlist"]:,} tokens, which have {greedy["covered"]:.3f} of full depth's choices, at temperature 1 \
{sampled["covered"]:.3f}
- Apache-2.0, like the model and the prompts

How often full depth's choice is among the k best, on {tokens:,} tokens of held-out prompts ({kinds}). At temperature 1
guesses are ranked with the noise that the choice is drawn with. `report.json` has each kind of prompt.

| guesses | {" | ".join(columns)} |
|{"---|" * 7}
{chr(10).join(_rows(greedy, sampled))}
"""


def _rows(greedy: dict[str, Any], sampled: dict[str, Any]) -> Iterator[str]:
    for layers in zip(greedy["layers"], sampled["layers"], strict=True):
        for when, whose in (("before", "the model's own head"), ("after", "the head")):
            yield _row(f"layer {layers[0]['layer']}, {whose}", *(layer[when] for layer in layers))
    for number, steps in enumerate(zip(greedy["drafter"], sampled["drafter"], strict=True), 1):
        yield _row(f"the drafter's token {number}", *steps)


def _row(whose: str, *shares: dict[str, dict[str, float]]) -> str:
    cells = [whose, *(f"{of_way['all'][k]:.3f}" for of_way in shares for k in _KS)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Ship the parts of the folder that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `ppd adapt smollm2 --out` wrote")
    ship(parser.parse_args().folder, describe(SMOLLM2))


if __name__ == "__main__":
    main()
