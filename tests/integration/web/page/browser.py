"""Debian's Chromium, driven by selenium."""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.mongo import PATIENCE, pauses

T = TypeVar("T")
CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
#: Without these, Chromium looks for Google's hosts.
_QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--in-process-gpu",
    "--disable-software-rasterizer",
    "--renderer-process-limit=1",
    "--disable-features=SpareRendererForSitePerProcess,Translate,OptimizationHints,MediaRouter,PaintHolding",
    "--disable-site-isolation-trials",
)


class Browser:
    """A browser with one window."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self._token = ""

    def sign_in(self, token: str, path: str = "/charts", *, anew: bool = False) -> None:
        """Begin a session, as the link does that `mtask web` prints, unless this token has one."""
        if anew or self._token != token or path != "/charts":
            self.driver.delete_all_cookies()
            self.driver.get(f"{self.url}/login?token={token}&next={path}")
            self.driver.find_element(By.CSS_SELECTOR, "button").click()
            self._token = token

    def open(self, path: str) -> None:
        """Load a page."""
        self.driver.get(self.url + path)

    def size(self, width: int, height: int = 900) -> None:
        """Give the page this size, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, is_dark: bool) -> None:
        """Prefer dark colours, or light ones."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def one(self, css: str) -> WebElement:
        """Return the first element that matches, once there is one."""
        return self.until(lambda: self.driver.find_elements(By.CSS_SELECTOR, css), css)[0]

    def all(self, css: str) -> list[WebElement]:
        """Return all elements that match."""
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str = "main") -> str:
        """Return the visible text of an element, as it is at one moment."""
        found: str = self.js("const e = document.querySelector(arguments[0]); return e ? e.innerText : '';", css)
        return found

    def fill(self, css: str, text: str) -> None:
        """Write a text into a field in place of the one that it holds."""

        def write() -> bool:
            field = self.one(css)
            field.clear()
            field.send_keys(text)
            return True

        self._until_it_stays(write)

    def press(self, css: str) -> None:
        """Click on an element."""

        def click() -> bool:
            self.one(css).click()
            return True

        self._until_it_stays(click)

    def says(self, words: str) -> None:
        """Wait until the page shows these words. This works without scripts, too."""
        self._until_it_stays(lambda: words in self.one("main").text)

    def _until_it_stays(self, act: Callable[[], bool]) -> None:
        """Act on an element. The page may replace it by a newer one meanwhile: then act on that one."""

        def try_it() -> bool:
            try:
                return act()
            except StaleElementReferenceException:
                return False

        self.until(try_it, "an element that stays")

    def keys(self, *keys: str) -> None:
        """Type keys."""
        for key in keys:
            self.driver.find_element(By.TAG_NAME, "body").send_keys(key)

    def js(self, script: str, *arguments: Any) -> Any:
        """Run a script."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], T], what: str = "the condition", timeout: float = PATIENCE) -> T:
        """Wait until a condition holds; return its value."""
        end = time.monotonic() + timeout
        waiting = pauses()
        while not (found := condition()):
            assert time.monotonic() < end, f"not within {timeout:g} s: {what}; the page: {self.text()[:2000]}"
            time.sleep(next(waiting))
        return found

    def shows(self, text: str, css: str = "main") -> None:
        """Wait until an element shows a text."""
        self.until(lambda: text in self.text(css), f"{text!r} in {css}")

    def is_too_wide(self) -> str:
        """Return the widest element that the page is too narrow for; "" if there is none."""
        found: str = self.js(
            "const w = innerWidth; if (document.documentElement.scrollWidth <= w) return '';"
            "let out = 'the document'; for (const e of document.querySelectorAll('body *')) {"
            "const r = e.getBoundingClientRect(); if (r.right > w + 1 && !e.closest('.scroll, nav, pre'))"
            " out = e.outerHTML.slice(0, 200) + ' ' + r.right; } return out;"
        )
        return found

    def picture(self, path: Path, most: int = 4000) -> None:
        """Save a picture of the page, down to this height."""
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = self.js("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
        taken = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.driver.execute("getLog", {"type": kind})["value"]
        return found

    def complaints(self) -> list[str]:
        """Return the errors of the console since the last call."""
        return [
            f"{entry['level']} {entry['message']}"
            for entry in self._log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def hosts(self) -> set[str]:
        """Return the hosts that the pages have asked since the last call."""
        found = set()
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = urlsplit(message["params"]["request"]["url"])
                if address.scheme not in ("data", "blob", "chrome", "about"):
                    found.add(address.netloc)
        return found


@contextmanager
def browsing(url: str) -> Iterator[Browser]:
    """Run a browser during the block."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    with tempfile.TemporaryDirectory(prefix="mtask-chromium-") as folder:
        for flag in (*_QUIET, f"--user-data-dir={folder}", "--window-size=1360,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            yield Browser(driver, url)
        finally:
            driver.quit()
