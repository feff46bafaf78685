"""Everything but a learner imports without torch, and the command line starts without any service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Modules whose subject is torch; nothing else may import it, not even when it is there.
OF_TORCH = (
    "skerry_learner.",
    "skerry.wire.torch_codecs.",
    "skerry.integrations.",
    "skerry.learner.",
    "skerry.ranks.",
    "skerry.model.torch.",
)
IMPORT_WITHOUT = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "lightning", "matplotlib", "jax", *sys.argv[1].split()}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
OF_THE_CONSOLE = "bokeh jinja2 starlette uvicorn"


def test_everything_but_a_learner_imports_without_torch() -> None:
    folders = (ROOT / "client", ROOT / "services")
    paths = [path.relative_to(folder) for folder in folders for path in folder.glob("skerry*/**/*.py")]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    names = [name for name in modules if not name.endswith("__main__") and not f"{name}.".startswith(OF_TORCH)]
    assert "skerry.wire.frames" in names
    words = [sys.executable, "-c", IMPORT_WITHOUT, "", *names]
    assert subprocess.run(words, capture_output=True, text=True, check=False).stderr == ""


def test_the_command_line_says_what_it_can_do_without_any_extra() -> None:
    show_help = "\nimport skerry.cli.main as m\nm.main(sys.argv[3:])"
    for words, status in (["--help"], 0), (["console", "--help"], 0), (["console", "--listen", "127.0.0.1:0"], 5):
        command = [sys.executable, "-c", IMPORT_WITHOUT.replace("sys.argv[2:]", "sys.argv[2:3]") + show_help]
        done = subprocess.run([*command, OF_THE_CONSOLE, "skerry", *words], capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert "pip install 'skerry[console]'" in done.stderr


@pytest.mark.parametrize("heavy", ["torch", "grpc", "numba", "numpy", "skerry_syncer"])
def test_the_version_is_shown_without_importing(heavy: str) -> None:
    script = "import sys, skerry.cli.main as m\ntry: m.main(['--version'])\nexcept SystemExit: pass\n"
    script += f"sys.exit({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("skerry ")
    assert done.returncode == 0, f"{heavy} was imported"
