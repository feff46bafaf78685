"""The images under test, built without a network: the base from a registry or a stand-in, the packages from wheels.

The stand-in is Debian's own Python in Debian's smallest system, under the name that the Dockerfile asks for; made once
and kept in build/e2e.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.engine import Engine, EngineError
from tests.e2e.machine import BUILD, ROOT, CommandError, need_programs, run

BASE: Final = "python:3.11-slim"
WITH_WHEELS: Final = "skerry-e2e-build"
_PYTHON = (3, 11)

_WITH_WHEELS_DOCKERFILE = f"""\
FROM {BASE}
COPY wheels /wheels
RUN printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
"""


def provide_base(engine: Engine) -> str:
    """Gives the engine the base image, and returns where it came from, in words. Skips the test if nowhere."""
    kept = BUILD / "base-image.tar"
    if not kept.exists() and not _pull(kept):
        root_file_system = BUILD / "base-root.tar"
        if not root_file_system.exists():
            _bootstrap(root_file_system)
        engine.docker("import", root_file_system, BASE, timeout_s=120)
        return "a stand-in of Debian's packages, for no registry of images was reached"
    engine.docker("load", "--input", kept, timeout_s=120)
    return "a registry of images"


def provide_wheels(engine: Engine) -> Mapping[str, str]:
    """Gives the engine an image that pip can install from, and returns the variables that make the build use it."""
    if sys.version_info[:2] != _PYTHON:
        pytest.skip(f"wheels for {BASE} need Python {_PYTHON[0]}.{_PYTHON[1]} here. found={sys.version.split()[0]}")
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="wheels-") as name:
        context = Path(name)
        wheels = context / "wheels"
        try:
            run(
                [
                    sys.executable, "-m", "pip", "--quiet", "wheel", "--wheel-dir", wheels,
                    "--constraint", ROOT / "constraints.txt", f"{ROOT}[torch]", "hatchling>=1.27",
                ],
                timeout_s=400,
            )  # fmt: skip
        except CommandError as error:
            pytest.skip(f"pip finds no wheels for the images: {error}")
        # What is under test is built in the image, from source.
        for own in wheels.glob("skerry-*.whl"):
            own.unlink()
        (context / "Dockerfile").write_text(_WITH_WHEELS_DOCKERFILE, encoding="utf-8")
        engine.docker("build", "--quiet", "--network=none", "--tag", WITH_WHEELS, context, timeout_s=180)
    return {"BASE_IMAGE": BASE, "BUILD_IMAGE": WITH_WHEELS}


def _pull(kept: Path) -> bool:
    """Pulls the base image with an engine that sees the host's network and changes nothing of it."""
    puller = Engine(BUILD / "puller", has_networks=False)
    try:
        puller.start()
        puller.docker("pull", "--quiet", BASE, timeout_s=120)
        partial = kept.with_suffix(".partial")
        puller.docker("save", "--output", partial, BASE, timeout_s=120)
        partial.rename(kept)
    except (CommandError, EngineError):
        return False
    finally:
        puller.stop()
    return True


def _bootstrap(kept: Path) -> None:
    need_programs({"debootstrap": "debootstrap"})
    root = Path(tempfile.mkdtemp(dir=BUILD, prefix="base-"))
    try:
        try:
            run(
                ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", root],
                timeout_s=400,
            )
        except CommandError as error:
            pytest.skip(f"neither a registry of images nor Debian's mirror gives a base image: {error}")
        for unneeded in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / unneeded)
        partial = kept.with_suffix(".partial")
        subprocess.run(["tar", "--create", "--directory", root, "--file", partial, "."], check=True, timeout=120)
        partial.rename(kept)
    finally:
        shutil.rmtree(root, ignore_errors=True)
