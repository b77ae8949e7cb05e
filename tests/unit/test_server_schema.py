"""Requests made from the server's own schema: none of them is answered with a failure of the server's."""

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from servers import DEADLINE_S, Running, running

from ppd_runtime import OrdinaryDecoding

_EXAMPLES = int(os.environ.get("PPD_REQUESTS", "8"))
"""Of each path; hundreds in the night."""
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
    "/version",
)


@pytest.fixture(scope="module")
def server(model_folder) -> Iterator[Running]:
    with running(OrdinaryDecoding(model_folder("llama", num_layers=2)), request_timeout_s=0.02, max_waiting=3) as found:
        yield found


@pytest.mark.parametrize("path", _PATHS)
def test_no_request_makes_the_server_fail(server: Running, path: str) -> None:
    with server.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    (operation,) = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]

    requests = operation.as_strategy()
    if operation.method == "post":
        requests |= operation.as_strategy(GenerationMode.NEGATIVE)

    @settings(
        max_examples=_EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests)
    def check(case: schemathesis.Case) -> None:
        answer = case.call(base_url=server.url, timeout=DEADLINE_S)
        case.validate_response(answer, checks=[not_a_server_error])

    check()
    assert server.taken == 0
