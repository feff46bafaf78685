"""Installs a wheel into a fresh environment of the Python that runs this, and trains with it; needs nothing else.

    python3.13 .ci/try_wheel.py dist/skerry-0.1.0-py3-none-any.whl

It imports every module of the wheel, starts `skerry serve`, and has a learner of arrays merge a version. The tree is
not on the path. pip's own variables (PIP_CONSTRAINT, PIP_INDEX_URL) apply. The environment stays in build/wheel-VERSION
of the tree until the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "console,gcs,otel"  # all but the trainers', which are large
_START_S = 60.0
_EXAMPLE_S = 180.0

_IMPORT = """
import importlib, pkgutil, sys
trainers = {"torch", "transformers", "lightning", "peft", "jax", "accelerate"}
packages = ("skerry", "skerry_syncer", "skerry_learner", "skerry_console")
names, left_out = list(packages), 0
for name in names:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in trainers:
            raise
        left_out += 1
        continue
    assert str(module.__file__).startswith(sys.prefix), module.__file__
    found = pkgutil.iter_modules(getattr(module, "__path__", ()), name + ".")
    names += [item.name for item in found if not item.name.endswith("__main__")]
assert len(names) > 100 > 5 * left_out, (len(names), left_out)
print(f"imported {len(names) - left_out} modules; {left_out} more need a trainer")
"""


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel: Path = parser.parse_args().wheel.resolve()
    folder = ROOT / "build" / f"wheel-{sys.version_info[0]}.{sys.version_info[1]}"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder / "venv", with_pip=True, upgrade_deps=True, symlinks=True)
    programs = folder / "venv" / "bin"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SKERRY_"))}

    def run(*words: str | Path, timeout_s: float | None = None) -> str:
        return subprocess.run(
            words, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, check=True, timeout=timeout_s
        ).stdout

    install = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    run(*install, f"{wheel}[{EXTRAS}]")
    print(run(programs / "python", "-c", _IMPORT), end="")
    port_file = folder / "port"
    serve = (programs / "skerry", "serve", "--new-store", "--listen", "127.0.0.1:0", "--port-file", port_file)
    with subprocess.Popen(serve, cwd=folder, env=variables, stdout=subprocess.PIPE) as syncer:
        try:
            end_s = time.monotonic() + _START_S
            while not port_file.exists():
                if syncer.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"the syncer did not start. exit_status={syncer.poll()}")
                time.sleep(0.1)
            variables["SKERRY_TARGET"] = f"127.0.0.1:{port_file.read_text().strip()}"
            shutil.copyfile(ROOT / "examples" / "arrays.py", folder / "arrays.py")
            run(programs / "python", "arrays.py", "us", timeout_s=_EXAMPLE_S)
            shown = json.loads(run(programs / "skerry", "runs", "show", "arrays", "--json"))
        finally:
            syncer.terminate()
    newest = max(version["version"] for version in shown["run"]["versions"])
    print(f"Python {sys.version.split()[0]}: a learner of arrays reached version {newest}")
    return 0 if newest > 0 and syncer.returncode == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
