"""Passes are compiled without being asked for where that is possible, and where it is not a line says so."""

import logging
import shutil

import pytest
import torch

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.files import cache_folder
from ppd_runtime.models import compiling
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiled import export
from ppd_runtime.models.compiling import code_for, compile_ahead, wants_code
from ppd_runtime.models.pass_kinds import PassKind


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    """As a user has it."""
    monkeypatch.delenv("PPD_COMPILE", raising=False)
    compiling._has_compiler.cache_clear()
    yield
    compiling._has_compiler.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda command: None)


def test_compiled_on_cpus_with_a_compiler():
    assert wants_code(None, "cpu")
    assert not wants_code(None, "cuda:0")
    assert not wants_code(False, "cpu")
    assert wants_code(True, "cuda")


def test_without_a_compiler_one_line_says_what_is_missing(without_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        assert [wants_code(None, "cpu") for _ in range(2)] == [False, False]
    (line,) = caplog.messages
    assert "no C++ compiler (g++)" in line
    assert "several times as long" in line
    assert "install g++, or set CXX" in line


@pytest.mark.parametrize(("said", "wanted"), [("0", False), ("1", True)])
def test_the_environment_says_what_is_usual(monkeypatch, said, wanted):
    monkeypatch.setenv("PPD_COMPILE", said)
    assert wants_code(None, "cpu") is wanted
    assert wants_code(not wanted, "cpu") is not wanted


def test_another_value_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("PPD_COMPILE", "yes")
    with pytest.raises(ValueError, match="PPD_COMPILE='yes': give 0 or 1"):
        wants_code(None, "cpu")


def test_a_model_that_cannot_be_compiled_runs_as_it_is(monkeypatch, caplog):
    def refuse(*_):
        raise ValueError("compile: layer 0 of this model cannot be: a reason; run it without")

    monkeypatch.setattr(compiling, "compile_ahead", refuse)
    plain = OrdinaryDecoding("demo", compile=False).generate("import os", max_new_tokens=8)
    with caplog.at_level(logging.WARNING):
        ordinary = OrdinaryDecoding("demo")
        with PPDRuntime("demo", k=1, transport="local") as runtime:
            results = [method.generate("import os", max_new_tokens=8) for method in (ordinary, runtime)]
    assert [result.token_ids for result in results] == [plain.token_ids] * 2
    assert ordinary.config.compile is False
    assert runtime.config.compile is False
    assert sum("a reason; run it without" in line for line in caplog.messages) == 2
    with pytest.raises(ValueError, match="a reason"):
        code_for(True, ordinary.info, torch.float32, "cpu", [1])


def test_the_first_start_says_what_it_makes_and_later_ones_find_it(tmp_path, monkeypatch, caplog):
    """Three files: a layer's for one token and for several, and the head's."""
    monkeypatch.setattr(export, "_compile", lambda *arguments: arguments[-1].write_bytes(b"code"))
    monkeypatch.setattr(cache_folder, "cache_folder", lambda: tmp_path)
    info, told = describe("demo"), []
    made = compile_ahead(info, torch.float32, "cpu", [PassKind.ONE, PassKind.SEVERAL], told.append)
    assert [line.rpartition("(")[2] for line in told] == ["1 of 3)", "2 of 3)", "3 of 3)"]
    assert sorted(line.removeprefix("compiling ").partition(" (")[0] for line in told) == [
        "layer 0, for passes over one token",
        "layer 0, for passes over several tokens",
        "the head",
    ]
    assert [line for line in caplog.messages if "once: 3 files" in line]
    assert compile_ahead(info, torch.float32, "cpu", [PassKind.ONE, PassKind.SEVERAL], told.append) == made
    assert len(told) == 3
