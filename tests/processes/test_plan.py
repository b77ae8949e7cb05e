"""`ppd plan` where it measures, on a small model, and its page in a real browser."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from busy_cores import busy, cores
from grids import nightly
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from typer.testing import CliRunner

from ppd_runtime.calibration.calibrate import Calibrator
from ppd_runtime.calibration.peer import CalibrationPeer
from ppd_runtime.calibration.plan_inputs import Measurement
from ppd_runtime.calibration.staged_plans import rank_stages
from ppd_runtime.cli.plan import plan as command
from ppd_runtime.cost_model.machine_costs import Calibration, StagesAtWork, read_calibration
from ppd_runtime.cost_model.planner import ordinary_ms, plan, rank
from ppd_runtime.cost_model.plans import Plan, Ranking
from ppd_runtime.cost_model.report import page_data, write_page
from ppd_runtime.cost_model.tradeoff import MatchRates, read_match_rates
from ppd_runtime.host import available_cores
from ppd_runtime.measure.machine_load import UNDISTURBED, busy_note
from ppd_runtime.models.native.linear import QuantisedLinear
from ppd_runtime.sampling_params import SamplingParams

PROMPTS = ("The quick brown fox", "A model writes")
BROWSER = ("chromium", "chromedriver")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,1800",
)
MODEL = "</script><script>document.title = 'broken'</script>" + "m" * 80
CALIBRATION = Calibration(0.4, 0.3, 0.35, 0.12, 0.1, 0.03, 0.05, 0.08, 1.1, 0.9, {2: 1.3}, "a test", {2: 1.1, 3: 1.3})
RATES = {(layer, k): 0.5 + 0.03 * layer + 0.02 * k for layer in range(6, 12) for k in (1, 3)}


def test_measured_on_a_small_model(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "plan.json"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    app = typer.Typer()
    app.command()(command)
    arguments = ["--model", model_folder("llama"), "--prompts", prompts, "--devices", 2, "--max-new-tokens", 17]
    result = CliRunner().invoke(app, [*map(str, arguments), "--out", str(out)])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    data, calibration = json.loads(out.read_text()), read_calibration(out)
    settings = {(row["exit_layer"], row["k"], row["workers"]) for row in data["plans"]}
    assert settings == {(layer, k, 1) for layer in (2, 3) for k in range(1, 6)}
    assert sorted(calibration.widths) == [2, 3, 4, 5]
    for name in ("layer_ms", "head_ms", "exit_head_ms", "hop_ms", "export_ms", "import_ms"):
        assert 0 < getattr(calibration, name) < 1000, name
    assert ordinary_ms(4, calibration) == pytest.approx(data["ordinary"]["ms_per_token"])
    rates = read_match_rates(out)
    assert rates.source.endswith("plan.json")
    assert data["match_rates_source"] == "2 prompts, 32 tokens"  # 16 of each text have candidates
    assert all(abs(rate * 32 - round(rate * 32)) < 1e-9 for rate in rates.rates.values())
    assert data["verdict"] in result.stdout
    assert 0 < calibration.cpu_share <= 1
    assert calibration.devices == available_cores()
    assert {row["source"] for row in data["parallel"]} <= {"measured"}
    assert {(tuple(row["cuts"]), row["k"]) for row in data["staged"]} == {((2,), k) for k in range(1, 6)}
    for row in data["staged"]:  # at half depth, a match and a first boundary are one
        assert row["first_boundary"][0] == pytest.approx(rates.rates[2, row["k"]])
    assert sorted(calibration.stages) == ([2] if available_cores() > 1 else [])
    for measured in calibration.stages.values():
        assert calibration.layer_ms / 10 < measured.layer_ms < 10 * calibration.layer_ms
        assert calibration.exit_head_ms / 10 < measured.exit_head_ms < 10 * calibration.exit_head_ms
        assert 0 < measured.besides_ms < 10 * ordinary_ms(4, calibration)
        assert measured.row_cost == 1, "a row is a pass of its own in uncompiled code"
    assert set(rates.first_boundary) == {((2,), k) for k in range(1, 6)}


def test_measured_are_layers_with_the_weights(model_folder: Callable[..., Path]) -> None:
    """In this process, and in those that work beside it."""
    sampling = SamplingParams(max_new_tokens=2)
    measurement = Measurement(str(model_folder("llama")), PROMPTS, sampling=sampling, weights="int8")
    assert measurement.calibrate(2, 1).weights == measurement.match_rates([1]).weights == "int8"
    calibrator = Calibrator(measurement.ordinary, measurement.conditions(2, 1))
    with tempfile.TemporaryDirectory(prefix="ppd-") as folder:
        peer = CalibrationPeer(calibrator._spec(1, (), folder))
        peer.close()
    for stage in (measurement.ordinary.stage, peer._stage):
        linears = [part for part in stage.model.modules() if isinstance(part, QuantisedLinear)]
        assert {linear.form.name for linear in linears} == {"Q8_0"}
        assert len(linears) == 4 * 7 + 1


def test_measured_are_compiled_passes(model_folder: Callable[..., Path]) -> None:
    """In this process, in those that work beside it, over candidates, and in stages, whose rows run together there."""
    settings = {"sampling": SamplingParams(max_new_tokens=9), "dtype": "float32", "compile": True}
    measurement = Measurement(str(model_folder("llama")), PROMPTS, **settings)
    assert not measurement.ordinary.stage.compiles_chains(2)
    times = measurement.calibrate(2, 3, widths=[2], stages=[2])
    assert times.compiled
    assert measurement.ordinary.stage.compiles_chains(2)
    assert [of.row_cost < 1 for of in times.stages.values()] == [True] * (available_cores() > 1)
    calibrator = Calibrator(measurement.ordinary, measurement.conditions(2, 1))
    with tempfile.TemporaryDirectory(prefix="ppd-") as folder:
        peer = CalibrationPeer(calibrator._spec(1, (), folder))
        peer.close()
    assert peer._stage.layers_at_once == 2, "of four layers, as in a compiled stage"


@nightly
def test_other_programs_are_noticed_while_times_are_measured(model_folder: Callable[..., Path]) -> None:
    """On the core of the other process alone."""
    measurement = Measurement(str(model_folder("llama")), PROMPTS, sampling=SamplingParams(max_new_tokens=2))
    with Calibrator(measurement.ordinary, measurement.conditions(1, 1)) as calibrator, busy(cores()[:2][-1]):
        times = calibrator.measure()
    assert times.cpu_share is not None
    assert times.cpu_share < UNDISTURBED


def test_rates_are_those_that_the_runtime_finds(model_folder: Callable[..., Path]) -> None:
    from ppd_runtime import PPDRuntime

    folder = str(model_folder("llama"))
    sampling = SamplingParams(max_new_tokens=25, ignore_eos=True)
    rates = Measurement(folder, PROMPTS, sampling=sampling).match_rates([2]).rates
    with PPDRuntime(folder, k=2, exit_layer=3, transport="local") as runtime:
        results = [runtime.generate(prompt, max_new_tokens=25, ignore_eos=True) for prompt in PROMPTS]
    assert all(result.stats.hits + result.stats.misses == 24 for result in results)
    hits = sum(result.stats.hits for result in results)  # a late candidate is a miss there, a right one never wrong
    assert hits <= round(rates[3, 2] * 48)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """The system's Chromium, headless, with a profile of its own."""
    binary, driver = map(shutil.which, BROWSER)
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


