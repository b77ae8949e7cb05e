"""The server's page in a real browser, used as people use it: by keyboard."""

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from served import DEADLINE_S

SHOTS = os.environ.get("PPD_SCREENSHOTS")
"""A folder that keeps the screenshots, to be looked at."""


class Box(NamedTuple):
    """Where an element is, in pixels of the window."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether the two share more than rounding."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 1 and down > 1


@contextmanager
def chromium(folder: Path) -> Iterator[webdriver.Chrome]:
    """A browser without a window, with its profile in a folder; skips the test where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={folder}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield running
    finally:
        running.quit()


class Page:
    """The server's page, once it knows the model."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get_log("browser")
        browser.get(url)
        self.until(lambda: self.text("model"))

    def until(self, holds: Any) -> None:
        """Wait for something."""
        WebDriverWait(self.browser, DEADLINE_S).until(lambda _: holds(), self.text("problem"))

    def wait_for(self, place: str, words: str) -> None:
        """Wait until something is said there."""
        self.until(lambda: words in self.text(place))

    def press(self, *keys: str) -> None:
        """Keys, to what has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def focus(self, place: str) -> None:
        """Tab on to an element."""
        for _ in range(30):
            if self.browser.switch_to.active_element.get_attribute("id") == place:
                return
            self.press(Keys.TAB)
        raise AssertionError(f"{place} is not reached by Tab")

    def set(self, place: str, value: str) -> None:
        """A setting's value; the settings are unfolded for it."""
        if not self.ask("document.getElementById('settings').open"):
            self.ask("document.querySelector('#settings summary').focus()")
            self.press(Keys.ENTER)
        self.focus(place)
        self.press(Keys.CONTROL + "a" + Keys.NULL, value)

    def start(self, tokens: str) -> None:
        """A completion of what is in the prompt."""
        self.set("tokens", tokens)
        self.press(Keys.ENTER)

    def run(self, tokens: str) -> None:
        """A completion to its end."""
        self.start(tokens)
        self.wait_for("figures", "tokens/s")

    def say(self, message: str, ends: str = "tokens/s") -> None:
        """A message of a chat, and what the status says in the end."""
        self.focus("prompt")
        self.press(message, Keys.ENTER)
        if ends:
            self.wait_for("figures", ends)

    def text(self, place: str) -> str:
        """What is shown there."""
        return self.browser.find_element(By.ID, place).text

    def of_all(self, selector: str, name: str) -> list[Any]:
        """A property of each such element."""
        return self.ask(f"[...document.querySelectorAll('{selector}')].map(place => place.{name})")

    def boxes(self, selector: str) -> list[Box]:
        """Where such elements are; those that are not shown have none."""
        found = self.of_all(selector, "getBoundingClientRect().toJSON()")
        boxes = [Box(box["left"], box["top"], box["right"], box["bottom"]) for box in found]
        return [box for box in boxes if box.right > box.left]

    def style(self, selector: str, name: str) -> str:
        """As the browser computes it."""
        return self.browser.find_element(By.CSS_SELECTOR, selector).value_of_css_property(name)

    def ask(self, script: str) -> Any:
        """A value of the page's."""
        return self.browser.execute_script(f"return {script}")

    def command(self, name: str, **settings: Any) -> None:
        """A command of Chromium's."""
        self.browser.execute_cdp_cmd(name, settings)

    def be(self, width: int, height: int, scheme: str = "light") -> None:
        """Have a window of this size, in a light or dark scheme."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.until(lambda: self.ask("innerWidth") == width)

    def as_before(self) -> None:
        """Give the window its own size and scheme back."""
        self.command("Emulation.clearDeviceMetricsOverride")
        self.command("Emulation.setEmulatedMedia", features=[])

    def shot(self, name: str) -> np.ndarray:
        """The window's pixels: height, width, red-green-blue of 8 bits."""
        png = self.browser.get_screenshot_as_png()
        if SHOTS:
            Path(SHOTS, f"{name}.png").write_bytes(png)
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
