"""Requests made from the server's own schema: no answer is a failure of the server's, or one that the schema lacks."""

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance
from servers import DEADLINE_S, Running, running

from ppd_runtime import OrdinaryDecoding

_EXAMPLES = int(os.environ.get("PPD_REQUESTS", "8"))
"""Of each path; hundreds in the night."""
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
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


def test_the_schema_lists_what_each_path_can_refuse(server: Running, model_folder) -> None:
    def listed(found: Running) -> dict[str, set[int]]:
        with found.client() as client:
            paths = client.get("/openapi.json").json()["paths"]
        return {path: {*map(int, operation["responses"])} for path, (operation,) in _operations(paths)}

    of_all = {200, 408, 413, 421, 431, 500}
    open_server = listed(server)
    assert open_server["/v1/completions"] == of_all | {400, 404, 415, 429, 503}
    assert open_server["/tokenize"] == of_all | {400, 404, 415}
    assert open_server["/v1/models/{model}"] == of_all | {404}
    assert open_server["/ready"] == of_all | {503}
    assert open_server["/version"] == of_all
    with running(OrdinaryDecoding(model_folder("llama", num_layers=2)), key="secret") as locked:
        with_a_key = listed(locked)
    assert with_a_key["/v1/models"] == of_all - {421} | {401}
    assert with_a_key["/health"] == of_all - {421} | {503}


def _operations(paths: dict) -> list[tuple[str, tuple[dict, ...]]]:
    return [(path, tuple(operations.values())) for path, operations in paths.items()]


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
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])

    check()
    assert server.taken == 0