def open_page(browser: webdriver.Chrome, folder: Path, ranking: Ranking, calibration: Calibration) -> None:
    """Open a ranking's page."""
    path = folder / "plan.html"
    write_page(page_data(MODEL, ranking, calibration, MatchRates("a test", RATES, 12)), path)
    browser.get(path.as_uri())


def busy_page(browser: webdriver.Chrome, folder: Path, calibration: Calibration, **settings: Any) -> None:
    """Open the page of a plan for more devices than there are."""
    open_page(browser, folder, rank(12, calibration, RATES, 4, devices_here=2, **settings), calibration)


@pytest.fixture
def page(browser: webdriver.Chrome, tmp_path: Path) -> webdriver.Chrome:
    """The page of a plan, open."""
    open_page(browser, tmp_path, rank(12, CALIBRATION, RATES, 4), CALIBRATION)
    return browser


def test_the_page_opens_without_errors_or_requests(page: webdriver.Chrome) -> None:
    assert page.get_log("browser") == []
    assert page.title == "A plan for pipelined decoding"
    assert page.find_element(By.ID, "model").text == MODEL
    messages = [json.loads(row["message"])["message"] for row in page.get_log("performance")]
    requests = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    own = [r["request"]["url"] for r in requests if r["documentURL"] == page.current_url]  # not the new tab's
    assert [url for url in own if not url.startswith("data:")] == [page.current_url]


