"""The report in a real browser: it renders, its controls do what they say, and nothing leaves the page."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from _runs import INFO, made_experiment, made_run
from cdgrab_experiments.compare import compare
from cdgrab_experiments.records import Run
from cdgrab_experiments.report import page

Open = Callable[..., "Browser"]
HOSTILE = "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"


class Browser:
    """A page in the browser, and what the tests ask of it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def chart(self, quantity: str, section: str = "setting-0") -> str:
        return f'[data-section="{section}"] .chart[data-quantity="{quantity}"]'

    def show(self, selector: str) -> WebElement:
        """Scroll there and wait until the chart is drawn: charts wait until they are about to be seen."""
        self.js("document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", selector)
        self.wait(lambda: bool(self.all(f"{selector} svg")))
        return self.one(selector)

    def choose(self, name: str, value: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", f'input[name="{name}"][value="{value}"]')

    def lines(self, selector: str) -> list[str]:
        return self._read(f"{selector} .series", "element.dataset.contender")

    def ticks(self, selector: str) -> list[str]:
        return self._read(f"{selector} .tick.y", "element.textContent")

    def _read(self, selector: str, what: str) -> list[str]:
        """Of all elements at once: a chart that is drawn anew in between would leave the others stale."""
        found: list[str] = self.js(f"Array.from(document.querySelectorAll(arguments[0]), element => {what})", selector)
        return found

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "the page did not get there within ten seconds"
            time.sleep(0.02)

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def requests(self) -> list[str]:
        """Addresses asked for since last time."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]  # type: ignore[no-untyped-call]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """What the console has to say since last time."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    helper = shutil.which("chromedriver")
    if browser is None or helper is None:
        missing = f"chromium is {browser}, chromedriver is {helper}; on Debian: apt install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(f"the report must be seen in a browser: {missing}")
        pytest.skip(f"no browser: {missing}")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{argument}")
    options.add_argument("--proxy-server=127.0.0.1:9")  # nobody listens there: no network, whatever is asked for
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which chromium refuses to root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SE_OFFLINE", "true")
        patch.setenv("SE_AVOID_STATS", "true")
        found = webdriver.Chrome(options=options, service=Service(helper))
        yield found
        found.quit()


@pytest.fixture
def open_page(driver: webdriver.Chrome, tmp_path: Path) -> Open:
    def open_page(runs: list[Run], *, width: int = 1200, dark: bool = False) -> Browser:
        path = tmp_path / "report.html"
        path.write_text(page(compare(runs)))
        browser = Browser(driver)
        phone = width < 600
        browser.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}  # or clicks land while the page is scrolling
        browser.command("Emulation.setEmulatedMedia", features=[scheme, still])
        browser.requests()
        browser.complaints()
        driver.get(path.as_uri())
        return browser

    return open_page


def experiment() -> list[Run]:
    return made_experiment(seeds=3, epochs=20) + made_experiment(seeds=3, epochs=20, workers=16, minimum=None)


def test_it_renders_without_complaint_and_without_a_request(open_page: Open, tmp_path: Path) -> None:
    browser = open_page(experiment())
    charts = browser.all(".chart")
    assert len(charts) == 7  # loss, metric and balance twice, and one by workers
    for i in range(len(charts)):
        browser.js("document.querySelectorAll('.chart')[arguments[0]].scrollIntoView({behavior: 'instant'})", i)
        browser.wait(lambda i=i: bool(charts[i].find_elements(By.CSS_SELECTOR, "svg path.line")))  # type: ignore[misc]
        assert len(charts[i].find_elements(By.CSS_SELECTOR, ".series")) == 4
    assert browser.js("[...document.querySelectorAll('path')].every(p => !p.getAttribute('d').includes('NaN'))")
    assert browser.complaints() == []
    assert set(browser.requests()) <= {(tmp_path / "report.html").as_uri(), "data:,"}


