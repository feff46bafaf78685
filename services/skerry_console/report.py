"""A run as one HTML file that opens without a network: the console's page, with everything inside."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Final

import bokeh

from skerry.history.run_history import RunHistory
from skerry_console.pictures import items
from skerry_console.view import Settings, page, version_html

_DETAILED_COUNT: Final = 500  # newest versions whose dialogue opens


def bokeh_script() -> Path:
    """Returns where bokeh's package has its script for browsers."""
    return Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"


def report(history: RunHistory, settings: Settings) -> str:
    """Returns the report as HTML, as of the last thing that happened."""
    newest = islice(reversed(history.versions), _DETAILED_COUNT)
    versions = {f"{view.fragment}/{view.version}": version_html(history, view) for view in newest}
    script = (files("skerry_console") / "static" / "console.js").read_text()
    return page(
        history,
        replace(settings, allows_actions=False),
        history.now_s,
        title=f"{history.name}: report",
        pictures=items(history),
        versions=versions,
        scripts=(bokeh_script().read_text().replace("</script", "<\\/script"), script),
    )
