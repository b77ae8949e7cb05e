"""What the tests of the server share: a small model, a chat template, and a server over ordinary decoding."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import TEMPLATE, Running, running

from ppd_runtime import OrdinaryDecoding


@pytest.fixture(scope="session")
def folder(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama", num_layers=2)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("templates") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(ordinary: OrdinaryDecoding, template: Path) -> Iterator[Running]:
    with running(ordinary, chat_template=template, served_model_name="tiny") as found:
        yield found
