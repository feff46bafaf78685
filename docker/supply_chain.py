"""Locks what images are made of, lists what the images and the wheel hold, and looks up known weaknesses.

    update   constraints.txt: the newest versions that fit together, on the oldest Python and Linux, and then `lock`
    lock     docker/requirements-*.txt, from pyproject.toml and constraints.txt: versions and hashes of every file
    sbom     build/sbom/*.cdx.json (CycloneDX), of the wheel and of each image
    audit    whether advisories name a locked package; exit status 1: some do, 2: the advisories were not reached

The make targets of these names call it, with the tools in a virtual environment of their own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
_LOCKS: Final = {name: f"docker/requirements-{name}.txt" for name in ("syncer", "console", "build")}
_CONSTRAINTS: Final = ROOT / "constraints.txt"
_HEADER: Final = """\
# What is installed into .venv and .venv-integrations, to the version; `make` passes it to pip. Nothing here is a
# dependency by itself. `make update` writes it; what it holds back, and why, is in pyproject.toml, under [tool.uv]."""
_SBOMS: Final = ROOT / "build/sbom"
# Prints what is installed in an image, which has no pip.
_INSTALLED: Final = (
    "import importlib.metadata as m; print(*sorted(f'{d.name}=={d.version}' for d in m.distributions()))"
)


def _tool(name: str, *words: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / name), *map(str, words)]
    return subprocess.run(command, input=text, cwd=ROOT, text=True, capture_output=True, check=False)


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def update() -> int:
    """Writes the newest versions that fit together, but for those that pyproject.toml holds back, and locks them."""
    words = ["--quiet", "--no-annotate", "--no-header", "--python-version", "3.11", "--python-platform", "linux"]
    words += ["--all-extras", "--group", "dev", "--group", "integrations"]
    made = _tool("uv", "pip", "compile", *words, "pyproject.toml")
    if made.returncode:
        sys.stderr.write(made.stderr)
        return made.returncode
    # A build of torch for GPUs demands exact versions of CUDA itself, and one for CPUs has none.
    pins = [line for line in made.stdout.splitlines() if not line.startswith(("cuda-", "nvidia-"))]
    _CONSTRAINTS.write_text("\n".join([_HEADER, *pins, ""]), encoding="utf-8")
    print(f"update: {_CONSTRAINTS.name}, {len(pins)} packages")
    return lock()


def lock() -> int:
    """Writes the files that the images are installed from."""
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build.in"
        build.write_text("\n".join(_pyproject()["build-system"]["requires"]), encoding="utf-8")
        project = ROOT / "pyproject.toml"
        syncer = ["--extra", "gcs", "--extra", "otel", project]
        for name, source in (("syncer", syncer), ("console", ["--extra", "console", *syncer]), ("build", [build])):
            words = ["--quiet", "--universal", "--generate-hashes", "--no-annotate", "--no-header"]
            words += ["--python-version", "3.11", "--constraint", "constraints.txt", "--output-file", _LOCKS[name]]
            made = _tool("uv", "pip", "compile", *words, *source)
            if made.returncode:
                sys.stderr.write(made.stderr)
                return made.returncode
            print(f"lock: {_LOCKS[name]}")
    return 0


def locked(name: str) -> list[str]:
    """Returns the requirements of a lock, `name==version` and markers, without hashes."""
    text = (ROOT / _LOCKS[name]).read_text(encoding="utf-8")
    return [line.removesuffix("\\").strip() for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]


def sbom() -> int:
    """Writes the lists; of an image that is not here it lists what is locked."""
    _SBOMS.mkdir(parents=True, exist_ok=True)
    made = [_describe("wheel", _pyproject()["project"]["dependencies"])]
    for image, otherwise in (("syncer", locked("syncer")), ("console", locked("console")), ("learner", [])):
        installed = _in_image(f"skerry-{image}")
        if installed is None:
            what = f"listed as locked in {_LOCKS[image]}" if otherwise else "not listed"
            print(f"sbom: there is no image skerry-{image} here; {what}")
        if installed or otherwise:
            made.append(_describe(image, installed or otherwise))
    return max(made)


def _in_image(image: str) -> list[str] | None:
    if shutil.which("docker") is None:
        return None
    words = ("docker", "run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", _INSTALLED)
    asked = subprocess.run(words, text=True, capture_output=True, check=False)
    return None if asked.returncode else asked.stdout.split()


def _describe(name: str, requirements: Iterable[str]) -> int:
    out = _SBOMS / f"{name}.cdx.json"
    words = ("--pyproject", "pyproject.toml", "--mc-type", "library" if name == "wheel" else "application")
    wanted = [requirement for requirement in requirements if not requirement.startswith("skerry==")]
    made = _tool(
        "cyclonedx-py", "requirements", *words, "--output-reproducible", "-o", out, "-", text="\n".join(wanted)
    )
    if made.returncode:
        sys.stderr.write(made.stderr)
    else:
        print(f"sbom: {out.relative_to(ROOT)}, {len(wanted)} packages")
    return made.returncode


def audit() -> int:
    """Looks every locked package up; one that could not be looked up is told apart from one that is sound."""
    words = ("--require-hashes", "--disable-pip", "--progress-spinner=off", "--format=json")
    asked = _tool("pip-audit", *words, *(word for path in _LOCKS.values() for word in ("--requirement", path)))
    try:
        packages = json.loads(asked.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"audit: the advisories were not reached, so nothing is known. {asked.stderr.strip()[-300:]}")
        return 2
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    weak = [(package, advisory) for package in packages for advisory in package.get("vulns", ())]
    for package, advisory in weak:
        fixes = ", ".join(advisory["fix_versions"])
        print(f"audit: {package['name']} {package['version']}: {advisory['id']}, mended in {fixes}")
    print(f"audit: {len(packages)} packages, {len(weak)} advisories")
    if unknown:
        print(f"audit: the advisories were not reached for {len(unknown)} packages, so nothing is known of them")
    return 1 if weak else 2 if unknown else 0


_COMMANDS: Final[dict[str, Callable[[], int]]] = {"update": update, "lock": lock, "sbom": sbom, "audit": audit}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in _COMMANDS:
        sys.exit(f"usage: python docker/supply_chain.py {'|'.join(_COMMANDS)}")
    sys.exit(_COMMANDS[sys.argv[1]]())