def test_the_browser_itself_keeps_requests_in(open_page: Open) -> None:
    browser = open_page(made_experiment(seeds=1, epochs=2))
    browser.js("fetch('https://example.org/').then(() => window.out = 'left', () => window.out = 'kept in')")
    browser.wait(lambda: browser.js("window.out") is not None)
    assert browser.js("window.out") == "kept in"
    assert any("Content Security Policy" in line for line in browser.complaints())


def test_a_chip_hides_its_order_everywhere_in_its_setting(open_page: Open) -> None:
    browser = open_page(experiment())
    loss = browser.chart("loss")
    browser.show(loss)
    assert set(browser.lines(loss)) == {"rr", "cd-grab", "pair", "id-grab"}
    chip = browser.one('[data-section="setting-0"] .chip[data-contender="rr"]')
    bar = browser.one('[data-section="setting-0"] .bar-row[data-contender="rr"]')
    chip.send_keys(Keys.ENTER)
    assert chip.get_attribute("aria-pressed") == "false"
    browser.wait(lambda: "rr" not in browser.lines(loss))
    assert not bar.is_displayed()
    other = browser.chart("loss", "setting-1")
    browser.show(other)
    assert "rr" in browser.lines(other)
    browser.show(loss)
    chip.click()
    browser.wait(lambda: "rr" in browser.lines(loss))
    assert bar.is_displayed()
    for each in browser.all('[data-section="setting-0"] .chip'):
        each.click()
    browser.wait(lambda: "Nothing to show" in browser.js("document.querySelector(arguments[0]).textContent", loss))
    assert browser.complaints() == []


def test_scales_quantities_and_axes_change_what_they_name(open_page: Open) -> None:
    browser = open_page(experiment())
    loss = browser.chart("loss")
    chart = browser.show(loss)
    assert chart.get_attribute("data-scale") == "log"
    logarithmic = browser.ticks(loss)
    assert "10⁻⁵" in logarithmic
    browser.choose("scale-loss-setting-0", "linear")
    assert chart.get_attribute("data-scale") == "linear"
    whole = [float(tick) for tick in browser.ticks(loss)]
    assert whole[0] == 0
    browser.choose("quantity-setting-0", "loss")
    assert min(float(tick) for tick in browser.ticks(loss)) > 0.3
    browser.choose("scale-loss-setting-0", "zoomed")
    zoomed = [float(tick) for tick in browser.ticks(loss)]
    assert zoomed[-1] - zoomed[0] < 0.1 * (whole[-1] - whole[0])
    metric = browser.chart("metric")
    browser.show(metric)
    before = browser.one(f"{metric} path.line").get_attribute("d")
    assert browser.one(f"{metric} .label").text == "epochs"
    browser.choose("across-setting-0", "seconds")
    assert browser.one(f"{metric} .label").text == "seconds"
    assert browser.one(f"{metric} path.line").get_attribute("d") != before
    assert browser.complaints() == []


@pytest.mark.parametrize("alone", [["rr"], []])
def test_runs_that_shared_the_machine_have_no_seconds(open_page: Open, alone: list[str]) -> None:
    crowd = {**INFO.environment, "runs at a time": 4}
    runs = [
        run if run.config.order in alone else replace(run, info=replace(run.info, environment=crowd))
        for run in experiment()
    ]
    browser = open_page(runs)
    loss = browser.chart("loss")
    browser.show(loss)
    assert len(browser.lines(loss)) == 4
    browser.choose("across-setting-0", "seconds")
    assert browser.lines(loss) == alone
    said = browser.js("document.querySelector(arguments[0]).textContent", loss)
    assert ("shared the machine" in said) == (not alone)
    assert browser.complaints() == []


def test_values_are_read_off_with_keys_and_pointer(open_page: Open) -> None:
    browser = open_page(experiment())
    loss = browser.chart("loss")
    chart = browser.show(loss)
    tip = browser.one(f"{loss} .tip")
    assert not tip.is_displayed()
    chart.send_keys(Keys.END)
    assert tip.text.startswith("epoch 20")
    assert "cd-grab" in tip.text
    chart.send_keys(Keys.ARROW_LEFT)
    assert tip.text.startswith("epoch 19")
    chart.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    webdriver.ActionChains(browser.driver).move_to_element(browser.one(f"{loss} svg")).perform()
    assert tip.is_displayed()
    assert len(browser.all(f"{loss} .cursor circle")) == 4


