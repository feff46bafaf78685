"""Generates the committed stubs from the .proto files; `--check` says whether they are up to date.

python .ci/generate_stubs.py            write the stubs into client/skerry/v1
python .ci/generate_stubs.py --check    exit 1 if a committed stub is not what the .proto files give
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGE = ROOT / "client"
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate_stubs(target: Path) -> list[Path]:
    """Writes the stubs of every .proto below `target` and returns their paths."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("skerry/v1/*.proto"))
    tools = importlib.util.find_spec("grpc_tools")
    if tools is None or tools.origin is None:
        raise SystemExit("grpcio-tools is not installed. run `make protos`, which installs it")
    wellknown = Path(tools.origin).parent / "_proto"
    kinds = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet:"}
    outputs = [f"--{kind}_out={options}{target}" for kind, options in kinds.items()]
    # The plugins stand beside the interpreter, which need not be on the PATH (`make` calls .venv/bin/python).
    scripts = Path(sys.executable).parent
    if f"\ngrpcio-tools=={importlib.metadata.version('grpcio-tools')}\n" not in CONSTRAINTS.read_text(encoding="utf-8"):
        raise SystemExit("grpcio-tools is not of the version in constraints.txt. run `make protos`, which installs it")
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    arguments = ["protoc", f"-I{PROTOS}", f"-I{wellknown}", *plugins, *outputs, *sources]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; its message stands above")
    return sorted(path for path in target.glob("skerry/v1/*") if path.name.endswith(STUB_SUFFIXES))


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    is_check = parser.parse_args().check
    if not is_check:
        for path in generate_stubs(PACKAGE):
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        made = generate_stubs(Path(folder))
        stale = [
            path.name
            for path in made
            if not (PACKAGE / "skerry/v1" / path.name).exists()
            or not filecmp.cmp(path, PACKAGE / "skerry/v1" / path.name, shallow=False)
        ]
    if stale:
        print(f"stubs are out of date: {', '.join(stale)}. run `make protos` and commit", file=sys.stderr)
        return 1
    print(f"{len(made)} stubs are up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
