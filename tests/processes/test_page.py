"""The server's page in a browser: chats with a real model, completions of one without a template, and its looks."""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from browsing import Box, Page, chromium
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from served import PROMPT, Served
from servers import HERMES, TEMPLATE, Running, running
from smollm2 import needs_smollm2
from written_replies import Written

from ppd_runtime import OrdinaryDecoding

SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
_STAGES = ("--stages", "2", "--speculation", "always")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("serve") / "log", *_STAGES) as found:
        yield found


@pytest.fixture(scope="module", params=["demo", pytest.param("smollm2", marks=[pytest.mark.nightly, needs_smollm2])])
def chatting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with a chat template: the demo model is given one, SmolLM2 has its own."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "chat.jinja").write_text(TEMPLATE)
    template = ("--chat-template", str(folder / "chat.jinja")) if request.param == "demo" else ()
    with Served(folder / "log", "--model", request.param, *template, *_STAGES) as found:
        yield found


@pytest.fixture(scope="module")
def written(model_folder: Callable[..., Path]) -> Written:
    """Decoding that writes the replies it is given."""
    return Written(model_folder("llama", num_layers=2, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def writing(written: Written, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over `written`, whose model thinks."""
    template = tmp_path_factory.mktemp("templates") / "thinks.jinja"
    template.write_text(HERMES.replace("'<think>' if thinks", "'<think>'"))
    with running(written, chat_template=template, key="secret") as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(served: Served, browser: webdriver.Chrome) -> Page:
    return Page(browser, served.url)


def test_a_model_without_a_chat_template_completes_texts(served: Served, page: Page) -> None:
    with OrdinaryDecoding("demo") as ordinary:
        expected = ordinary.generate(PROMPT, max_new_tokens=16).text
    assert page.ask("document.body.dataset.mode") == "completion"
    assert not page.boxes("#modes, #new, #system")
    page.run("16")
    assert page.of_all("#log .words", "textContent") == [PROMPT + expected]
    classes = page.of_all("#log .token", "className")
    coloured = [{"named", "missed"} & {*of_token.split()} for of_token in classes]
    assert [len(one) for one in coloured] == [1] * 15 + [0], "nobody asks about the last token's successor"
    counts = [int(count) for count in page.of_all("#legend b", "textContent")]
    assert (len(counts), sum(counts)) == (3, 15), "repetitions, boundary 1, not guessed"
    assert sum({"missed"} == one for one in coloured) == counts[2]
    assert page.of_all("#clock .name", "textContent") == ["stage 1", "stage 2"]
    assert {"certain", "choice"} <= {*page.of_all("#clock rect", "className.baseVal")}
    page.ask("document.querySelector('#pipeline summary').focus()")
    page.press(Keys.ENTER)
    rows = [row.split() for row in page.of_all("#lanes tr", "innerText")]
    assert [row[:2] for row in rows] == [["stage", "1"], ["stage", "2"]]
    assert all(int(row[2]) >= 15 for row in rows), "passes"
    assert "stage 2" in page.ask("document.getElementById('clock').getAttribute('aria-label')")
    assert float(page.text("measured-s").removesuffix(" s")) > 0
    ordinary_s = page.text("ordinary-s")
    assert ordinary_s == "not known yet" or float(ordinary_s.removesuffix(" s")) > 0
    assert page.ask("document.getElementById('measured').clientWidth") > 0
    resources = page.ask("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith((served.url, "data:")) for name in resources)
    assert page.browser.get_log("browser") == []


def test_the_page_says_what_went_wrong(page: Page) -> None:
    page.start("1600000")
    page.wait_for("problem", "positions")
    page.command("Network.enable")
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.command("Network.emulateNetworkConditions", **offline)
    page.start("4")
    page.wait_for("problem", "does not answer")
    online = {**offline, "offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    page.command("Network.emulateNetworkConditions", **online)
    page.run("4")
    assert page.text("problem") == ""
    page.start("1500")
    page.until(lambda: page.of_all("#log .token", "title"))
    page.press(Keys.ESCAPE)
    page.wait_for("figures", "Stopped after")
    assert page.text("problem") == ""


def test_the_page_is_dark_or_light(page: Page) -> None:
    page.run("8")
    seen = []
    for scheme in ("light", "dark"):
        page.be(*SIZES["wide"], scheme)
        places = (("body", "background-color"), ("body", "color"), ("#log .token", "color"), ("#clock rect", "fill"))
        seen.append([page.style(*place) for place in places])
        assert_looks_well(page, f"completion_{scheme}")
    page.as_before()
    assert all(light != dark for light, dark in zip(*seen, strict=True))


def test_a_chat_of_two_turns_and_a_stopped_one(chatting: Served, browser: webdriver.Chrome) -> None:
    page = Page(browser, chatting.url)
    assert page.ask("document.body.dataset.mode") == "chat"
    page.set("system", "You answer in one sentence.")
    page.set("tokens", "24")
    said = ["What is the capital of France?", "And of <b>Italy</b>?"]
    for message in said:
        page.say(message)
    answers = page.of_all("#log .answer .words", "textContent")
    assert answers == in_turn(chatting, "You answer in one sentence.", said), "the whole chat is sent"
    assert page.of_all("#log .user .words", "textContent") == said
    assert page.of_all("#log b", "tagName") == [], "text is never HTML"
    coloured, tokens = page.of_all("#log :is(.named, .missed)", "title"), page.of_all("#log .token", "textContent")
    assert len(coloured) >= len(tokens) - len(answers) > 2, "all but the last of each answer"
    assert page.of_all("#clock .name", "textContent") == ["stage 1", "stage 2"]
    page.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.ask("document.querySelectorAll('#log .answer')[1].querySelector('.foot button').focus()")
    page.press(Keys.ENTER)
    page.until(lambda: "Copied" in page.of_all("#log .foot button", "textContent"))
    assert page.ask("navigator.clipboard.readText()") == answers[1]
    page.set("tokens", "1500")
    page.say("Tell me a long story about a fox.", ends="")
    page.until(lambda: len(page.of_all("#log .answer:last-child .token", "title")) > 5)
    page.press(Keys.ESCAPE)
    page.wait_for("figures", "Stopped after")
    idle = re.compile(r"num_requests_running\{.*\} 0\.0")
    chatting.wait_until(lambda: idle.search(chatting.client.get("/metrics").text))
    assert "stopped" in page.of_all("#log .answer:last-child .foot", "textContent")[0]
    page.ask("document.getElementById('settings').open = false")
    for name, size in SIZES.items():
        for scheme in ("light", "dark"):
            page.be(*size, scheme)
            assert_looks_well(page, f"chat_{name}_{scheme}")
    page.as_before()
    page.focus("new")
    page.press(Keys.ENTER)
    assert page.of_all("#log *", "tagName") == []
    page.set("tokens", "24")
    page.say(said[0])
    assert page.of_all("#log .answer .words", "textContent") == answers[:1], "a new chat knows nothing of the last"
    assert page.browser.get_log("browser") == []


def in_turn(served: Served, system: str, said: list[str]) -> list[str]:
    """The answers to messages that are said one after the other."""
    messages, answers = [{"role": "system", "content": system}], []
    for message in said:
        messages.append({"role": "user", "content": message})
        asked = {"messages": messages, "max_tokens": 24, "temperature": 0}
        answer = served.client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer})
    return answers


def test_thinking_is_folded_and_no_text_is_html(writing: Running, written: Written, browser: webdriver.Chrome) -> None:
    reply = "<img src=x onerror=\"document.title='broken'\">&amp; <script>document.title = 'broken'</script>"
    written.replies.append(f"A <i>thought</i>.</think>{reply}")
    page = Page.__new__(Page)
    page.browser = browser
    browser.get(writing.url)
    page.wait_for("problem", "API key")
    page.press("secret", Keys.TAB)
    page.until(lambda: page.text("model"))
    page.say("Who are you?")
    assert page.of_all("#log .answer > .words", "textContent") == [reply]
    assert page.of_all("#log .thought .words", "textContent") == ["A <i>thought</i>."]
    assert page.of_all("#log .thought", "open") == [False]
    assert page.of_all("#log :is(img, script, i)", "tagName") == []
    assert page.ask("document.title") == "ppd_runtime"
    page.say("And then?")
    asked = f"user: Who are you?assistant: {reply}user: And then?assistant:<think>"
    assert written.prompts[-1].replace("\n", "") == asked, "the thought is not sent again"
    page.ask("document.querySelector('input[value=completion]').focus()")
    page.press(Keys.SPACE)
    assert page.ask("document.body.dataset.mode") == "completion", "a model with a template completes texts too"
    page.run("8")
    assert written.prompts[-1] == PROMPT


def assert_looks_well(page: Page, name: str) -> None:
    """What is shown lies in the window, side by side or one below the other, and each bubble has letters."""
    pixels = page.shot(name)
    width, height = page.ask("innerWidth"), page.ask("innerHeight")
    assert page.ask("document.documentElement.scrollWidth") <= width
    (log,) = page.boxes("#log")
    bubbles = page.boxes("#log .turn")
    assert all(log.left <= box.left and box.right <= log.right for box in bubbles)
    (form,) = page.boxes("#form")
    assert log.top >= 0 and form.bottom <= height, "a message is written without scrolling"
    for boxes in (bubbles, page.boxes("#log, #form, header, section"), page.boxes("form textarea, form input, button")):
        assert not [pair for pair in combinations(boxes, 2) if Box.overlaps(*pair)]
    shown = [Box(box.left, max(box.top, log.top), box.right, min(box.bottom, log.bottom)) for box in bubbles]
    for left, top, right, bottom in [box for box in shown if box.bottom > box.top + 20]:
        inside = pixels[int(top) : int(bottom), int(left) : int(right)].reshape(-1, 3)
        assert len(np.unique(inside, axis=0)) > 10, "letters"