@pytest.mark.parametrize("dark", [False, True])
def test_both_colour_schemes_and_the_button_between_them(open_page: Open, dark: bool) -> None:
    browser = open_page(made_experiment(seeds=1, epochs=3), dark=dark)

    def brightness(rule: str) -> float:
        colour = browser.js("getComputedStyle(document.body)[arguments[0]].match(/\\d+/g).map(Number)", rule)
        return float(sum(colour[:3]) / 765)

    assert (brightness("backgroundColor") < 0.3) == dark
    assert abs(brightness("backgroundColor") - brightness("color")) > 0.6
    browser.one("#theme").click()
    assert (brightness("backgroundColor") < 0.3) != dark
    assert abs(brightness("backgroundColor") - brightness("color")) > 0.6
    browser.one("#theme").click()
    assert (brightness("backgroundColor") < 0.3) == dark


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_nothing_sticks_out_sideways(open_page: Open, width: int) -> None:
    runs = experiment() + [replace(run, config=replace(run.config, rule="halving")) for run in experiment()[:3]]
    runs = [replace(run, info=replace(run.info, command="cdgrab run " + 40 * "a-long-option ")) for run in runs]
    browser = open_page(runs, width=width)
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    for quantity in ("loss", "metric", "herding_bound"):
        browser.show(browser.chart(quantity))
    assert browser.js("document.documentElement.scrollWidth") <= width
    wide = browser.js(
        "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('thead')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    small = browser.js("[...document.querySelectorAll('.chip, fieldset label')].map(e => e.offsetHeight)")
    assert min(small) >= 24
    assert browser.complaints() == []


def test_tables_on_a_phone_name_every_figure(open_page: Open) -> None:
    browser = open_page(made_experiment(seeds=2, epochs=3), width=360)
    label = "getComputedStyle(document.querySelector('table td'), '::before').content"
    assert browser.js(label) == '"final loss"'


def test_everything_that_can_be_used_has_a_name(open_page: Open) -> None:
    browser = open_page(experiment())
    nameless = browser.js(
        "[...document.querySelectorAll('button, input, a, .chart, .bar, pre')].filter(e => !(e.textContent.trim()"
        " || e.getAttribute('aria-label') || (e.labels && e.labels[0].textContent.trim()))).length"
    )
    assert nameless == 0
    levels = browser.js("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert browser.js("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == len(browser.all("[id]"))


def test_hostile_names_do_not_run(open_page: Open) -> None:
    info = replace(INFO, metric=HOSTILE, data=HOSTILE, environment={HOSTILE: HOSTILE})
    runs = [made_run([3, 2, 1], info=info, task=HOSTILE, order=order) for order in ("rr", HOSTILE)]
    browser = open_page([replace(run, info=replace(run.info, command=HOSTILE)) for run in runs])
    browser.show(browser.chart("loss"))
    assert set(browser.lines(browser.chart("loss"))) == {"rr", HOSTILE}
    assert browser.js("window.hacked") is None
    assert browser.all("img") == []
    assert browser.complaints() == []


def test_two_hundred_runs_open_at_once(open_page: Open) -> None:
    runs = [run for workers in range(1, 11) for run in made_experiment(seeds=5, epochs=100, workers=workers)]
    browser = open_page(runs)
    took = browser.js("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert took < 5000  # milliseconds; about 300 on an idle machine
    assert len(browser.all(".chart svg")) < len(browser.all(".chart"))  # the rest wait until they are looked at


def test_commands_can_be_copied(open_page: Open) -> None:
    browser = open_page(made_experiment(seeds=1, epochs=2))
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    button = browser.one("button.copy")
    button.click()
    browser.wait(lambda: button.text in ("Copied", "Selected"))
