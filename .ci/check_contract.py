"""Lints the .proto files with buf.

buf comes from npm into build/node. Where npm is absent or can't fetch it, the check is skipped, and the output says so
and why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
NODE = ROOT / "build" / "node"
BUF_PACKAGE = "@bufbuild/buf@1.75.0"  # pinned: a newer linter with new rules should arrive as a change of its own
INSTALL_TIMEOUT_S = 120.0  # where the network swallows packets, npm alone would try for many minutes


class SkippedError(Exception):
    """The check can't run on this machine; the message says why."""


def install_buf() -> Path:
    """Returns buf's path, installing it from npm when it is not there.

    Raises:
        SkippedError: npm is absent or can't fetch it.
    """
    buf = NODE / "node_modules" / ".bin" / "buf"
    version = BUF_PACKAGE.rpartition("@")[2]
    if buf.exists() and run(buf, "--version", folder=ROOT).stdout.strip() == version:
        return buf
    npm = shutil.which("npm")
    if npm is None:
        raise SkippedError("npm is not installed")
    NODE.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        npm,
        "install",
        "--prefix",
        NODE,
        "--no-save",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        BUF_PACKAGE,
    ]
    try:
        done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SkippedError(f"npm did not answer within {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0 or not buf.exists():
        reasons = [line for line in done.stderr.splitlines() if line.startswith(("npm error", "npm ERR"))]
        raise SkippedError(f"npm can't install {BUF_PACKAGE}: {'; '.join(reasons[:3]) or 'it gave no reason'}")
    return buf


def run(program: Path | str, *arguments: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and returns what it printed."""
    return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def main() -> int:
    """Runs the command line and returns its exit status."""
    try:
        buf = install_buf()
    except SkippedError as reason:
        print(f"buf lint: skipped: {reason}")
        return 0
    linted = run(buf, "lint", folder=PROTOS)
    print(linted.stdout + linted.stderr, end="", file=sys.stdout if linted.returncode == 0 else sys.stderr)
    print(f"buf lint: {'clean' if linted.returncode == 0 else 'failed'}")
    return linted.returncode


if __name__ == "__main__":
    raise SystemExit(main())
