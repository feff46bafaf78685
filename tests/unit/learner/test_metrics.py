"""The metrics file: whole lines, appended, readable while it is written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from skerry_learner.metrics import MetricsLine, MetricsWriter, read_metrics


def _line(step: int) -> MetricsLine:
    return MetricsLine(
        learner="a",
        attempt=0,
        time_s=1.5,
        unix_s=2.5,
        step=step,
        tokens=10 * step,
        loss=3.0,
        learning_rate=1e-3,
        step_time_ms=12.0,
        versions={"body": step},
    )


def test_what_is_written_is_read_back_at_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "deep" / "metrics.jsonl") as writer:
        writer.write(_line(1))
        assert list(read_metrics(tmp_path / "deep" / "metrics.jsonl")) == [_line(1)]


def test_a_second_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with MetricsWriter(path) as writer:
            writer.write(_line(step))
    assert [line.step for line in read_metrics(path)] == [1, 2]


def test_a_line_torn_by_a_kill_is_passed_over_and_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(_line(1))
    with path.open("ab") as file:
        file.write(b'{"learner":"a","att')
    assert [line.step for line in read_metrics(path)] == [1]
    with MetricsWriter(path) as writer:
        writer.write(_line(2))
    assert [line.step for line in read_metrics(path)] == [1, 2]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "absent.jsonl")) == []


@pytest.mark.parametrize("text", ['{"learner":"a"}', '{"loss":1}', "{"])
def test_what_is_no_metrics_line_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=r"metrics line|Expecting"):
        list(read_metrics(tmp_path / "metrics.jsonl"))


def test_a_loss_that_diverged_is_null_since_json_has_no_word_for_it(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(replace(_line(1), loss=float("nan"), val_loss=float("inf")))
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"loss":null' in text
    assert '"val_loss":null' in text
    assert math.isnan(next(read_metrics(tmp_path / "metrics.jsonl")).loss)
