"""Logs are records of the standard `logging` module, and whoever runs the code decides what becomes of them."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from skerry.client import ArrayLearner
from skerry.runtime.logs import get_logger, log_to_stderr
from tests.client.quadratic import Quadratic

_LOG = get_logger("skerry.client.session")


def test_records_have_message_parts_and_the_place_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skerry.client")
    _LOG.info("joined the run", run="gpt 2", learners=3)
    get_logger("skerry.store").info("not asked for")
    (record,) = caplog.records
    assert record.getMessage() == 'joined the run run="gpt 2" learners=3'
    assert (record.name, record.levelname, record.filename) == ("skerry.client.session", "INFO", "test_logs.py")
    assert record.funcName == "test_records_have_message_parts_and_the_place_of_the_call"
    assert vars(record)["event"] == "joined the run"
    assert vars(record)["facts"] == {"run": "gpt 2", "learners": 3}


def test_a_percent_sign_is_text(caplog: pytest.LogCaptureFixture) -> None:
    _LOG.warning("used 100 %s", of="50 %d")
    assert caplog.messages == ['used 100 %s of="50 %d"']


def test_a_learner_logs_there(target: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skerry")
    ArrayLearner(Quadratic().arrays, target=target, run="fit", learner_id="us", create=True).close()
    assert {"skerry.client.creation", "skerry.client.attachment"} <= {record.name for record in caplog.records}


def test_unconfigured_only_warnings_are_shown_and_on_standard_error() -> None:
    script = """
import structlog, skerry.client
from skerry.runtime.logs import get_logger
assert not structlog.is_configured()
log = get_logger("skerry.client.x")
log.info("quiet", count=1)
log.warning("loud", count=2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "loud count=2\n")


def test_a_command_writes_one_line_an_event_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("debug")
    log_to_stderr("info")  # in place of the first
    _LOG.debug("not asked for")
    try:
        raise ValueError("s3://key:hunter2@bucket")
    except ValueError as error:
        _LOG.error("call failed", exc_info=error, because="s3://key:hunter2@bucket")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("timestamp=20")
    assert 'Z level=error event="call failed" because=s3://***@bucket exception="Traceback' in line
    assert "hunter2" not in line
