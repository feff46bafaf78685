"""The metrics file: whole lines, appended, readable while it is written."""

from __future__ import annotations

import json
from pathlib import Path

from skerry_learner.metrics import MetricsFile


def test_every_process_appends_whole_lines_that_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt in (0, 1):
        with MetricsFile(path) as metrics:
            assert metrics.attempt == attempt
            metrics.write({"attempt": metrics.attempt, "step": 1})
            assert json.loads(path.read_bytes().splitlines()[-1]) == {"attempt": attempt, "step": 1}
    assert len(path.read_bytes().splitlines()) == 2


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for torn in (b'{"attempt":0', b'{"attempt":0}\n{"learner":"a","att'):
        path.write_bytes(torn)
        with MetricsFile(path) as metrics:
            assert path.read_bytes() == torn[: torn.rfind(b"\n") + 1]
            assert metrics.attempt == torn.count(b"\n")


def test_a_loss_that_diverged_is_null_since_json_has_no_word_for_it(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"loss": float("nan"), "val_loss": float("inf"), "step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss":null,"val_loss":null,"step":1}\n'
