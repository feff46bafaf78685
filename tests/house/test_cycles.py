"""No module of the product imports another that imports it, however far round, for types or inside functions."""

from __future__ import annotations

import pytest

from tests.house import imports
from tests.house.imports import import_cycles
from tests.house.product import parsed


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_cycles() == []


def test_imports_for_types_and_inside_functions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first = parsed("core/skerry/a.py", "if TYPE_CHECKING:\n    from skerry.b import B\n")
    second = parsed("core/skerry/b.py", "def f():\n    import skerry.c\n")
    third = parsed("core/skerry/c.py", "from skerry import a\n")
    other = parsed("core/skerry/d.py", "from skerry.a import A\n")
    monkeypatch.setattr(imports, "product_files", lambda: (first, second, third, other))
    assert import_cycles() == [("skerry.a", "skerry.b", "skerry.c")]
