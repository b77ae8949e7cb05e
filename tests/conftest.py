"""Fixtures for every test: small models built once in a session, one thread, no network, no noise."""

import gc
import os
import shutil
import time

gc.disable()  # nothing that is imported is garbage: looking for it takes a third of the imports' time

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test reaches for the network
# Of the code that calls the kernels, and computes nothing itself: so it is compiled in two thirds of the time.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: its kernels run without a GPU

import transformers
from models_for_tests import build_tokenizer, save_model
from transformers import PreTrainedTokenizerBase

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.client import request
from ppd_runtime.launch import startup, supervisor
from ppd_runtime.launch.guessing_times import GuessingTimes
from ppd_runtime.pipeline.speculation_policy import QuickestGuessing
from ppd_runtime.pipeline.staged import last_stage

_MAY_HAVE_WHOLE_MODEL = startup.may_have_whole_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread for matrix products: a product's bits can depend on how it is split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


os.environ.setdefault("PPD_COMPILE", "0")  # passes are compiled in the tests that ask for it
CACHE = Path(__file__).parents[1] / ".test_cache"
"""Compiled code of all tests' models, named by all that goes into it: runs share it, and the processes of a run."""
_KEPT_S = 14 * 86400


def pytest_collection_finish() -> None:
    """From now on garbage is looked for, but not in what is imported and collected."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Before a run: no test sees weights or findings of an earlier one, nor code that has not been used for long."""
    if not hasattr(config, "workerinput"):  # one of the processes that share the run
        oldest = time.time() - _KEPT_S
        for path in (CACHE / "ppd_runtime").glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix not in (".pt2", ".so") or path.stat().st_mtime < oldest:
                path.unlink()


@pytest.fixture(scope="session", autouse=True)
def _test_cache() -> Iterator[None]:
    """Not the user's cache folder; a test of the cache has one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        yield


@pytest.fixture(scope="session", autouse=True)
def _stages_decode() -> Iterator[None]:
    """Stages decode where a test has them, whatever the clock says; `one_process` is for tests of the other way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "may_have_whole_model", lambda spec: False)
        yield


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Has later runtimes begin with given `SpeculationPolicy.way_seconds`, one process among the ways, and learn no
    others.
    """

    def known(way_seconds: Sequence[float]) -> None:
        monkeypatch.setattr(startup, "may_have_whole_model", _MAY_HAVE_WHOLE_MODEL)
        monkeypatch.setattr(GuessingTimes, "known", lambda self: tuple(way_seconds))
        for name in ("note", "note_in_one_process"):
            monkeypatch.setattr(QuickestGuessing, name, lambda self, length: None)

    return known


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    """Silence the library's progress bars and advice."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved random model with its tokenizer, built once for the same arguments; see `models_for_tests.build_model`.

    `model_folder("llama", num_layers=5, dtype="bfloat16", seed=1, eos_token_id=7)`
    """
    built: dict[tuple[object, ...], Path] = {}

    def folder(family: str = "llama", **settings: object) -> Path:
        key = (family, *sorted((name, repr(value)) for name, value in settings.items()))
        if key not in built:
            built[key] = save_model(tmp_path_factory.mktemp(family), family, **settings)
        return built[key]

    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of every model that `model_folder` builds."""
    return build_tokenizer()


@pytest.fixture
def gpu_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says that there are two GPUs of 1 GB, with 5 KB free on each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5_000, 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a stand-in")


@pytest.fixture(scope="session")
def folder(model_folder: Callable[..., Path]) -> str:
    """A small model's, for tests that need no other."""
    return str(model_folder("llama", num_layers=4))


@pytest.fixture(scope="module")
def ordinary(folder: str) -> OrdinaryDecoding:
    """The oracle for it."""
    return OrdinaryDecoding(folder)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a lost message does not wait long, and workers that keep dying do not end a request."""
    monkeypatch.setattr(request, "_ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(request, "_CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(request, "_LONGEST_PATIENCE_S", 0.2)
    monkeypatch.setattr(request, "_REPORT_DEADLINE_S", 0.05)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(last_stage, "_FIRST_S", 0.05)
    monkeypatch.setattr(last_stage, "_LEAST_S", 0.02)
    monkeypatch.setattr(last_stage, "_LONGEST_S", 0.2)
    monkeypatch.setattr(last_stage, "_PASSES", 16)
