"""Who gets into the server and how they leave: keys, sizes, room, going away and shutting down, over real sockets."""

import asyncio
import contextlib
import http.client
import json
import logging
import re
import resource
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from servers import DEADLINE_S, Running, Stepwise, running
from waiting import wait_until

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.cli.serve import check_installed
from ppd_runtime.server import protocol
from ppd_runtime.server.gate import logger
from ppd_runtime.server.log import REQUEST, JsonLine
from ppd_runtime.server.run import Prepared
from ppd_runtime.server.settings import ServerSettings

KEY = "sk-Secret.1"


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Running]:
    """A server with a key and small limits."""
    with running(OrdinaryDecoding(folder), key=KEY, max_body_mib=1, cors_origin=("https://example.org",)) as found:
        yield found


@pytest.fixture
def stepwise(folder: Path) -> Stepwise:
    return Stepwise(folder)


@pytest.mark.nightly
def test_an_idle_connection_outlives_what_clients_keep(locked: Running) -> None:
    url = httpx.URL(locked.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=DEADLINE_S)  # opens none by itself again
    with contextlib.closing(connection):
        for idle_s in (20, 0):  # clients' libraries keep one for 5 to 15 s
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
            time.sleep(idle_s)


@pytest.mark.parametrize(
    "given",
    [None, b"Bearer", b"Bearer wrong", b"Basic " + KEY.encode(), "Bearer schlüssel".encode(), b"Bearer \xff\xfe"],
)
def test_only_the_key_opens(locked: Running, given: bytes | None) -> None:
    with locked.client() as client:
        client.headers = {} if given is None else [(b"authorization", given)]
        answer = client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == client.get("/").status_code == 200
        assert client.get("/metrics").status_code == 401
    stranger = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert locked.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_keys_and_prompts_are_not_logged(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            answer = locked.post("/v1/completions", prompt="confidential", max_tokens=1)
            wait_until(lambda: answer.headers["x-request-id"] in caplog.text)
    finally:
        logger.removeHandler(caplog.handler)
    assert "/v1/completions" in caplog.text
    assert KEY not in caplog.text
    assert "confidential" not in caplog.text


def test_an_answer_has_its_requests_id(locked: Running) -> None:
    with locked.client() as client:
        assert client.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        first, second = (client.get("/nowhere", headers={"x-request-id": "a b"}).headers["x-request-id"] for _ in "ab")
    assert len({first, second, "a b"}) == 3


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
        ({"content": b'{"prompt": "\\ud800"}', "headers": {"content-type": "application/json"}}, 400),
        ({"content": b'{"temperature": NaN, "prompt": "a"}', "headers": {"content-type": "application/json"}}, 400),
        ({"content": b'{"seed": ' + b"9" * 5000 + b"}", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b" " * (2**20 + 1), "headers": {"content-type": "application/json"}}, 413),
        ({"content": iter([b" " * 2**19] * 3), "headers": {"content-type": "application/json"}}, 413),
        ({"content": b"{}", "headers": {f"x-{n}": "1" for n in range(200)}}, 431),
        ({"content": b"{}", "headers": {"x-long": "1" * 70_000}}, 431),
    ],
)
def test_what_is_no_request_gets_one_answer(locked: Running, settings: dict, status: int) -> None:
    with locked.client() as client:
        answer = client.post("/v1/completions", **settings)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_what_cannot_be_parsed_is_told_the_way_out(locked: Running, content: bytes) -> None:
    with locked.client() as client:
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("send an object")


