"""Everything but a learner imports without torch, and the command line starts without any service."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.source_modules import IMPORT_ALL, torch_free_modules


def test_everything_but_a_learner_imports_without_torch() -> None:
    names = torch_free_modules()
    assert "skerry.wire.frames" in names
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(names)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {}


@pytest.mark.parametrize("heavy", ["torch", "grpc", "numba", "numpy", "skerry_syncer"])
def test_the_version_is_shown_without_importing(heavy: str) -> None:
    script = "import sys, skerry.cli.main as m\ntry: m.main(['--version'])\nexcept SystemExit: pass\n"
    script += f"sys.exit({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("skerry ")
    assert done.returncode == 0, f"{heavy} was imported"
