"""`ppd serve` as a user runs it: a process of its own over two stages, its page in a browser, and its end."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from commands import refused
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from served import DEADLINE_S, PROMPT, Served
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--stages", "2", "--speculation", "always", "--log-format", "json")
    with Served(tmp_path_factory.mktemp("serve") / "log", *options) as found:
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


def test_a_streams_pieces_tell_who_foresaw_each_token_and_its_passes_where_they_are_wanted(served: Served) -> None:
    for wanted in (None, {"foreseen": True}, {"timeline": True}):
        chunks = served.stream(ppd=wanted)
        told = [chunk["choices"][0].get("ppd", {}) for chunk in chunks]
        named = dict(pair for ppd in told for pair in ppd.get("foreseen", ()))
        assert sorted(named) == ([] if wanted is None else list(range(15)))
        if wanted is None:
            assert (sum(told[-1]["first_boundary"]), len(chunks)) == (15, 17)
            continue
        counts = [sum(max(boundary, 1) == place for boundary in named.values()) for place in (1, 2)]
        assert counts == told[-1]["first_boundary"]
        passes = [one for ppd in told for one in ppd.get("passes", ())]
        if "foreseen" in wanted:
            assert (passes, len(chunks)) == ([], 17)
            continue
        assert (told[0]["processes"], told[0]["stages"]) == (["stage 2", "stage 1"], 2)
        assert {rank for rank, *_ in passes} == {0, 1}
        assert [token for rank, what, *_, token in passes if (rank, what) == (0, "choice")] == list(range(16))
        assert all(0 <= began <= ended for _, _, began, ended, _ in passes)


def test_a_lost_worker_is_replaced_while_nobody_asks(served: Served, expected: str) -> None:
    workers = worker_processes(psutil.Process(served.process.pid))
    workers["stage-1"].kill()
    served.wait_until(lambda: served.client.get("/health").status_code == 503)
    served.wait_until(lambda: "stage 1 is lost" in served.log.read_text())
    served.wait_until(lambda: served.client.get("/health").status_code == 200)
    assert served.complete()["choices"][0]["text"] == expected


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    folder = tmp_path_factory.mktemp("browser")
    for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={folder}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


class Page:
    """The server's page, used by keyboard alone."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get(url)

    def start(self, tokens: str) -> None:
        """From the prompt, which has the focus at first, to the number of tokens, and Enter."""
        focused = self.browser.switch_to.active_element
        assert focused.get_attribute("id") in ("prompt", "tokens")
        if focused.get_attribute("id") == "prompt":
            focused.send_keys(Keys.TAB)
        self.browser.switch_to.active_element.send_keys(Keys.CONTROL + "a" + Keys.NULL, tokens, Keys.ENTER)

    def run(self, tokens: str) -> None:
        """To the end."""
        self.start(tokens)
        self.wait_for("figures", "tokens/s")

    def text(self, place: str) -> str:
        """What is shown there."""
        return self.browser.find_element(By.ID, place).text

    def wait_for(self, place: str, words: str) -> None:
        """Until something is said."""
        WebDriverWait(self.browser, DEADLINE_S).until(lambda _: words in self.text(place), self.text("problem"))

    def of_all(self, selector: str, name: str) -> list[Any]:
        """A property of each such element."""
        return self.ask(f"[...document.querySelectorAll('{selector}')].map(place => place.{name})")

    def style(self, selector: str, name: str) -> str:
        """As the browser computes it."""
        return self.browser.find_element(By.CSS_SELECTOR, selector).value_of_css_property(name)

    def ask(self, script: str) -> Any:
        """A value of the page's."""
        return self.browser.execute_script(f"return {script}")


@pytest.fixture
def page(served: Served, browser: webdriver.Chrome) -> Page:
    browser.get_log("browser")
    return Page(browser, served.url)


