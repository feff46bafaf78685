"""What the pages say of a run, as plain values and HTML; figures that nobody knows read "no data"."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from skerry.cli import policy_text
from skerry.cli.console import count_text, rate_text, size_text
from skerry.history.alerts import alerts, duration_text
from skerry.history.run_history import (
    LearnerView,
    RunHistory,
    VersionView,
    learner_state,
    status_word,
    unmerged_text,
)
from skerry.planning.formulas import SYNCHRONOUS_BITS
from skerry_console.pictures import COLOURINGS, learner_colour

NO_DATA: Final = "no data"
_NOW_S: Final = 15.0  # longer than the pause between two reports
PAGE_SIZE: Final = 100  # events of a page
_REPORT_PAGE_SIZE: Final = 2_000  # about 150 kB

_TEMPLATES: Final = Environment(
    loader=PackageLoader("skerry_console"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def _code(text: str) -> Markup:
    """Returns a text as HTML, with what is between backticks as code."""
    return Markup(re.sub(r"`(.*?)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 -- escaped


_TEMPLATES.filters["code"] = _code
_TEMPLATES.globals["css"] = (files("skerry_console") / "static" / "console.css").read_text()
for _name in _TEMPLATES.list_templates():  # compiled now, while nobody waits for a page
    _TEMPLATES.get_template(_name)


@dataclass(frozen=True)
class Settings:
    """What the person who starts a console says."""

    prices: Mapping[str, float]  # of an hour, by learner or region
    allows_actions: bool = False


def page(
    history: RunHistory,
    settings: Settings,
    now_s: float,
    *,
    title: str,
    feed: str = "",
    pictures: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    scripts: Sequence[str] = (),
) -> str:
    """Returns the page of a run: of a console's feed, or with its scripts, pictures and dialogues inside, a report."""
    is_report = bool(scripts)
    facts = {"run": history.name, "fragments": list(history.fragments), "is_report": is_report, "feed": feed}
    return _render(
        "run",
        title=title,
        history=history,
        sections=sections(history, settings, now_s),
        events=events_html(history, "", 0, is_report=is_report),
        is_report=is_report,
        colourings=COLOURINGS,
        allows_actions=settings.allows_actions,
        pictures=script_json(pictures or {}),
        facts=script_json(facts),
        versions=versions or {},
        scripts=scripts,
    )


def script_json(values: Any) -> str:
    """Returns JSON that may stand inside a script element."""
    return json.dumps(values).replace("<", "\\u003c")


def runs_page(rows: list[dict[str, str]]) -> str:
    """Returns the page that lists runs."""
    return _render("runs", rows=rows, title="Skerry")


def error_page(reason: str, *, may_pass: bool) -> str:
    """Returns a page that says why there is no other; if that may pass, it tries again by itself."""
    return _render("error", reason=reason, may_pass=may_pass, title="Skerry")


def sections(history: RunHistory, settings: Settings, now_s: float, *, problem: str = "") -> dict[str, str]:
    """Returns the parts of the page that change while it is looked at, as HTML by the id of their element.

    `problem` says why the syncer can't be asked now, if that is so.
    """
    raised = alerts(history, now_s)
    troubled = {alert.subject for alert in raised}
    rows = policy_text.rows(history.policy)
    parts = {
        "policy": _render("policy", rows=rows),
        "headline": _render(
            "headline", status=status_word(history.status), history=history, now=_clock(history.now_s), problem=problem
        ),
        "alerts": _render("alerts", alerts=raised),
        "kpis": _render("kpis", kpis=_kpis(history, settings, now_s)),
    }
    for name, learner in sorted(history.learners.items()):
        facts = _learner(history, learner, now_s)
        facts |= {"colour": learner_colour(history, name), "allows_actions": settings.allows_actions}
        parts[f"learner-{name}"] = _render("learner", name=name, is_troubled=name in troubled, **facts)
    return parts


