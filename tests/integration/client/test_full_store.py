"""A store that takes nothing any more: who trains hears of it, and so does who watches."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from skerry import ArrayLearner, RunsClient
from skerry.cli import failures
from skerry.cli.main import cli
from skerry.exchange import loop as exchange
from tests.support.heard_logs import heard_logs
from tests.support.quadratic import QUICK, Quadratic, train_until
from tests.support.small_disk import fill, small_disk
from tests.support.syncer_thread import syncer


def test_a_full_store_shows_in_stats_logs_and_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange, "_REMINDER_S", 0.2)
    problem = Quadratic()
    with (
        small_disk(tmp_path / "disk") as disk,
        syncer(store_url=f"file://{disk}/store") as target,
        RunsClient(target) as client,
        heard_logs() as logs,
    ):
        learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)
        train_until([(problem, learner)], lambda: learner.stats.deltas_acknowledged > 3)
        before = learner.stats.problem
        fill(disk)

        def is_seen() -> bool:
            report = client.get_run("fit").learners[0].report
            return report is not None and report.problem == "STORE_FULL" and report.unsent_step_count > 16

        train_until([(problem, learner)], is_seen)
        assert learner.stats.problem is not None
        assert learner.stats.problem.reason == "STORE_FULL"
        train_until([(problem, learner)], lambda: any(_is_reminder(line) for line in logs))
        assert failures.run(cli, ["watch", "fit", "--once", "--target", target]) == 0
        learner.close()
    assert "STORE_FULL" in capsys.readouterr().out
    assert [line["reason"] for line in logs if "will be tried again" in line["event"]] == ["STORE_FULL"]
    reminder = next(line for line in logs if _is_reminder(line))
    assert before is None
    assert reminder["log_level"] == "error"
    assert reminder["unsent_steps"] >= 4 * QUICK.inner_step_count


def _is_reminder(line: MutableMapping[str, Any]) -> bool:
    return "takes none of this learner's work" in line["event"] and line["reason"] == "STORE_FULL"
