"""`ppd serve` as a user runs it: a process of its own over two stages, its page in a browser, and its end."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from served import DEADLINE_S, PROMPT, Served
from typer.testing import CliRunner
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.cli.main import app


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("serve") / "log", "--stages", "2", "--log-format", "json") as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> str:
    with OrdinaryDecoding("demo") as ordinary:
        return ordinary.generate(PROMPT, max_new_tokens=16).text


def test_a_completion_of_two_stages_is_ordinary_decodings(served: Served, expected: str) -> None:
    answer = served.complete(logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == expected
    assert choice["ppd"]["layout"]["cuts"]
    assert sum(choice["ppd"]["first_boundary"]) == 15
    assert len(choice["logprobs"]["token_logprobs"]) == 16
    served.wait_until(lambda: '"path": "/v1/completions"' in served.log.read_text())
    (row,) = [json.loads(line) for line in served.log.read_text().splitlines() if "/v1/completions" in line]
    assert (row["method"], row["status"]) == ("POST", 200)


def test_a_lost_worker_is_replaced_while_nobody_asks(served: Served, expected: str) -> None:
    workers = worker_processes(psutil.Process(served.process.pid))
    workers["stage-1"].kill()
    served.wait_until(lambda: "stage 1 is lost" in served.log.read_text())
    served.wait_until(lambda: served.client.get("/health").status_code == 200)
    assert served.complete()["choices"][0]["text"] == expected


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


def test_the_page_shows_tokens_by_keyboard(served: Served, expected: str, browser: webdriver.Chrome) -> None:
    browser.get(served.url)
    tokens = browser.find_element(By.ID, "tokens")
    tokens.clear()
    tokens.send_keys("16")
    browser.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    figures = browser.find_element(By.ID, "figures")
    WebDriverWait(browser, DEADLINE_S).until(lambda _: "tokens/s" in figures.text)
    shown = "".join(piece.get_property("textContent") for piece in browser.find_elements(By.CSS_SELECTOR, "#text span"))
    assert shown == PROMPT + expected
    assert len(browser.find_elements(By.CSS_SELECTOR, "#clock rect")) == 17  # the tokens, and ordinary decoding
    assert "boundary 1" in browser.find_element(By.ID, "boundaries").text
    browser.find_element(By.ID, "tokens").send_keys("00000")
    browser.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    problem = browser.find_element(By.ID, "problem")
    WebDriverWait(browser, DEADLINE_S).until(lambda _: "positions" in problem.text)
    assert all("favicon" in row["message"] or "400" in row["message"] for row in browser.get_log("browser"))


def test_sigterm_finishes_what_runs_and_a_second_one_does_not(tmp_path: Path) -> None:
    for again in (False, True):
        with Served(tmp_path / "log", "--method", "autoregressive") as served:
            asked = {"prompt": PROMPT, "max_tokens": 1500 if again else 60, "ignore_eos": True, "stream": True}
            with served.client.stream("POST", "/v1/completions", json=asked) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data:")
                served.process.send_signal(signal.SIGTERM)
                if again:
                    served.wait_until(lambda s=served: "shutting down" in s.log.read_text())
                    served.process.send_signal(signal.SIGTERM)
                    with pytest.raises(httpx.HTTPError):
                        list(lines)
                else:
                    assert "data: [DONE]" in list(lines)
            assert served.process.wait(DEADLINE_S) == 143


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["--chat-template", "none.jinja"], "--chat-template none.jinja"),
        (["--port", "70000"], "--port"),
        (["--stages", "1"], "--stages"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPD_API_KEY", raising=False)
    ended = CliRunner().invoke(app, ["serve", *options])  # spared an interpreter's imports
    assert (ended.exit_code, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert words in ended.stderr
