"""Prompts of code that the demo model has not seen: passages of the corpus' held-out files.

    python -m benchmarks.held_out held_out.jsonl --count 24 --characters 600

The files are those of the running Python's standard library; with another version than the demo model's card names,
some of them may be other texts.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.recording import write_whole
from ppd_runtime.training.corpus import Document, read_standard_library


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("out", type=Path, help="write the prompts here, one object a line")
    found.add_argument("--count", type=int, default=24, help="prompts")
    found.add_argument("--characters", type=int, default=600, help="of each prompt, up to the end of a line")
    return found


def prompts(documents: list[Document], count: int, characters: int) -> list[dict[str, str]]:
    """Passages of held-out Python files, each from another file while there are some left; always the same ones."""
    files = [d for d in documents if d.held_out and d.path.endswith(".py") and len(d.text) > 2 * characters]
    if not files:
        raise SystemExit(f"no held-out file has {2 * characters} characters: ask for shorter prompts")
    draws = np.random.default_rng(0)
    found = []
    for number in range(count):
        document = files[number % len(files)]
        first = document.text.rfind("\n", 0, int(draws.integers(1, len(document.text) - characters))) + 1
        last = document.text.find("\n", first + characters) + 1 or len(document.text)
        found.append({"id": f"{document.path}@{first}", "prompt": document.text[first:last]})
    return found


def main() -> None:
    """Write the file."""
    options = parser().parse_args()
    lines = [json.dumps(p) + "\n" for p in prompts(read_standard_library(), options.count, options.characters)]
    write_whole(options.out, "".join(lines))


if __name__ == "__main__":
    main()
