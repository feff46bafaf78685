"""The GPU's benchmark on the CPU, at toy sizes: every part runs to its end, and a part that takes too long is ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.command import PARTS, command, run_part
from benchmarks.gpu.part_run import PartRun

pytestmark = pytest.mark.long


def _rows(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.e2e
@pytest.mark.alone  # each part has its time
@pytest.mark.timeout(600)
def test_all_parts_run_at_toy_sizes_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--quick", "--device", "cpu", "--minutes", "9", "--results", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        command.main(arguments, standalone_mode=False)
    rows = _rows(tmp_path)
    assert [row["part"] for row in rows if "end" in row] == list(PARTS)
    assert {row["end"] for row in rows if "end" in row} == {"done"}, rows
    assert ended.value.code == 0
    assert rows[0]["part"] == "machine"
    assert {row["part"] for row in rows if row.get("metric")} == set(PARTS)
    arms = {row["case"] for row in rows if row.get("metric") == "held-out loss"}
    assert len(arms) == 8  # four arms in a short and in a long round


def test_parts_for_which_no_time_is_left_are_skipped_with_a_row(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", "cpu", "--minutes", "0", "--results", str(tmp_path)], standalone_mode=False)
    assert ended.value.code == 1
    assert [(row["part"], row["end"]) for row in _rows(tmp_path)[1:]] == [(part, "skipped") for part in PARTS]


def test_a_part_that_overruns_is_cut_off_and_its_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    start_s = time.monotonic()
    run = PartRun("cpu", is_quick=False, end_s=start_s + 15, data=None)  # encoding of 100M values takes longer
    assert run_part("encoding", run, path, str(tmp_path)) == "cut off"
    assert time.monotonic() - start_s < 30
    assert [json.loads(line)["part"] for line in path.read_text().splitlines()].count("encoding") >= 1
