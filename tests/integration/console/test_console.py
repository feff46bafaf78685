"""A person who looks at a run in a browser sees what happens in it, on every screen and by every means."""

from __future__ import annotations

import json
import math
import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Dialog, Page, expect

from skerry import RunsClient
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.net.loop_thread import LoopThread
from tests.support.console_thread import ScriptedRun, console
from tests.support.syncer_thread import syncer
from tests.support.tcp_link import Link

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # the first test may install the browser

_FAST, _SLOW = "eu-west-4-node-017-of-a-long-name", "us"

# Where the map of versions shows a version of the first fragment, in the page.
_CELL = """version => {
    const plot = Bokeh.documents.map(shown => shown.get_model_by_name("version map")).find(Boolean);
    const view = Bokeh.index.find_one(plot);
    const canvas = view.canvas_view.el.getBoundingClientRect();
    return [canvas.x + view.frame.x_scale.compute(version), canvas.y + view.frame.y_scale.compute(0)];
}"""

# Texts whose contrast with what is behind them is below that of WCAG 2.2, level AA.
_PALE = """() => {
    const numbers = colour => (colour.match(/[\\d.]+/g) ?? []).map(Number);
    const light = colour => numbers(colour).slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = element => {
        const colour = getComputedStyle(element).backgroundColor;
        return numbers(colour)[3] === 0 ? behind(element.parentElement) : colour;
    };
    const words = element => [...element.childNodes].filter(node => node.nodeType === 3 && node.data.trim());
    return [...document.querySelectorAll("body *")]
        .filter(element => words(element).length && element.checkVisibility() && !element.disabled)
        .map(element => [element, light(getComputedStyle(element).color), light(behind(element))])
        .filter(([_, ink, paper]) => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) < 4.5)
        .map(([element]) => element.textContent.trim());
}"""

_CONTROLS = "a[href], button:not(:disabled), input, select"


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with syncer() as address:
        yield address


@pytest.fixture(scope="module")
def url(target: str) -> Iterator[str]:
    with console(target) as address:
        yield address


@contextmanager
def scripted(target: str, name: str) -> Iterator[ScriptedRun]:
    run = ScriptedRun(target, name)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def finished(target: str) -> Iterator[ScriptedRun]:
    """A run with versions 1 to 6 of two learners."""
    with scripted(target, "finished") as run:
        for _ in range(3):
            run.advance(_FAST)
            run.advance(_SLOW)
        yield run


@contextmanager
def hook() -> Iterator[tuple[str, queue.Queue[str]]]:
    """Yields the URL of a web hook, and what is posted to it."""
    posted: queue.Queue[str] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook", posted
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def alerted(target: str) -> Iterator[tuple[ScriptedRun, str, queue.Queue[str]]]:
    """A run, the URL of a console that posts its alerts, and what is posted."""
    with scripted(target, "alert") as run, hook() as (hook_url, posted):
        run.advance(_SLOW)
        run.advance(_FAST)
        with console(target, webhook_url=hook_url) as url:
            yield run, url, posted


def next_of(posted: queue.Queue[str], words: str) -> str:
    """Returns the next post with these words; there may be others, of rounds that come late while tests wait."""
    while words not in (text := posted.get(timeout=10)):
        pass
    return text


def points(page: Page, source: str) -> list[float]:
    """Returns the values of a curve that the page shows."""
    values = page.evaluate(
        "name => Array.from(Bokeh.documents.map(shown => shown.get_model_by_name(name)).find(Boolean).data.value)",
        source,
    )
    assert isinstance(values, list)
    return values


