"""An agent's edit: a file of 200 lines, this project's licence, is written again with three changes.

A small model does not change a file by itself, and an answer that is forced is not the model's own. So the answer comes
in four parts: each prompt holds the file and ends behind the answer's first lines or behind a changed word, and the
model goes on with what it has read.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from ppd_runtime.methods.ordinary import OrdinaryDecoding

_FILE = Path(__file__).parents[1] / "LICENSE"
_LINES, _CHANGES, _GIVEN = 200, 3, 8
_IN_A_ROW = 8  # tokens that make a quotation


def edit_texts() -> list[str]:
    """The four prompts."""
    lines = _FILE.read_text().splitlines()[:_LINES]
    read, written, ends = "\n".join(lines), [*lines], [_GIVEN]
    for change in range(1, _CHANGES + 1):
        place = next(at for at in range(change * _LINES // (_CHANGES + 1), _LINES) if lines[at].strip())
        written[place] = f"{lines[place].rpartition(' ')[0]} changed"
        ends.append(place + 1)
    return ["\n".join([read, "", "", *written[:end]]) for end in ends]


def edit_prompts(ordinary: OrdinaryDecoding) -> list[list[int]]:
    """The prompts' token ids."""
    return ordinary.encoded(edit_texts())


def quoted(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of an answer's tokens that stand in the prompt in the same order, eight in a row at least."""
    blocks = SequenceMatcher(None, prompt, answer, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= _IN_A_ROW) / len(answer)
