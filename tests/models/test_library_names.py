"""Nothing here asks the library by a name that it gives up in some version: users would read its warning."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from families.attack import Attack, prompts
from families.specimens import SPECIAL, Specimen
from transformers.utils import logging as library_logging

import ppd_runtime

OLD = {"past_key_values", "cache_params"}
(E2B,) = (one for one in SPECIAL if one.name == "gemma4_text, as E2B has them")
SPECIMENS = [*map(Specimen, ("llama", "qwen3_next", "mamba2", "gemma3n_text")), E2B]
"""One of keys and values, a hybrid, one of states alone, and such as have wide states."""


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the library logs, also what it logs once in a process."""
    found = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.Logger.warning_once.cache_clear()
    library_logging.set_verbosity_warning()
    library_logging.add_handler(handler)
    yield found
    library_logging.remove_handler(handler)


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda specimen: specimen.name)
def test_decoding_is_warned_of_no_name(
    specimen: Specimen, tmp_path: Path, said: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    """In both layouts and a method; `FutureWarning`s are what the library warns of arguments' names with."""
    attack = Attack.on(specimen, tmp_path, new_tokens=4)
    logging.getLogger("transformers").warning("deprecated: the test hears what the library says")
    attack.against_ordinary(prompts([5]), ["k=1", "a stage a layer"], ["layerskip"])
    told = [*said, *(str(one.message) for one in recwarn if issubclass(one.category, FutureWarning))]
    assert len([text for text in told if "deprecated" in text]) == 1, told
    assert not attack.differences


def test_a_cache_has_the_name_that_the_library_wants() -> None:
    """See `CACHE_ARGUMENT`: of arguments, keys and attributes none has another name."""
    for path in Path(ppd_runtime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = {node.arg} if isinstance(node, ast.keyword) else set[object]()
            named |= {node.attr} if isinstance(node, ast.Attribute) else set()
            named |= {getattr(key, "value", None) for key in node.keys} if isinstance(node, ast.Dict) else set()
            assert not named & OLD, f"{path}:{getattr(node, 'lineno', None)}"
