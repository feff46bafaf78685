"""The lines of docs/training-loops.md name what there is, with options that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from skerry import Learner, attach
from skerry.integrations import jax, lightning, transformers

PAGE = Path(__file__).parents[2] / "docs" / "training-loops.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
CALLED: dict[str, list[Any]] = {
    "attach": [attach],
    "SkerryCallback": [lightning.SkerryCallback, transformers.SkerryCallback],
    "JaxLearner": [jax.JaxLearner],
    "leave": [Learner.leave],
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_every_line_of_the_page_names_what_there_is(block: str) -> None:
    known = set(inspect.signature(Learner).parameters)
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in CALLED:
            named = {parameter for one in CALLED[name] for parameter in inspect.signature(one).parameters}
            assert {keyword.arg for keyword in node.keywords if keyword.arg} <= known | named


def test_the_page_shows_every_way_in() -> None:
    page = "".join(BLOCKS)
    assert all(f"{name}(" in page for name in CALLED)
