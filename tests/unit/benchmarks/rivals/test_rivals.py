"""A synchronisation of rivals counts only if something was exchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals import turns
from benchmarks.rivals.__main__ import rows
from benchmarks.rivals.contenders import Contender, UnavailableError, python_of
from benchmarks.rivals.peers import model
from benchmarks.rivals.turns import Found, Visit, check


def _samples(*changes: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[dict[str, list[float]]]:
    return [{"sample": (model.STEP_SIZE * change).tolist()} for change in changes]


def test_learners_that_averaged_have_synchronised() -> None:
    one, two = np.random.default_rng(0).standard_normal((2, 1000))
    check(_samples(one, two), _samples((one + two) / 2, (one + two) / 2))


def test_learners_that_exchanged_nothing_are_no_result() -> None:
    one, two = np.random.default_rng(0).standard_normal((2, 1000))
    with pytest.raises(RuntimeError, match="did not synchronise"):
        check(_samples(one, two), _samples(one, two))
    with pytest.raises(RuntimeError, match="did not synchronise"):
        check(_samples(one, one), _samples(one, one))


def test_a_system_without_its_python_is_left_out_with_the_reason() -> None:
    with pytest.raises(UnavailableError, match=r"needs Python 2\.99"):
        python_of(Contender("none", "None", ("none",), ("2.99",)), lambda _: None)


class _Averaging(Contender):
    @property
    def module(self) -> str:
        return "tests.unit.benchmarks.rivals.averaging"


@pytest.mark.parametrize(("is_polling", "pause_count"), [(False, 2), (True, 1)])
def test_what_a_polling_system_does_after_a_synchronisation_is_not_counted(
    is_polling: bool, pause_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(turns, "wait_idle", pauses.append)  # this machine does other work and is never idle
    found = Found()
    visit = Visit(_Averaging("averaging", "", is_polling=is_polling), sys.executable, tmp_path / "visit")
    try:
        visit.begin()
        pauses.clear()
        visit.synchronise(found)
    finally:
        visit.end()
    assert len(pauses) == pause_count
    assert len(found.wall_s) == len(found.sent_bytes) == len(found.cpu_s) == 1


def test_the_limit_of_a_time_is_what_the_link_needs_for_the_bytes() -> None:
    found = {"skerry": Found([2.0], [125e6], [1.0]), "torchft": Found([4.0], [250e6], [1.0])}
    by_metric = {(row.case, row.metric.partition(" /")[0]): row for row in rows("1gbit", found)}
    assert by_metric["Skerry, 4 bits both ways", "full synchronisation"].ratio == 2.0
    against = by_metric["Skerry against torchft DiLoCo, float32", "full synchronisation"]
    assert (against.value, against.limit, against.ratio) == (2.0, 4.0, 0.5)
