"""An agent's edit: a file of 200 lines is written again with three changes.

A small model does not change a file by itself, and an answer that is forced is not the model's own. So the answer comes
in four parts: each prompt ends where the file begins or within a changed line, and the model goes on with what it has
read. Lines have numbers, as agents read them.
"""

import random
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import product

from ppd_runtime.methods.ordinary import OrdinaryDecoding

_LINES, _CHANGES, _GIVEN = 200, 3, 8
_IN_A_ROW = 8  # tokens that make a quotation
_PARTS = "server client cache index queue worker backup mail image video search login report audit billing export"
_SETTINGS = "timeout limit retries folder address port owner colour format language encoding priority level version"
_VALUES = "true false 30 8080 120 blue english /var/lib/data 10.0.0.7 json admin 64 never weekly utf-8 high"


def file_lines() -> list[str]:
    """The file, always the same: settings in no order, each with its line's number."""
    draw = random.Random(0)
    names = draw.sample([f"{part}_{name}" for part, name in product(_PARTS.split(), _SETTINGS.split())], _LINES)
    return [f"{number:03d} {name} = {draw.choice(_VALUES.split())}" for number, name in enumerate(names, 1)]


def edit_prompts(ordinary: OrdinaryDecoding) -> list[list[int]]:
    """The token ids of the four prompts."""
    lines = file_lines()
    read = "\n".join(lines)
    after, ends = [*lines], [_GIVEN]
    for change in range(1, _CHANGES + 1):
        place = change * _LINES // (_CHANGES + 1)
        after[place] = after[place].partition(" = ")[0] + " = changed"
        ends.append(place + 1)
    written = ["\n".join(after[:end]) for end in ends]
    return ordinary.encoded([f"{read}\n\n\n{text}" for text in written])


def quoted(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of an answer's tokens that stand in the prompt in the same order, eight in a row at least."""
    blocks = SequenceMatcher(None, prompt, answer, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= _IN_A_ROW) / len(answer)