def test_the_page_shows_a_run_by_keyboard(served: Served, expected: str, page: Page) -> None:
    page.run("16")
    assert page.ask("document.getElementById('text').textContent") == PROMPT + expected
    classes = page.of_all("#text .token", "className")
    coloured = [{"named", "missed"} & {*of_token.split()} for of_token in classes]
    assert [len(one) for one in coloured] == [1] * 15 + [0], "nobody asks about the last token's successor"
    counts = [int(count) for count in page.of_all("#legend b", "textContent")]
    assert (len(counts), sum(counts)) == (3, 15), "repetitions, boundary 1, none"
    assert sum({"missed"} == one for one in coloured) == counts[2]
    assert page.of_all("#clock .name", "textContent") == ["stage 1", "stage 2"]
    assert {"certain", "choice"} <= {*page.of_all("#clock rect", "className.baseVal")}
    page.ask("document.querySelector('summary').focus()")
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    rows = [row.split() for row in page.of_all("#lanes tr", "innerText")]
    assert [row[:2] for row in rows] == [["stage", "1"], ["stage", "2"]]
    assert all(int(row[2]) >= 15 for row in rows), "passes"
    assert "stage 2" in page.ask("document.getElementById('clock').getAttribute('aria-label')")
    assert float(page.text("measured-s").removesuffix(" s")) > 0
    ordinary = page.text("ordinary-s")
    assert ordinary == "not known yet" or float(ordinary.removesuffix(" s")) > 0
    assert page.ask("document.getElementById('measured').clientWidth") > 0
    resources = page.ask("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith((served.url, "data:")) for name in resources)
    assert page.browser.get_log("browser") == []


def test_the_page_says_what_went_wrong(page: Page) -> None:
    page.start("1600000")
    page.wait_for("problem", "positions")
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.browser.execute_cdp_cmd("Network.enable", {})
    page.browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    page.start("4")
    page.wait_for("problem", "does not answer")
    online = {**offline, "offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    page.browser.execute_cdp_cmd("Network.emulateNetworkConditions", online)
    page.run("4")
    assert page.text("problem") == ""
    page.start("1500")
    page.wait_for("figures", "Running")
    WebDriverWait(page.browser, DEADLINE_S).until(lambda _: page.of_all("#text .token", "title"))
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait_for("figures", "Stopped after")
    assert page.text("problem") == ""


def test_the_page_is_dark_or_light_and_narrow(page: Page) -> None:
    page.run("8")
    seen = []
    for scheme in ("light", "dark"):
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        places = (("body", "background-color"), ("body", "color"), ("#text .token", "color"), ("#clock rect", "fill"))
        seen.append([page.style(*place) for place in places])
    assert all(light != dark for light, dark in zip(*seen, strict=True))
    narrow = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    WebDriverWait(page.browser, DEADLINE_S).until(lambda _: page.ask("innerWidth") == 360)
    assert page.ask("document.documentElement.scrollWidth") <= 360
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["--chat-template", "none.jinja"], "--chat-template none.jinja"),
        (["--port", "70000"], "--port"),
        (["--stages", "0"], "--stages"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPD_API_KEY", raising=False)
    assert words in refused("serve", *options)


def test_sigterm_finishes_what_runs(served: Served) -> None:
    ends_at_sigterm(served, 1)


@pytest.mark.nightly
def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    with Served(tmp_path / "log", "--method", "autoregressive") as found:
        ends_at_sigterm(found, 2)


def ends_at_sigterm(served: Served, times: int) -> None:
    """While a stream runs, whose end comes behind one signal and not behind two."""
    asked = {"prompt": PROMPT, "max_tokens": 60 if times == 1 else 1500, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        served.process.send_signal(signal.SIGTERM)
        if times == 1:
            assert "data: [DONE]" in list(lines)
        else:
            served.wait_until(lambda: "shutting down" in served.log.read_text())
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.HTTPError):
                list(lines)
    assert served.process.wait(DEADLINE_S) == 143