def test_a_run_is_shown_live(page: Page, url: str, target: str) -> None:
    with scripted(target, "live") as run:
        run.advance(_FAST)
        page.goto(f"{url}/runs/live")
        card = page.get_by_role("article", name=f"learner {_FAST}")
        expect(card).to_contain_text("step4")
        run.advance(_FAST)
        expect(card).to_contain_text("step8")
        page.wait_for_function("() => model('versions').data.contributors[0][1] === 1")
        run.advance(_SLOW)
        expect(page.get_by_role("article", name=f"learner {_SLOW}")).to_contain_text("participating")
        expect(page.locator("#event-page")).to_contain_text(f"body is at version 3 by {_SLOW} 100%")
        page.wait_for_function("name => model(name)?.data.value.length === 2", arg=f"loss {_FAST}")
        assert points(page, f"loss {_FAST}") == pytest.approx([4.0 / 1.2, 4.0 / 1.4])
        page.locator("#loss-axis").select_option("steps")
        page.wait_for_function("name => model(name).glyph.x.field === 'step'", arg=f"line loss {_FAST}")


def test_a_killed_learner_is_seen_as_lost(page: Page, url: str, target: str) -> None:
    with scripted(target, "kill") as run:
        run.advance(_FAST)
        run.advance(_SLOW)
        page.goto(f"{url}/runs/kill")
        card = page.get_by_role("article", name=f"learner {_SLOW}")
        expect(card.locator(".state")).to_have_text("participating")
        run.kill(_SLOW)
        expect(card.locator(".state")).to_have_text("lost")
        expect(page.locator("#event-page")).to_contain_text(f"{_SLOW} is lost: its lease ran out")
        expect(page.locator("#kpis")).to_contain_text("1 / 2 / 1")
        page.wait_for_function(
            "text => model('marks').data.text.includes(text)", arg=f"{_SLOW} is lost: its lease ran out"
        )


def test_an_alert_is_raised_and_resolved_and_posted_once_each(
    alerted: tuple[ScriptedRun, str, queue.Queue[str]], page: Page
) -> None:
    run, url, posted = alerted
    page.goto(f"{url}/runs/alert")
    expect(page.locator("#kpis")).to_contain_text("2 / 2 / 2")
    run.advance(_SLOW, loss=math.nan)
    run.advance(_FAST)  # which has then missed no round, however long the page took to load
    told = f"the loss of {_SLOW} is nan"
    expect(page.locator("#alerts")).to_contain_text(told)
    page.get_by_label("only those with problems").check()
    expect(page.get_by_role("article", name=f"learner {_SLOW}")).to_be_visible()
    expect(page.get_by_role("article", name=f"learner {_FAST}")).to_be_hidden()
    assert re.match(r"\[(warning|critical)\] alert: ", next_of(posted, told))
    run.advance(_SLOW)
    expect(page.locator("#alerts")).not_to_contain_text(told)
    assert next_of(posted, told).startswith("[resolved] alert: ")
    assert not [text for text in posted.queue if told in text]


