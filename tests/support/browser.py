"""A headless Chromium for the tests of pages; without one in the PATH they are skipped."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
browsing = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None,
    reason="needs chromium and chromedriver (Debian: chromium-driver)",
)


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Yield the browser, which notes what pages ask for and complain about."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()
