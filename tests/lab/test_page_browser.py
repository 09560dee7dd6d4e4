"""The page in a real browser: charts are drawn, the legend hides a curve, nothing is fetched and nothing goes wrong."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from prong.lab.page.command import main
from tests.lab.written_runs import errors, write_run

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no chromium and chromedriver here: apt-get install chromium chromium-driver"
ODD = "<b>bold</b> & <script>alert(1)</script> $x$"
CHARTS = 3 + 2 + 1  # heat maps, condition numbers, loss; errors against updates and seconds; an unknown measure
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900")


def write_runs(root: Path) -> Path:
    for seed in (0, 1):
        for method, pace in (("nesterov", 0.9), ("prong", 0.7)):
            write_run(root, method, errors([(90 + seed) * pace**k for k in range(20)]), seed=seed)
    matrix = [[math.exp(-abs(row - column)) for column in range(12)] for row in range(12)]
    kept = {"before": matrix, "after": matrix, "condition_before": 1e4, "condition_after": 1e2}
    rows = [{"update": k, "condition": 1e4 / (k + 1), "train_cross_entropy": 1 / (k + 1)} for k in range(5)]
    write_run(root, "prong", rows, experiment="conditioning", keepsakes=kept)
    write_run(root, "odd", [{"update": 0, "depth": 1.0}, {"update": 1, "depth": 0.5}], experiment="letters", label=ODD)
    return root


def write_many(root: Path) -> Path:
    """Thirty curves with long names on a short axis, twice, with a wide table; and three dampings."""
    for number in range(30):
        rows = [{**row, "loss": 1e5 * row["update"], "test_error": 0.5} for row in errors([26, 25, 24.5])]
        for seed in (0, 1):
            settings = {"lr": 0.001 * (number + 1), "regulariser": 0.5 + number}
            write_run(root, "prong-balanced", rows, seed=seed, settings=settings)
    for eps, values in ((1.0, [90, 50]), (0.1, [90, 10, 40]), (0.01, [90])):
        failure = "diverged at update 3: the loss is nan" if eps == 0.01 else None
        pair = {"part": "eps", "settings": {"lr": 0.1, "eps": eps}}
        write_run(root, rows=errors(values), experiment="sensitivity", failure=failure, **pair)
    return root


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser that has opened the page, with a log of what it said and what it fetched."""
    folder = tmp_path_factory.mktemp("page")
    with opened(folder, write_runs(folder / "runs"), CHARTS) as driver:
        yield driver


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser that has opened a page of many runs."""
    folder = tmp_path_factory.mktemp("crowded")
    with opened(folder, write_many(folder / "runs"), 4) as driver:
        yield driver


@contextmanager
def opened(folder: Path, runs: Path, charts: int) -> Iterator[Chrome]:
    if BROWSER is None or DRIVER is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    main((runs,), folder / "out")
    options = ChromeOptions()
    options.binary_location = BROWSER
    for argument in (*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        driver.get((folder / "out" / "report.html").as_uri())
        WebDriverWait(driver, 60).until(lambda d: len(d.find_elements(By.CSS_SELECTOR, ".chart .main-svg")) >= charts)
        yield driver
    finally:
        driver.quit()


def plots(browser: Chrome) -> list[dict[str, float]]:
    """Of every chart, in pixels: the plot, and how far the legend scrolls and its frame exceeds what is drawn."""
    script = """return [...document.querySelectorAll('.js-plotly-plot')].map(chart => ({
      width: chart._fullLayout._size.w, height: chart._fullLayout._size.h,
      scrolls: Number(chart.querySelector('.legend .scrollbar')?.getAttribute('height') ?? 0),
      gap: chart.parentElement.clientHeight - chart.querySelector('.main-svg').clientHeight}))"""
    return list(browser.execute_script(script))


def resized(browser: Chrome, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("width", [1280, 1900, 500])
def test_plots_are_high_enough_however_many_curves_there_are(crowded: Chrome, width: int) -> None:
    resized(crowded, width)

    def settled(browser: Chrome) -> bool:
        return all(plot["height"] >= 350 and plot["scrolls"] == 0 and plot["gap"] == 0 for plot in plots(browser))

    WebDriverWait(crowded, 20).until(settled)
    assert len(plots(crowded)) == 4


def texts(browser: Chrome, chart: int, selector: str) -> list[str]:
    """What a chart has written in some of its places."""
    script = """return [...document.querySelectorAll('.js-plotly-plot')[arguments[0]].querySelectorAll(arguments[1])]
      .map(text => text.textContent)"""
    return list(browser.execute_script(script, chart, selector))


def test_a_short_logarithmic_axis_has_numbers_along_it(crowded: Chrome) -> None:
    for chart in (2, 3):
        assert texts(crowded, chart, ".ytick text") == ["24.5", "25", "25.5", "26"]


def test_final_errors_are_written_in_their_cells(crowded: Chrome) -> None:
    assert texts(crowded, 1, ".heatmap-label text") == ["50.0", "40.0lost its way", "✕diverged"], (
        "on lines of their own"
    )
    assert set(texts(crowded, 1, ".ytick text")) == {"1", "0.1", "0.01"}


def test_tables_have_the_width_of_the_window(crowded: Chrome) -> None:
    script = "return [...document.querySelectorAll('.scroll')].map(s => [s.clientWidth, s.scrollWidth])"
    resized(crowded, 1900)
    widths = crowded.execute_script(script)
    assert all(1900 - 150 < inside == needed for inside, needed in widths)
    resized(crowded, 500)
    assert any(inside < needed for inside, needed in crowded.execute_script(script)), "it scrolls within itself"
    assert crowded.execute_script("return document.documentElement.scrollWidth") <= 500


def test_the_colours_of_heat_maps_are_told_right_below_them(browser: Chrome) -> None:
    def squares(browser: Chrome) -> bool:
        first = plots(browser)[0]
        return abs(first["height"] - 0.48 * first["width"]) < 3 and first["gap"] == 0

    WebDriverWait(browser, 20).until(squares)


def visible(browser: Chrome, chart: int) -> list[object]:
    """For each trace of a chart whether it is shown, as plotly has it."""
    return list(
        browser.execute_script(
            "return document.querySelectorAll('.js-plotly-plot')[arguments[0]]._fullData.map(t => t.visible)", chart
        )
    )


def test_every_chart_is_drawn(browser: Chrome) -> None:
    charts = browser.find_elements(By.CSS_SELECTOR, ".js-plotly-plot")
    assert len(charts) == CHARTS
    drawn = [
        len(chart.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace path.js-line, .heatmaplayer image"))
        for chart in charts
    ]
    assert drawn == [2, 1, 1, 4, 4, 1], "two heat maps; lines of one method; lines and bands of two"
    for chart in charts:
        assert chart.size["width"] > 300 and chart.size["height"] > 300


def test_no_chart_is_wider_than_its_frame(browser: Chrome) -> None:
    """Each is drawn before those beside it are there, and must make room for them."""
    fits = "return [...document.querySelectorAll('.chart')].map(c => c.scrollWidth <= c.clientWidth)"
    WebDriverWait(browser, 10).until(lambda d: d.execute_script(fits) == [True] * CHARTS)


def test_a_click_on_the_legend_hides_a_curve_with_its_band_and_another_brings_them_back(browser: Chrome) -> None:
    chart = browser.find_elements(By.CSS_SELECTOR, ".js-plotly-plot")[3]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    assert visible(browser, 3) == [True] * 4
    for expected in (["legendonly", "legendonly", True, True], [True] * 4):
        chart.find_elements(By.CSS_SELECTOR, ".legendtoggle")[0].click()
        WebDriverWait(browser, 10).until(lambda d, wanted=expected: visible(d, 3) == wanted)  # type: ignore[misc]
        lines = chart.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace path.js-line")
        assert len(lines) == expected.count(True)


def test_names_from_files_are_shown_as_they_are(browser: Chrome) -> None:
    chart = browser.find_elements(By.CSS_SELECTOR, ".js-plotly-plot")[5]
    assert chart.find_element(By.CSS_SELECTOR, ".legendtext").get_attribute("textContent") == ODD
    assert ODD in [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td")]


def test_no_chart_offers_to_be_uploaded(browser: Chrome) -> None:
    buttons = browser.find_elements(By.CSS_SELECTOR, ".modebar-btn")
    names = {str(button.get_attribute("data-title")) for button in buttons}
    assert "Download plot" in names and not any("share" in name.lower() or "cloud" in name.lower() for name in names)


def test_on_a_narrow_screen_the_page_keeps_its_width(browser: Chrome) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_nothing_is_fetched_and_nothing_goes_wrong(browser: Chrome) -> None:
    """Last, so that all that the others did is in the logs."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    fetched = {request["request"]["url"] for request in requests if not request["documentURL"].startswith("chrome:")}
    assert {url.partition(":")[0] for url in fetched} <= {"file", "data", "blob"}
    assert [url for url in fetched if url.startswith("file:")] == [browser.current_url]
    assert browser.get_log("browser") == []
