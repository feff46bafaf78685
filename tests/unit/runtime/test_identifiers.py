"""Ids that are made here."""

from __future__ import annotations

import re
import socket

import pytest

from skerry.runtime.identifiers import new_learner_id
from skerry.wire.layout import check_name


@pytest.mark.parametrize(
    ("host", "prefix"),
    [("Node_7.example", "node_7.example"), ("x" * 60, "x" * 48), ("-Kö's Mac-", "k-s-mac"), ("ß", "learner")],
)
def test_a_learner_without_an_id_is_called_after_its_host_and_differs_from_others(
    host: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    first, second = new_learner_id(), new_learner_id()
    assert first != second
    assert re.fullmatch(rf"{re.escape(prefix)}-[0-9a-f]{{6}}", first)
    check_name(first, "learner")