def events_html(history: RunHistory, words: str, page_number: int, *, is_report: bool = False) -> str:
    """Returns a page of the events whose text has all of `words`, the newest first; a report has a long one."""
    page_size = _REPORT_PAGE_SIZE if is_report else PAGE_SIZE
    wanted = words.lower().split()
    matching = [event for event in reversed(history.events) if all(word in event.text.lower() for word in wanted)]
    shown = matching[page_number * page_size : (page_number + 1) * page_size]
    rows = [{"position": event.position, "time": _clock(event.time_s), "text": event.text} for event in shown]
    last = max(0, len(matching) - 1) // page_size
    count = len(matching)
    return _render("events", rows=rows, count=count, page=page_number, last=last, is_report=is_report)


def version_html(history: RunHistory, view: VersionView, *, allows_actions: bool = False) -> str:
    """Returns what the dialogue about a version says."""
    last = view.last_delta
    waited = view.waited_s
    judged = {
        f"{name} ({report.judge})": f"{value:.4f}"
        for report in history.reports
        if view.position <= report.position < (view.until or math.inf)
        for name, value in sorted(report.metrics.items())
    }
    if view.source_version >= 0:
        origin = f"a roll-back, with the content of version {view.source_version}"
    elif view.version == 0:
        origin = "the initial weights"
    else:
        origin = "a round of " + (f"{view.delta_count} deltas" if view.delta_count != 1 else "one delta")
    facts = [
        ("made by", origin),
        ("committed", f"{_clock(view.committed_at_s)}, log position {view.position}"),
        ("the round waited", NO_DATA if waited is None else _seconds(waited)),
        ("its last delta", NO_DATA if last is None else f"of {last.learner_id}"),
        ("update", size_text(view.update_size_bytes) if view.update_size_bytes else NO_DATA),
        ("participation", f"{view.participation:.0%}" if view.participation else NO_DATA),
        *judged.items(),
    ]
    opened_at_s, came_at_s = view.opened_at_s or 0.0, view.came_at_s
    deltas = [
        {
            "learner": delta.learner_id,
            "share": f"{delta.weight_share:.0%}",
            "steps": delta.step_count,
            "tokens": count_text(delta.token_count),
            "size": size_text(delta.size_bytes),
            "staleness": delta.staleness,
            "came": _known(came_at_s.get(delta.delta_id), lambda time_s: f"+{_seconds(time_s - opened_at_s)}"),
        }
        for delta in sorted(view.deltas, key=lambda delta: came_at_s.get(delta.delta_id, 0.0))
    ]
    run, position = history.name, view.position
    commands = (
        f"skerry runs pin {run} --position {position}",
        f"skerry export {run} --position {position} --out {run}-{position}.safetensors",
        f"skerry rollback {run} --to {position}",
    )
    return _render("version", view=view, facts=facts, deltas=deltas, commands=commands, allows_actions=allows_actions)


def _kpis(history: RunHistory, settings: Settings, now_s: float) -> list[tuple[str, str, str]]:
    """Returns name, value and explanation of each figure on top of the page."""
    tokens_per_s, versions_per_hour = history.tokens_per_s(now_s), history.versions_per_hour(now_s)
    goodput = history.goodput()
    live, expected, participating = history.learner_counts()
    reports = [view.status.report for view in history.learners.values()]
    steps = sum(report.step_count for report in reports)
    up = max(sum(view.sent_bytes for view in history.learners.values()), sum(report.sent_bytes for report in reports))
    down = sum(report.received_bytes for report in reports)
    synchronous = SYNCHRONOUS_BITS / 8 * history.parameter_count * steps
    cost = _cost(history, settings, now_s)
    judged = [(key, series.last.value) for key, series in sorted(history.metrics.items()) if series.last is not None]
    (judge, metric), loss = next((pair for pair in judged if "loss" in pair[0][1]), (("", ""), None))
    return [
        ("merged loss", _known(loss, "{:.4f}".format), f"{metric} by {judge}" if judge else "of `skerry judge`"),
        (
            "tokens a second",
            _known(tokens_per_s, lambda rate: count_text(round(rate))),
            f"merged lately; {count_text(round(history.token_count))} so far" if history.token_count else "merged",
        ),
        ("goodput", _known(goodput, "{:.0%}".format), "inner steps merged / inner steps taken"),
        (
            "versions an hour",
            _known(versions_per_hour, lambda rate: count_text(round(rate))),
            "of all fragments, over the last hour",
        ),
        ("learners", f"{live} / {expected} / {participating}", "live / expected / participating"),
        ("sent", size_text(up) if up else NO_DATA, _ratio(synchronous, up)),
        ("received", size_text(down) if down else NO_DATA, _ratio(synchronous, down)),
        *([] if cost is None else [("cost", f"{cost:,.2f}", "attached hours times --price")]),
    ]


