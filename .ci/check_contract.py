"""Lints the .proto files with buf, and refuses changes that would break a client of the contract as last committed.

    python .ci/check_contract.py                 against the contract before the change at hand
    python .ci/check_contract.py --against REV   against the contract at any commit

buf comes from npm into build/node. Where npm is absent or can't fetch it, the check is skipped, and the output says so
and why.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
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


def base_revision() -> str | None:
    """Returns the commit that holds the contract before the change at hand; None where there is none.

    That is the last commit while the .proto files are being edited, else the parent of the last commit.
    """
    if run("git", "rev-parse", "--verify", "--quiet", "HEAD", folder=ROOT).returncode != 0:
        return None
    is_edited = run("git", "diff", "--quiet", "HEAD", "--", "protos/*.proto", folder=ROOT).returncode != 0
    revision = "HEAD" if is_edited else "HEAD~1"
    found = run("git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", folder=ROOT)
    return found.stdout.strip() if found.returncode == 0 else None


def extract_contract(revision: str, target: Path) -> bool:
    """Writes the .proto files of a commit below `target`; returns False where it has none."""
    archive = subprocess.run(["git", "archive", revision, "--", "protos"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        return False
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        members = [member for member in tar.getmembers() if member.name.endswith(".proto")]
        tar.extractall(target, members=members, filter="data")
    return bool(members)


def check_breaking(buf: Path, revision: str | None) -> int:
    """Compares the contract with that of a commit and returns the exit status."""
    if revision is None:
        print("buf breaking: skipped: git has no earlier commit to compare with")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "protos"
        if not extract_contract(revision, Path(folder)):
            print(f"buf breaking: skipped: {revision[:12]} has no contract to compare with")
            return 0
        shutil.copy(PROTOS / "buf.yaml", base)
        done = run(buf, "breaking", "--against", base, folder=PROTOS)
    print(done.stdout + done.stderr, end="")
    print(f"buf breaking: {'nothing breaks' if done.returncode == 0 else 'the contract breaks'} since {revision[:12]}")
    return done.returncode


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="the commit to compare with")
    arguments = parser.parse_args()
    try:
        buf = install_buf()
    except SkippedError as reason:
        print(f"buf: skipped lint and breaking: {reason}")
        return 0
    linted = run(buf, "lint", folder=PROTOS)
    print(linted.stdout + linted.stderr, end="", file=sys.stdout if linted.returncode == 0 else sys.stderr)
    print(f"buf lint: {'clean' if linted.returncode == 0 else 'failed'}")
    return check_breaking(buf, arguments.against or base_revision()) or linted.returncode


if __name__ == "__main__":
    raise SystemExit(main())
