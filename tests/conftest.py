"""Fixtures for every test: small models built once in a session, one thread, no network, no noise."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test reaches for the network

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from models_for_tests import build_tokenizer, save_model
from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread for matrix products: a product's bits can depend on how it is split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test depends on what earlier runs have kept in the user's cache folder, or leaves anything there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