def test_the_page_shows_the_ranking(page: webdriver.Chrome) -> None:
    ranking = rank(12, CALIBRATION, RATES, 4)
    assert page.find_element(By.ID, "verdict").text == ranking.verdict
    rows = page.find_elements(By.CSS_SELECTOR, "#ranking tr.plan")
    shown = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")][1:] for row in rows]
    assert {row.workers for row in ranking.plans} == {1, 2, 3}
    assert shown == [
        [
            *map(str, (row.exit_layer, row.k, row.workers, row.devices)),
            f"{row.match_rate:.3f}",
            f"{row.ms_per_token:.3f}",
            f"{row.speedup:.2f}",
            f"{row.compute_per_token:.3f}",
        ]
        for row in ranking.plans
    ]
    named = [row.find_element(By.TAG_NAME, "td").text.endswith("running ahead") for row in rows]
    assert named == [row.runs_ahead for row in ranking.plans]
    assert any(named)
    assert len(page.find_elements(By.CSS_SELECTOR, "#heatmap td")) == len(RATES)


def test_the_page_shows_stages_beside(browser: webdriver.Chrome, tmp_path: Path) -> None:
    shares = {((6,), 3): (0.9, 0.1), ((3, 6, 9), 3): (0.7, 0.2, 0.05, 0.05)}
    ranking = rank(12, CALIBRATION, RATES, 4, staged=rank_stages(12, CALIBRATION, shares, 4, [8]))
    open_page(browser, tmp_path, ranking, CALIBRATION)
    assert browser.find_element(By.ID, "verdict").text == ranking.verdict
    rows = browser.find_elements(By.CSS_SELECTOR, "#ranking tbody tr")
    cells = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]
    assert [row[1:] for row in cells if row[0].startswith("staged")] == [
        [
            ", ".join(map(str, row.cuts)),
            str(row.k),
            "",
            str(row.devices),
            "",
            f"{row.ms_per_token:.3f}",
            f"{row.speedup:.2f}",
            f"{row.compute_per_token:.3f}",
        ]
        for row in ranking.staged
    ]
    times = [float(row[6]) for row in cells]
    assert times == sorted(times)
    assert "stages, k=3, 4 devices" in browser.find_element(By.ID, "plot").text
    assert browser.get_log("browser") == []


def click_row(page: webdriver.Chrome, row: Plan) -> None:
    """Click on a plan's row of the ranking."""
    number = rank(12, CALIBRATION, RATES, 4).plans.index(row)
    page.find_elements(By.CSS_SELECTOR, "#ranking tr.plan")[number].click()


@pytest.mark.parametrize(
    ("slider", "label", "moved"),
    [
        ("k", "candidates k", [True, False]),
        ("workers", "workers", [True, True]),
        ("exit", "exit layer", [False, True]),
        ("rate", "match rate", [True, True]),
    ],
)
def test_a_slider_moves_the_curve(page: webdriver.Chrome, slider: str, label: str, moved: list[bool]) -> None:
    def drawing() -> tuple[str | None, ...]:
        curves = [page.find_element(By.ID, name).get_attribute("d") for name in ("over-exits", "over-ks")]
        dot = page.find_element(By.ID, "chosen")
        return (*curves, dot.get_attribute("cx"), dot.get_attribute("cy"))

    click_row(page, next(row for row in rank(12, CALIBRATION, RATES, 4).plans if (row.k, row.workers) == (3, 1)))
    before, handle = drawing(), page.find_element(By.ID, slider)
    assert handle.accessible_name.startswith(label)
    value = handle.get_attribute("value")
    handle.send_keys(Keys.ARROW_LEFT if value == handle.get_attribute("max") else Keys.ARROW_RIGHT)
    after = drawing()
    assert handle.get_attribute("value") != value
    assert after[2:] != before[2:]
    assert [a != b for a, b in zip(after[:2], before[:2], strict=True)] == moved


