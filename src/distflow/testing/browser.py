"""A real Chromium without a window, driven by Playwright, for tests of web pages."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

__all__ = ["missing_chromium", "open_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing_chromium() -> str | None:
    """Return the reason why no browser can be started, or ``None``."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed: pip install playwright"
    if not any(map(shutil.which, _NAMES)):
        return "Chromium is not installed: sudo apt-get install chromium"
    return None


@contextmanager
def open_chromium(size: Mapping[str, int] | None = None) -> Iterator[Page]:
    """Start the system's Chromium, and yield a page in a new, private context.

    Args:
        size: The width and height of the page in pixels. Default: 1280 × 800.

    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  it may be missing

    path = next(filter(None, map(shutil.which, _NAMES)))
    viewport = cast("ViewportSize", dict(size or {"width": 1280, "height": 800}))
    with sync_playwright() as playwright:
        # Root cannot use Chromium's sandbox. The tests open only pages of this repository. A process for each page and a
        # software renderer would take a quarter of the processor time.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-software-rasterizer",
                   "--disable-site-isolation-trials", "--renderer-process-limit=1"]  # fmt: skip
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            page = browser.new_context(viewport=viewport, accept_downloads=True).new_page()
            page.set_default_timeout(60_000)
            yield page
        finally:
            browser.close()
