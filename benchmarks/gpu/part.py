"""One part in a process of its own: `python -m benchmarks.gpu.part NAME FILE SETTINGS`.

Each row is a line of JSON, which is in the file before the next one is measured. The status is 1 if something is not
equal that has to be.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.gpu.part_run import PartRun

_CLAIM: Final = "(1: yes)"  # ends the metric of a row that has to be 1


def main(part: str, path: Path, run: PartRun) -> int:
    """Writes the part's rows."""
    has_failed = False
    with path.open("a", encoding="utf-8") as file:
        for row in import_module(f"benchmarks.gpu.{part}").rows(run):
            has_failed |= row.metric.endswith(_CLAIM) and not row.value
            file.write(json.dumps({"part": part, **asdict(row)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
            ratio = "" if row.ratio is None else f" | {row.ratio:.4g} of {row.limit:.4g}"
            sys.stderr.write(f"{part} | {row.case} | {row.metric} | {row.value:.4g} {row.unit}{ratio}\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), PartRun(**json.loads(sys.argv[3]))))