def shown(page: webdriver.Chrome) -> list[str]:
    """Match rate, ms a token, speed-up, full passes a token and devices, as the page says them."""
    rate, figures = (page.find_element(By.ID, name).text for name in ("rate-value", "figures"))
    return [rate.split(",")[0], *re.findall(r"[0-9.]*[0-9]", figures)]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_sliders_show_the_planners_figures(browser: webdriver.Chrome, tmp_path: Path, run_ahead: bool) -> None:
    """At the measured match rate, and at those a number of eighths below and above it."""
    busy_page(browser, tmp_path, CALIBRATION, run_ahead=run_ahead)
    half_depth = [(6, 1, 1, 0), (6, 1, 1, -3), (6, 1, 1, 8)]
    others = [(6, 3, 3, -8), (9, 3, 2, 0), (9, 3, 2, 2), (11, 3, 1, -5), (11, 3, 1, 8)]
    for exit_layer, k, workers, eighths in half_depth + others * run_ahead:
        for slider, steps in (("exit", exit_layer - 6), ("k", k // 3), ("workers", workers - 1), ("rate", 8 + eighths)):
            browser.find_element(By.ID, slider).send_keys(Keys.HOME, Keys.ARROW_RIGHT * steps)
        measured = RATES[exit_layer, k]
        rate = measured + eighths / 8 * (1 - measured if eighths > 0 else measured)
        expected = plan(12, exit_layer, k, rate, CALIBRATION, workers, run_ahead)
        figures = (f"{rate:.3f}", f"{expected.ms_per_token:.3f}", f"{expected.speedup:.2f}")
        assert shown(browser) == [*figures, f"{expected.compute_per_token:.3f}", f"{workers + 1}"]
        assert ("running ahead" in browser.find_element(By.ID, "figures").text) == expected.runs_ahead


def test_a_row_sets_the_sliders_to_its_plan(page: webdriver.Chrome) -> None:
    for number, row in list(enumerate(rank(12, CALIBRATION, RATES, 4).plans))[::5]:
        click_row(page, row)
        cells = page.find_elements(By.CSS_SELECTOR, "#ranking tr.chosen td")
        assert [cell.text for cell in cells[1:4]] == [str(n) for n in (row.exit_layer, row.k, row.workers)]
        assert shown(page) == [cells[i].text for i in (5, 6, 7, 8, 4)]
        assert page.find_element(By.ID, "rate-value").text.endswith("measured")
        spoken = [page.find_element(By.ID, name).get_attribute("aria-valuetext") for name in ("exit", "k", "workers")]
        assert spoken == [f"{row.exit_layer} of 12", str(row.k), str(row.workers)]
        dot, chosen = page.find_elements(By.CSS_SELECTOR, "#dots circle")[number], page.find_element(By.ID, "chosen")
        for name in ("cx", "cy"):
            assert dot.get_attribute(name) == chosen.get_attribute(name)


def test_without_plans_there_is_no_trade_off(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path, rank(12, CALIBRATION, RATES, 1), CALIBRATION)
    assert browser.find_element(By.ID, "verdict").text.startswith("don't")
    assert not browser.find_element(By.ID, "tradeoff").is_displayed()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#heatmap td")) == len(RATES)
    assert browser.get_log("browser") == []


def test_a_setting_without_a_match_rate_has_no_figures(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path, rank(12, CALIBRATION, {(6, 1): 0.5, (8, 2): 0.6}, 4), CALIBRATION)
    assert len(shown(browser)) == 5
    handle = browser.find_element(By.ID, "k")
    handle.send_keys(Keys.HOME if handle.get_attribute("value") == "1" else Keys.END)
    assert browser.find_element(By.ID, "figures").text == "No match rate was measured for this k and exit layer."
    assert not browser.find_element(By.ID, "chosen").is_displayed()
    assert browser.get_log("browser") == []


def test_the_page_says_what_the_verdict_says(browser: webdriver.Chrome, tmp_path: Path) -> None:
    note = busy_note("Measuring", 0.3)
    stages = {2: StagesAtWork(0.45, 0.4, 0.25, 0.2)}
    times = replace(CALIBRATION, parallel_speedups={}, cpu_share=0.3, stages=stages, compiled=True)
    busy_page(browser, tmp_path, times, cautions=[note])
    verdict = browser.find_element(By.ID, "verdict").text
    assert "The plan may have 4 devices, but there are 2" in verdict
    assert verdict.endswith(str(note))
    assert "gpt-fast published" in browser.find_element(By.ID, "footnotes").text
    assert "tensor" not in browser.find_element(By.ID, "ranking").text
    measured = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#times tr")]
    assert measured[-1].endswith("0.300")
    assert "a layer in 2 stages at work, ms 0.450" in measured
    assert "a further row in 2 stages at work, in passes over one 0.200" in measured
    assert browser.find_element(By.ID, "source").text.startswith("compiled, 12 layers")


def test_an_outlier_lies_at_the_plots_edge(browser: webdriver.Chrome, tmp_path: Path) -> None:
    def highest_tick() -> float:
        ticks = browser.find_elements(By.CSS_SELECTOR, "#grid text[text-anchor='end']:not(.far)")
        return max(float(tick.text) for tick in ticks if tick.text.replace(".", "").isdigit())

    busy_page(browser, tmp_path, CALIBRATION)
    usual = highest_tick()
    assert browser.find_elements(By.CSS_SELECTOR, "#plot .far") == []
    assert not browser.find_element(By.ID, "beyond").is_displayed()
    busy_page(browser, tmp_path, replace(CALIBRATION, parallel_speedups={2: 0.02}))
    assert highest_tick() <= 2 * usual
    (far,) = browser.find_elements(By.CSS_SELECTOR, "#plot .far")
    slow = ordinary_ms(12, CALIBRATION) / 0.02
    assert far.text == f"↑ tensor parallelism, 2 devices: {slow:.0f} ms"
    assert browser.find_element(By.ID, "beyond").is_displayed()


def test_a_slow_plan_lies_at_the_plots_edge(browser: webdriver.Chrome, tmp_path: Path) -> None:
    ranking = rank(12, CALIBRATION, RATES, 4)
    slow = replace(ranking.plans[-1], ms_per_token=1e4)
    open_page(browser, tmp_path, replace(ranking, plans=(*ranking.plans[:-1], slow)), CALIBRATION)
    (dot,) = browser.find_elements(By.CSS_SELECTOR, "#dots .far")
    top = float(str(browser.find_element(By.ID, "frame").get_attribute("y")))
    assert float(str(dot.get_attribute("cy"))) == pytest.approx(top)
    others = browser.find_elements(By.CSS_SELECTOR, "#dots .dot:not(.far)")
    assert min(float(str(other.get_attribute("cy"))) for other in others) > top
    lowest = max(float(str(other.get_attribute("cy"))) for other in others)
    assert lowest - top > 100  # the rest has room


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 800)])
def test_the_page_fits_a_telephone_and_a_desk(
    browser: webdriver.Chrome, tmp_path: Path, width: int, height: int
) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        busy_page(browser, tmp_path, replace(CALIBRATION, parallel_speedups={2: 0.02}))
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        for table in browser.find_elements(By.CSS_SELECTOR, "table"):
            box = table.find_element(By.XPATH, "..")
            assert box.value_of_css_property("overflow-x") == "auto"
            assert box.rect["x"] + box.rect["width"] <= width
        plot = browser.find_element(By.ID, "plot").rect
        assert plot["width"] > 0.75 * min(width, 992)
        words = browser.find_elements(By.CSS_SELECTOR, "#plot text:not([transform])")
        assert all(word.rect["height"] >= 12 for word in words)
        assert all(plot["x"] <= word.rect["x"] for word in words)
        assert all(word.rect["x"] + word.rect["width"] <= plot["x"] + plot["width"] for word in words)
        first = browser.find_element(By.CSS_SELECTOR, "#ranking tr.plan td")
        assert first.rect["height"] < 80  # its words are not broken letter by letter
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_plot_follows_the_windows_width(browser: webdriver.Chrome, tmp_path: Path) -> None:
    busy_page(browser, tmp_path, CALIBRATION)
    wide = browser.find_element(By.ID, "plot").get_dom_attribute("viewBox")
    metrics = {"width": 412, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        WebDriverWait(browser, 20).until(
            lambda page: page.find_element(By.ID, "plot").get_dom_attribute("viewBox") != wide
        )
        dot = float(str(browser.find_element(By.ID, "chosen").get_attribute("cx")))
        assert dot < 412
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