def _ratio(synchronous_bytes: float, moved_bytes: float) -> str:
    """Returns how much less that is than data-parallel training moves each way."""
    if not moved_bytes or not synchronous_bytes:
        return "of deltas and updates"
    return f"data-parallel: {synchronous_bytes / moved_bytes:,.0f} times as much"


def _cost(history: RunHistory, settings: Settings, now_s: float) -> float | None:
    priced = [
        view.attached_s(now_s) / 3600 * price
        for name, view in history.learners.items()
        if (price := settings.prices.get(name, settings.prices.get(view.status.region))) is not None
    ]
    return sum(priced) if priced and history.is_whole else None


def _ago(time_s: float) -> str:
    """Returns since when a learner is silent, in minutes: each change of the text is sent to every page."""
    if time_s < _NOW_S:
        return "now"
    return f"{duration_text(time_s)} ago" if time_s >= 120 else "less than 2 min ago"


def _learner(history: RunHistory, view: LearnerView, now_s: float) -> dict[str, Any]:
    """Returns what a learner's card says."""
    status, report = view.status, view.status.report
    has_report = status.HasField("report")
    behind, (up, down) = history.staleness(view), view.bits_per_s or (None, None)
    silent_s = None if view.heard_at_s is None else now_s - view.heard_at_s
    last_loss = view.losses.last
    step_s = report.step_time.ToMilliseconds() / 1000
    facts = [
        ("step", f"{report.step_count:,}" if has_report else NO_DATA),
        ("step time", _seconds(step_s) if step_s else NO_DATA),
        ("loss", NO_DATA if last_loss is None else f"{last_loss.value:.4f}"),
        ("unsent steps", f"{report.unsent_step_count:,}" if has_report else NO_DATA),
        ("versions behind", NO_DATA if behind is None else str(behind)),
        ("share of weight", _known(view.share, "{:.0%}".format)),
        ("sends", NO_DATA if up is None else rate_text(up)),
        ("receives", NO_DATA if down is None else rate_text(down)),
        ("pause in a step", _seconds(report.stall_time.ToMilliseconds() / 1000) if has_report else NO_DATA),
        ("last heard", _known(silent_s, _ago)),
    ]
    return {
        "region": status.region or NO_DATA,
        "state": learner_state(status),
        "pace": _pace(history, step_s),
        "facts": facts,
        "problem": report.problem,
        "unmerged": unmerged_text(status.fates),
        "last_words": view.last_words,
    }


def _pace(history: RunHistory, step_s: float) -> str:
    """Returns how much slower than the fastest learner a learner is; its rounds go on without it."""
    times_s = [view.status.report.step_time.ToMilliseconds() / 1000 for view in history.learners.values()]
    fastest_s = min((time_s for time_s in times_s if time_s), default=0.0)
    if not step_s or step_s < 1.5 * fastest_s:
        return ""
    return f"{step_s / fastest_s:.1f} times slower than the fastest, which costs the others nothing"


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(f"{template}.html").render(**values).strip()


def _known(value: float | None, text: Any) -> str:
    return NO_DATA if value is None else str(text(value))


def _seconds(duration_s: float) -> str:
    return f"{1000 * duration_s:.0f} ms" if duration_s < 1 else duration_text(duration_s)


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s)) if unix_s else NO_DATA
