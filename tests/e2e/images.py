"""The images under test, built without a network: on a stand-in for the base, with packages from wheels.

The stand-in is Debian's own Python in Debian's smallest system, under the name that the Dockerfile asks for; made once
and kept in build/e2e.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.engine import Engine
from tests.e2e.machine import BUILD, ROOT, CommandError, need_programs, run

BASE: Final = "python:3.11-slim"
WITH_WHEELS: Final = "skerry-e2e-build"
_PYTHON = (3, 11)

_WITH_WHEELS_DOCKERFILE = f"""\
FROM {BASE}
COPY wheels /wheels
RUN printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
"""


def provide_base(engine: Engine) -> None:
    """Gives the engine the base image, or skips the test where Debian's mirror is not reached."""
    need_programs({"mmdebstrap": "mmdebstrap"})
    kept = BUILD / "base-root.tar"
    if not kept.exists():
        partial = BUILD / "base-root.partial.tar"
        packages = "--include=python3,python3-venv"
        try:
            run(
                ["mmdebstrap", "--variant=minbase", "--dpkgopt=force-unsafe-io", packages, "bookworm", partial],
                timeout_s=600,
            )
        except CommandError as error:
            pytest.skip(f"Debian's mirror gives no base image: {error}")
        partial.rename(kept)
    engine.docker("import", kept, BASE, timeout_s=120)


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
                    "--constraint", ROOT / "constraints.txt", f"{ROOT}[torch,console,gcs,otel]", "hatchling>=1.27",
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
