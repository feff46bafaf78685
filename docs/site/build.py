"""Builds the documents as a site: `make docs`. Every link, and every heading that a link names, must be there.

The Markdown files of the tree are copied into one folder, where they lie to each other as in the tree, with the files
that they link to. A link to a folder becomes text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
SOURCE = SITE / "source"
SETTINGS = Path(__file__).with_name("mkdocs.yml")
_PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "protos/*.md",
    "services/**/*.md",
    "docker/*.md",
    "tests/simulation/*.md",
    "benchmarks/**/*.md",
)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)|!\[[^\]]*\]\(([^):]+)\)")
# What a page fetches from elsewhere when it is read; links to follow are no such thing.
_FETCHED = re.compile(r"""<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="(?:stylesheet|icon|preconnect)"[^>]+"""
                      r"""href="https?:|@import|url\(["']?https?:""")  # fmt: skip


def copy_documents() -> None:
    """Fills SOURCE anew."""
    shutil.rmtree(SITE, ignore_errors=True)
    for pattern in _PATTERNS:
        for path in ROOT.glob(pattern):
            _copy(path, _with_files(path))
    commands = [sys.executable, Path(__file__).with_name("commands.py")]
    page = subprocess.run(commands, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    _copy(ROOT / "docs" / "reference" / "commands.md", page)


def _with_files(document: Path) -> str:
    """Returns a document's text, after copying the files that it links to."""

    def linked(link: re.Match[str]) -> str:
        text, target, _, image = link.groups()
        path = Path(os.path.normpath(document.parent / (target or image)))
        if path.is_dir():
            return str(text)
        if path.is_file() and path.suffix != ".md":
            _copy(path)
        return link[0]

    return _LINK.sub(linked, document.read_text(encoding="utf-8"))


def _copy(path: Path, text: str | None = None) -> None:
    target = SOURCE / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        shutil.copyfile(path, target)
    else:
        target.write_text(text, encoding="utf-8")


def fetched() -> list[str]:
    """Returns what the built pages would fetch from elsewhere."""
    pages = [path for ending in ("html", "css") for path in (SITE / "html").rglob(f"*.{ending}")]
    return [f"{page.name}: {found[0]}" for page in pages for found in _FETCHED.finditer(page.read_text("utf-8"))]


def main() -> int:
    """Returns the exit status."""
    copy_documents()
    # Not --quiet: --strict would count no warnings. The variable is about versions of mkdocs that are not used here.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", SETTINGS]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    if built.returncode:
        print(*(line for line in built.stderr.splitlines() if not line.startswith("INFO")), sep="\n")
    if built.returncode == 0 and (found := fetched()):
        print("the site fetches from elsewhere:", *found, sep="\n")
        return 1
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
