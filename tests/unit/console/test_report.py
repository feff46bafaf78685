"""A report is one file, with everything inside and nothing that ends a script too early."""

from __future__ import annotations

import json
import re

from skerry_console.report import report
from skerry_console.view import Settings, script_json
from tests.support.recorded_run import rounds, started


def test_a_report_asks_for_nothing_and_is_small() -> None:
    html = report(started(*rounds(299, "us", "eu")), Settings(prices={}))
    page, *_ = html.partition("<script>")
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert len(html.encode()) < 3_000_000
    assert '<template id="version/head/299">' in html
    assert "1196 of 1196 events, the newest" in page
    assert "data-page" not in page, "nobody would answer"


def test_json_in_a_page_ends_no_script() -> None:
    values = {"text": "</script><!--"}
    assert "<" not in script_json(values)
    assert json.loads(script_json(values)) == values
