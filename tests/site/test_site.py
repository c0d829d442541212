"""The documentation site: it builds without a warning, and works in a real browser, wide and narrow.

It needs the extra `docs`; `make docs` installs that, builds the site and runs these tests.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cdgrab

pytest.importorskip("mkdocs", reason="mkdocs is not installed; make docs installs it and runs this test")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [
    "index.html",
    "start/first_loop.html",
    "how_to/loop.html",
    "integrations.html",
    "reference/ordering.html",
    "reference/orders.html",
    "reference/cli.html",
    "results/index.html",
    "faq.html",
]


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(out),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](resume.md#nothing)", "nothing"),
        ("::: cdgrab.nothing", "cdgrab.nothing"),
    ],
)
def test_a_broken_link_or_reference_fails(tmp_path: Path, line: str, named: str) -> None:
    for name in ("docs", "src", "benchmarks", "examples", "tests"):
        skip = shutil.ignore_patterns("records", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(path, tmp_path)
    faq = tmp_path / "docs" / "faq.md"
    faq.write_text(f"{faq.read_text()}\n{line}\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "out")
    assert done.returncode != 0
    assert named in done.stderr


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    shown = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    ids = set(re.findall(r'id="(cdgrab[\w.]*)"', shown))
    missing = [name for name in cdgrab.__all__ if f"cdgrab.{name}" not in ids and name != "__version__"]
    assert missing == []
    undescribed = [name for name in ("Ordering.attach", "Ordering.metrics") if f"cdgrab.{name}" not in ids]
    assert undescribed == []


def test_examples_are_shown_as_code(site: Path) -> None:
    shown = (site / "reference" / "ordering.html").read_text()
    assert 'class="gp">&gt;&gt;&gt; </span>' in shown
    assert "<blockquote>" not in shown


def test_nothing_on_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = r'<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"'
    for path in site.rglob("*.html"):
        assert re.findall(fetched, path.read_text()) == []
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", path.read_text()) == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served; search needs a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    helper = shutil.which("chromedriver")
    if browser is None or helper is None:
        missing = f"chromium is {browser}, chromedriver is {helper}; on Debian: apt install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(f"the site must be seen in a browser: {missing}")
        pytest.skip(f"no browser: {missing}")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{argument}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which chromium refuses to root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SE_OFFLINE", "true")
        patch.setenv("SE_AVOID_STATS", "true")
        found = webdriver.Chrome(options=options, service=Service(helper))
        yield found
        found.quit()


def size(driver: webdriver.Chrome, width: int) -> None:
    measures = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", measures)


def requests(driver: webdriver.Chrome) -> list[str]:
    """Addresses asked for since last time, by any page, frame or worker."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]  # type: ignore[no-untyped-call]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def complaints(driver: webdriver.Chrome) -> list[str]:
    return [str(entry["message"]) for entry in driver.get_log("browser")]  # type: ignore[no-untyped-call]


def forget(driver: webdriver.Chrome) -> None:
    requests(driver)
    complaints(driver)


def wait(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "the page did not get there within ten seconds"
        time.sleep(0.05)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_pages_render(driver: webdriver.Chrome, address: str, page: str, width: int) -> None:
    size(driver, width)
    forget(driver)
    driver.get(address + page)
    assert driver.find_element(By.TAG_NAME, "h1").text
    broken = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    wait(lambda: driver.execute_script("return [...document.images].every(i => i.complete)"))
    assert driver.execute_script(broken) == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert complaints(driver) == []
    asked = requests(driver)
    assert any(page in url for url in asked)
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    if folder := os.environ.get("CDGRAB_SCREENSHOTS"):
        driver.save_screenshot(str(Path(folder) / f"{page.replace('/', '-')}-{width}.png"))


@pytest.mark.parametrize("width", [1280, 390])
def test_search_finds_resume(driver: webdriver.Chrome, address: str, width: int) -> None:
    size(driver, width)
    forget(driver)
    driver.get(address + "index.html")
    opener = "document.querySelector('label.md-header__button[for=__search]').click()"
    if width < 600:
        driver.execute_script(opener)
    field = driver.find_element(By.CSS_SELECTOR, "input[name=query]")
    wait(field.is_displayed)
    field.click()
    field.send_keys("resume")
    results = "article a.md-search-result__link, li.md-search-result__item a"
    wait(lambda: driver.find_elements(By.CSS_SELECTOR, results))
    found = [str(link.get_attribute("href")) for link in driver.find_elements(By.CSS_SELECTOR, results)]
    assert any("/resume.html" in link for link in found[:3]), found
    assert complaints(driver) == []
    assert [url for url in requests(driver) if not url.startswith((address, "data:", "blob:"))] == []


def test_the_site_is_dark_for_those_who_like_it(driver: webdriver.Chrome, address: str) -> None:
    def brightness(scheme: str) -> float:
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        driver.get(address + "index.html")
        colour = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        return float(sum(driver.execute_script(colour)[:3]) / 765)

    assert brightness("dark") < 0.3
    shown = [i.get_attribute("src") for i in driver.find_elements(By.CSS_SELECTOR, "article img") if i.is_displayed()]
    assert [str(src).rpartition("/")[2] for src in shown] == ["front-dark.png"]
    assert brightness("light") > 0.7
