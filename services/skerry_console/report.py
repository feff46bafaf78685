"""A run as one HTML file that opens without a network: the console's page, with everything inside."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import bokeh

from skerry.history.run_history import RunHistory
from skerry_console.pictures import items
from skerry_console.view import Settings, page, version_html

_DETAILED_COUNT: Final = 500  # newest versions whose dialogue opens


class Assets(NamedTuple):
    """The page's scripts."""

    script: str
    bokeh: str


def assets() -> Assets:
    """Returns the scripts, BokehJS among them."""
    return Assets(
        script=(files("skerry_console") / "static" / "console.js").read_text(),
        bokeh=bokeh_script().read_text().replace("</script", "<\\/script"),
    )


def bokeh_script() -> Path:
    """Returns where bokeh's package has its script for browsers."""
    return Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"


def report(history: RunHistory, settings: Settings) -> str:
    """Returns the report as HTML, as of the last thing that happened."""
    newest = islice(reversed(history.versions), _DETAILED_COUNT)
    versions = {f"{view.fragment}/{view.version}": version_html(history, view) for view in newest}
    facts = {"run": history.name, "fragments": list(history.fragments), "is_report": True, "cursor": ""}
    return page(
        history,
        replace(settings, allows_actions=False),
        history.now_s,
        title=f"{history.name}: report",
        is_report=True,
        assets=assets(),
        pictures=script_json(items(history)),
        facts=script_json(facts),
        versions=versions,
    )


def script_json(values: Any) -> str:
    """Returns JSON that may stand inside a script element."""
    return json.dumps(values).replace("<", "\\u003c")
