"""What the tests of the server share: a small model, a chat template, and a server over ordinary decoding."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from servers import DEADLINE_S, HERMES, TEMPLATE, Running, running
from written_replies import Written

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


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def written(model_folder: Callable[..., Path]) -> Written:
    """Decoding that writes the replies it is given."""
    return Written(model_folder("llama", num_layers=2, max_position_embeddings=2048))


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template that knows tools and thinking."""
    file = tmp_path_factory.mktemp("templates") / "hermes.jinja"
    file.write_text(HERMES)
    return file


@pytest.fixture(scope="module")
def writing_server(written: Written, hermes: Path) -> Iterator[Running]:
    """A server over `written`."""
    with running(written, chat_template=hermes, served_model_name="tiny") as found:
        yield found
