"""A headless Chromium for the tests of the status page, where the machine has one.

Nothing is downloaded: a browser that is installed is driven, whichever it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

PATIENCE = 60_000
"""Milliseconds that a page may take for anything before a test fails."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def find_chromium() -> str | None:
    """``DFLASH_TEST_CHROMIUM`` if that is set, else one on the path."""
    given = os.environ.get("DFLASH_TEST_CHROMIUM")
    return given or next(filter(None, map(shutil.which, PROGRAMS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Its own sandbox needs a user who is not root, or privileges that containers lack. It
        # opens nothing but this project's own page.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


OpenPage = Callable[..., AbstractContextManager[Any]]
"""(url, width=, console=): a page in a context of its own, closed at the end of the block. Then it
has had nothing to say on its console; ``console``: False where it has to, since a request is
refused or nobody answers."""


@pytest.fixture
def open_page(browser: Any) -> OpenPage:
    @contextmanager
    def opened(url: str, *, width: int = 1280, console: bool = True) -> Iterator[Any]:
        complaints: list[str] = []
        context = browser.new_context(
            viewport={"width": width, "height": 800}, reduced_motion="reduce"
        )
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if console:
            page.on("console", lambda message: complaints.append(message.text))
        page.goto(url)
        yield page
        context.close()
        assert complaints == []

    return opened
