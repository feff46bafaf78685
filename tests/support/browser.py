"""Debian's chromium for tests, whose pages fail a test on any error in the page.

The end of each test's page is in build/browser, as a picture under the name of the test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, Request, Response, expect, sync_playwright

from tests.e2e.machine import ROOT, find, need_programs

PICTURES: Final = ROOT / "build" / "browser"

# A page that has lost its syncer follows it again within 10 s, and a browser may share its cores with other tests.
expect.set_options(timeout=30_000)


# A module's, because Playwright's event loop counts as running in this thread, where asynchronous tests want theirs.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser to which only this machine exists."""
    need_programs({"chromium": "chromium"})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find("chromium"), args=["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of a new profile; the test fails on an error in its console and on a request that fails."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(10_000)
    errors = watch_errors(page)
    yield page
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{re.sub(r'[^a-z0-9]+', '_', request.node.name.lower())}.png", full_page=True)
    page.context.close()
    assert not errors, "\n".join(errors)


def watch_errors(page: Page) -> list[str]:
    """Returns a list that grows with the page's errors."""
    errors: list[str] = []

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page itself gave it up, as it does when it is left
            errors.append(f"{request.url}: {request.failure}")

    def answered(response: Response) -> None:
        if response.status >= 400:
            errors.append(f"{response.url}: status {response.status}")

    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", failed)
    page.on("response", answered)
    return errors
