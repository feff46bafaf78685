"""The browser of the tests shows a picture that a file brings with it, and reports what goes wrong in a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bokeh.embed import json_item
from bokeh.plotting import figure
from bokeh.resources import INLINE
from playwright.sync_api import Browser, Page

from tests.support.browser import watch_errors

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # the first test may install the browser


def test_a_file_with_a_picture_is_drawn_without_network(page: Page, tmp_path: Path) -> None:
    plot = figure(width=600, height=200)
    plot.image(image=[np.linspace(0, 1, 240).reshape(24, 10)], x=0, y=0, dw=10, dh=24)
    (tmp_path / "page.html").write_text(
        f"<!doctype html>{INLINE.render()}<div id='map'></div>"
        f"<script>Bokeh.embed.embed_item({json.dumps(json_item(plot))}, 'map')</script>",
        encoding="utf-8",
    )
    page.context.set_offline(True)
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("#map canvas").first.wait_for()
    assert page.evaluate("Bokeh.index.roots[0].model.renderers.length") == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<script>console.error('bad figure')</script>", "bad figure"),
        ("<script>undefined.figure</script>", "Cannot read properties of undefined"),
        ("<script src='https://example.org/bokeh.js'></script>", "ERR_NAME_NOT_RESOLVED"),
    ],
)
def test_an_error_in_a_page_is_noticed(chromium: Browser, body: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html>{body}", encoding="utf-8")
    with chromium.new_page() as page:
        errors = watch_errors(page)
        page.goto((tmp_path / "page.html").as_uri())
        assert any(said in error for error in errors)
