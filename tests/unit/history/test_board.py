"""docker/grafana/skerry.json, which is made from the metrics themselves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[3]


def generator() -> Any:
    """Returns the module of the script that writes the board."""
    spec = importlib.util.spec_from_file_location("generate_board", _ROOT / ".ci/generate_board.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_script_writes() -> None:
    kept = json.loads((_ROOT / "docker/grafana/skerry.json").read_text(encoding="utf-8"))
    assert generator().board() == kept, "run `make board`"


def test_panels_do_not_lie_on_each_other() -> None:
    cells = [
        (x, y)
        for panel in generator().board()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