@contextlib.contextmanager
def connected(server: Running, *, said: bytes = b"") -> Iterator[socket.socket]:
    """A connection of its own."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), DEADLINE_S) as connection:
        connection.sendall(said)
        yield connection


def error_to(server: Running, said: bytes) -> tuple[int, str]:
    """The status and the message with which the server closes a connection."""
    answer = b""
    with connected(server, said=said) as connection:
        while part := connection.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_what_is_no_http_gets_an_error_object(locked: Running) -> None:
    status, message = error_to(locked, b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert status == 400
    assert message.endswith("send HTTP/1.1 as its standard has it")


def test_a_request_for_a_websocket_is_answered_without(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    with locked.client() as client:
        assert client.get("/health", headers={"connection": "Upgrade", "upgrade": "websocket"}).status_code == 200
    assert "Unsupported upgrade" not in caplog.text


def test_nonsense_behind_a_refusal_is_no_failure(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(locked, said=head) as connection:
        assert b"invalid_api_key" in receive_until(connection, b"invalid_api_key")
        connection.sendall(b"no length\r\n")
        while connection.recv(4096):
            pass
    assert "Traceback" not in caplog.text


def test_headers_have_a_deadline_and_requests_do_not(stepwise: Stepwise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEADERS_S", 0.1)
    with running(stepwise) as server:
        begun = b"GET /health HTTP/1.1\r\nhost: a"
        assert error_to(server, begun) == (408, "the headers did not come within 0.1 s: send them sooner")
        with connected(server) as connection:
            assert connection.recv(4096) == b"", "who asks for nothing is told nothing"
        whole = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with connected(server, said=whole) as connection:
            receive_until(connection, b"}")
            connection.sendall(b"GET")
            assert b" 408 " in receive_until(connection, b"}")
        threading.Timer(0.3, stepwise.allow, [9]).start()
        assert server.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200


def test_connections_are_bounded(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked.client() as client:
        client.get("/health")
        wait_until(lambda: len(locked.server.server_state.connections) == 1)
        monkeypatch.setattr(protocol, "_MOST_CONNECTIONS", 1)
        status, message = error_to(locked, b"")
        assert (status, message) == (503, "2 connections, that is too many: come again later")
        assert client.get("/health").status_code == 200
        monkeypatch.undo()
        assert locked.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_connections_leave_files_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, connections in ((1024, 512), (10**6, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=most: (n, n))
        assert protocol.most_connections() == connections


def test_other_paths_and_methods(locked: Running) -> None:
    with locked.client() as client:
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/completions").status_code == 405
        assert client.get("/v1/completions").json()["error"]["message"].startswith("GET")


def test_other_origins_are_let_in_by_name_only(locked: Running) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with locked.client() as client:
        own = client.options("/v1/completions", headers={"origin": "https://example.org", **asked})
        other = client.options("/v1/completions", headers={"origin": "https://example.com", **asked})
    assert own.headers["access-control-allow-origin"] == "https://example.org"
    assert "access-control-allow-origin" not in other.headers


def test_without_a_key_other_host_names_are_refused(folder: Path) -> None:
    with running(OrdinaryDecoding(folder)) as server, server.client() as client:
        assert client.get("/v1/models", headers={"host": "attacker.example"}).status_code == 421
        assert client.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(stepwise: Stepwise, stream: bool) -> None:
    with running(stepwise) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        body = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: stepwise.is_busy)
            if stream:
                assert b"data:" in receive_until(connection, b"data:")
            assert server.taken == 1
        wait_until(lambda: server.taken == 0 and not stepwise.is_busy)  # no token was allowed meanwhile
        stepwise.allow(10)
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def receive_until(connection: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        found += (part := connection.recv(4096))
        assert part
    return found


def test_beyond_its_room_the_server_asks_to_come_again(stepwise: Stepwise) -> None:
    with running(stepwise, max_waiting=1) as server, contextlib.ExitStack() as stack:
        answers: list[int] = []

        def ask() -> None:
            answers.append(server.post("/v1/completions", prompt="a", max_tokens=4).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join, DEADLINE_S)
        wait_until(lambda: server.taken == 2)
        refused = server.post("/v1/completions", prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        with server.client() as client:
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        never = server.post("/v1/completions", prompt="a", n=3)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as patient:
            stepwise.allow(100)
            assert patient.completions.create(model=server.server.service.model, prompt="a", max_tokens=2).choices
    assert answers == [200, 200]


def test_shutting_down_finishes_what_runs_and_refuses_the_rest(stepwise: Stepwise) -> None:
    with running(stepwise) as server:
        answers: dict[str, int] = {}

        def ask(name: str) -> None:
            answers[name] = server.post("/v1/completions", prompt="a", max_tokens=4).status_code

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("runs", "waits")]
        for name, thread in zip(("runs", "waits"), threads, strict=True):
            thread.start()
            wait_until(lambda n=name: stepwise.is_busy and server.taken == 1 + (n == "waits"))
        drained = asyncio.run_coroutine_threadsafe(server.server.drain(), server.server.loop)
        wait_until(lambda: server.server.service.admission.draining)
        assert server.post("/v1/completions", prompt="a").status_code == 503
        with server.client() as client:
            assert client.get("/ready").status_code == 503
        stepwise.allow(100)
        drained.result(DEADLINE_S)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert answers == {"runs": 200, "waits": 503}


def test_what_does_not_finish_in_time_ends_with_what_there_is(stepwise: Stepwise) -> None:
    with running(stepwise, shutdown_timeout_s=0.1) as server:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", prompt="a")))
        asking.start()
        wait_until(lambda: server.taken == 1 and stepwise.is_busy)
        asyncio.run_coroutine_threadsafe(server.server.drain(), server.server.loop).result(DEADLINE_S)
        asking.join(DEADLINE_S)
        assert [answer.json()["choices"][0]["ppd"]["finish_reason"] for answer in answers] == ["cancelled"]


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_name_that_is_none_is_refused() -> None:
    for name in ("", " "):
        with pytest.raises(ValueError, match=r"served_model_name='.?': give a name, or leave it out"):
            ServerSettings(served_model_name=name)


def test_a_key_comes_from_where_others_cannot_read_it(tmp_path: Path) -> None:
    assert ServerSettings(api_key_file=key_file(tmp_path, f"{KEY}\n")).key({}) == KEY.encode()
    assert ServerSettings().key({"PPD_API_KEY": KEY}) == KEY.encode()
    assert ServerSettings().key({}) is None
    key_file(tmp_path, KEY, 0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        ServerSettings(api_key_file=tmp_path / "key").key({})
    with pytest.raises(ValueError, match="api_key_file"):
        ServerSettings(api_key_file=tmp_path / "none").key({})
    for wrong in ("", "a b", "schlüssel", "x" * 5000):
        with pytest.raises(ValueError, match="API key"):
            ServerSettings(api_key=wrong).key({})
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o640


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_interfaces_want_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="need a key"):
        ServerSettings(host=host).key({})
    assert ServerSettings(host=host, api_key=KEY).key({}) == KEY.encode()


def test_mistakes_are_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="in use"):
        Prepared(ServerSettings(port=taken.getsockname()[1]))
    with pytest.raises(ValueError, match=r"host='192\.0\.2\.1': .*; give an address of this host"):
        Prepared(ServerSettings(host="192.0.2.1", api_key=KEY))
    with pytest.raises(ValueError, match="chat_template"):
        Prepared(ServerSettings(chat_template=tmp_path / "none.jinja"))
    (tmp_path / "broken.jinja").write_text("{% for")
    with pytest.raises(ValueError, match="no Jinja template"):
        Prepared(ServerSettings(chat_template=tmp_path / "broken.jinja"))
    (tmp_path / "cert.pem").write_text("none")
    with pytest.raises(ValueError, match="ssl_certfile"):
        Prepared(ServerSettings(ssl_certfile=tmp_path / "cert.pem", ssl_keyfile=tmp_path / "cert.pem"))
    for wrong in ({"port": 70000}, {"max_waiting": -1}, {"ssl_certfile": Path("a")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerSettings(**wrong)


def test_two_servers_that_start_at_once_do_not_share_a_port() -> None:
    first = Prepared(ServerSettings(port=0))
    settings = ServerSettings(port=first.settings.port)
    with contextlib.closing(first), pytest.raises(ValueError, match=f"port={settings.port} at .* in use; choose"):
        Prepared(settings)


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "https://a.org/", "https://a.org/x", "https://A.org", "https://a.org:443", "http://a:80", "https://"],
)
def test_an_origin_that_no_browser_sends_is_a_mistake(origin: str) -> None:
    with pytest.raises(ValueError, match=f"cors_origin={re.escape(repr(origin))}: no browser sends it"):
        ServerSettings(cors_origin=(origin,))


def test_the_log_is_json_where_that_is_wanted() -> None:
    record = logging.makeLogRecord({"msg": "%s is lost", "args": ("stage 1",), "levelno": 30, "levelname": "WARNING"})
    told = json.loads(JsonLine().format(record))
    assert (told["level"], told["message"]) == ("warning", "stage 1 is lost")
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    (line,) = JsonLine().format(record).splitlines()
    assert "RuntimeError: two\nlines" in json.loads(line)["traceback"]
    record = logging.makeLogRecord({"levelname": "INFO", REQUEST: {"status": 200}})
    assert json.loads(JsonLine().format(record)) == {"time": round(record.created, 3), "level": "info", "status": 200}


def test_a_request_over_tls(folder: Path, tmp_path: Path) -> None:
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ppd -addext"
    files = {"ssl_keyfile": tmp_path / "key.pem", "ssl_certfile": tmp_path / "cert.pem"}
    places = ["-keyout", *map(str, [files["ssl_keyfile"]]), "-out", str(files["ssl_certfile"])]
    subprocess.run(["openssl", *made.split(), "subjectAltName=IP:127.0.0.1", *places], check=True, capture_output=True)
    with running(OrdinaryDecoding(folder), key=KEY, **files) as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=files["ssl_certfile"])
        with server.client(verify=trust) as client:
            asked = {"prompt": "a", "max_tokens": 3, "stream": True}
            assert client.post("/v1/completions", json=asked).text.endswith("data: [DONE]\n\n")
        with server.client() as stranger, pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
            stranger.get("/health")


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd_runtime.cli.serve.NEEDED", ("json", "no_such_package"))
    with pytest.raises(ValueError, match=r"^no_such_package not installed: run pip install .*\[server\]"):
        check_installed()