def test_a_learner_is_ejected_and_a_policy_changed_in_the_page(page: Page, target: str) -> None:
    asked: list[str] = []

    def answer(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.accept()

    page.on("dialog", answer)
    with scripted(target, "acted") as run, console(target, allows_actions=True) as url:
        run.advance(_SLOW)
        page.goto(f"{url}/runs/acted")
        page.locator("#assignments").fill("quorum_count=1 grace_factor=0.125")
        page.get_by_role("button", name="Change").click()
        page.get_by_text("What it is now").click()
        expect(page.get_by_role("row", name="grace_factor")).to_contain_text("0.125")
        card = page.get_by_role("article", name=f"learner {_SLOW}")
        card.get_by_role("button", name="Eject").click()
        expect(card.locator(".state")).to_have_text("ejected")
        expect(card.get_by_role("button", name="Readmit")).to_be_visible()
        expect(page.locator("#event-page")).to_contain_text(f"{_SLOW} was ejected")
        page.goto("about:blank")  # before its server ends
    assert asked[::2] == ["Change the policy of acted?", f"Eject {_SLOW}?"]


def test_a_syncer_that_is_away_is_told_and_followed_again_when_it_is_back(page: Page, target: str) -> None:
    thread, link = LoopThread("link"), Link(int(target.rpartition(":")[2]))
    thread.run(link.open(0))
    with scripted(target, "away") as run, console(f"127.0.0.1:{link.port}") as url:
        run.advance(_SLOW)
        page.goto(f"{url}/runs/away")
        card = page.get_by_role("article", name=f"learner {_SLOW}")
        expect(card).to_contain_text("step4")
        thread.call(link.cut)
        expect(page.locator("#headline .problem")).to_contain_text("reconnecting")
        run.advance(_SLOW)
        thread.call(link.heal)
        expect(card).to_contain_text("step8")
        expect(page.locator("#headline .problem")).to_have_count(0)
        page.goto("about:blank")  # before its server ends
    thread.run(link.close())
    thread.close()


def test_the_dialogue_of_a_version_says_who_made_it(page: Page, url: str, finished: ScriptedRun) -> None:
    page.goto(f"{url}/runs/{finished.name}")
    page.locator("#version-map canvas").first.wait_for()
    page.locator("#version-map").scroll_into_view_if_needed()
    page.mouse.click(*page.evaluate(_CELL, 3))
    dialogue = page.get_by_role("dialog")
    expect(dialogue).to_contain_text("body version 3")
    expect(dialogue.get_by_role("row").nth(1)).to_contain_text(_FAST)
    expect(dialogue.get_by_role("row").nth(1)).to_contain_text("100%")
    expect(dialogue).to_contain_text(f"skerry rollback {finished.name} --to ")
    page.keyboard.press("Escape")
    expect(dialogue).to_be_hidden()


def test_the_keyboard_reaches_every_control_and_opens_a_version(page: Page, url: str, finished: ScriptedRun) -> None:
    page.goto(f"{url}/runs/{finished.name}")
    page.locator("#version-map canvas").first.wait_for()
    visible = "selector => [...document.querySelectorAll(selector)].filter(control => control.checkVisibility())"
    count = page.evaluate(f"selector => ({visible})(selector).length", _CONTROLS)
    reached = set()
    for _ in range(2 * count):  # pictures have buttons of their own
        page.keyboard.press("Tab")
        reached.add(page.evaluate(f"selector => ({visible})(selector).indexOf(document.activeElement)", _CONTROLS))
    assert set(range(count)) <= reached
    page.get_by_label("version", exact=True).focus()
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("made by")
    page.keyboard.press("Enter")  # on the button that closes it
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_events_are_found_by_words(page: Page, url: str, finished: ScriptedRun) -> None:
    page.goto(f"{url}/runs/{finished.name}")
    page.locator("#event-words").fill(f"version 4 {_SLOW}")
    expect(page.locator("#event-page")).to_contain_text("1 events")
    expect(page.locator("#event-page tbody tr")).to_have_count(1)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_legible_and_as_wide_as_the_screen(
    page: Page, url: str, finished: ScriptedRun, scheme: Any, width: int
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(f"{url}/runs/{finished.name}")
    page.locator("#version-map canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(_PALE) == []
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("words", [[], ["--follow"]])
def test_a_report_has_what_judges_report_after_the_run_is_closed(target: str, words: list[str], tmp_path: Path) -> None:
    name, out = f"judged{len(words)}", tmp_path / "report.html"
    with scripted(target, name) as run, RunsClient(target) as client:
        run.advance(_SLOW)
        client.report_metrics(name, {"loss": 3.25}, judge="eval", position=client.get_run(name).run.position)
        run.advance(_SLOW)
        position = client.close_run(name).position
        client.report_metrics(name, {"loss": 2.125}, judge="eval", position=position)
    assert failures.run(cli, ["report", name, *words, "--out", str(out), "--target", target]) == 0
    assert f"eval reports of position {position}: loss 2.125" in out.read_text()


def test_the_report_opens_from_disk_without_a_network(
    page: Page, url: str, finished: ScriptedRun, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    report.write_bytes(page.request.get(f"{url}/runs/{finished.name}/report").body())
    assert report.stat().st_size < 3e6
    page.context.set_offline(True)
    page.goto(report.as_uri())
    page.locator("#version-map canvas").first.wait_for()
    assert points(page, f"loss {_FAST}")
    page.get_by_label("version", exact=True).fill("2")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("dialog")).to_contain_text(_SLOW)
