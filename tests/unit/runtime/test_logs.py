"""Logs are records of the standard `logging` module, and whoever runs the code decides what becomes of them."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from skerry.runtime.logs import get_logger, log_to_stderr

_LOG = get_logger("skerry.exchange.session")


def test_records_have_message_parts_and_the_place_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skerry.exchange")
    _LOG.info("joined 100 %s", run="gpt 2", of="50 %d")
    get_logger("skerry.store").info("not asked for")
    (record,) = caplog.records
    assert record.getMessage() == 'joined 100 %s run="gpt 2" of="50 %d"'
    assert (record.name, record.levelname, record.filename) == ("skerry.exchange.session", "INFO", "test_logs.py")
    assert record.funcName == "test_records_have_message_parts_and_the_place_of_the_call"
    assert vars(record)["event"] == "joined 100 %s"
    assert vars(record)["facts"] == {"run": "gpt 2", "of": "50 %d"}


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("", "skerry: joined run=fit\nloud count=2\n"),
        ("logging.basicConfig(level='INFO')", "INFO:skerry.x:joined run=fit\nWARNING:skerry.x:loud count=2\n"),
        ("logging.getLogger('skerry').setLevel('ERROR')", ""),
    ],
)
def test_by_default_warnings_are_shown_and_what_is_announced_once_unless_less_was_asked_for(
    setting: str, shown: str
) -> None:
    script = f"""
import logging
from skerry.runtime.logs import announce, get_logger
{setting}
log = get_logger("skerry.x")
announce(log, "joined", run="fit")
log.debug("quiet", count=1)
log.warning("loud", count=2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", shown)


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_gets_short_lines_without_secrets_and_in_colours_unless_it_wants_none(
    environment: dict[str, str],
) -> None:
    script = """
from skerry.runtime.logs import get_logger, log_to_stderr
log_to_stderr()
get_logger("skerry.x").info("listening", address="127.0.0.1:1", store="s3://key:hunter2@bucket")
"""
    leader, follower = pty.openpty()
    try:
        words = [sys.executable, "-c", script]
        subprocess.run(words, stderr=follower, env={**os.environ, "TERM": "xterm", **environment}, check=True)
        (line,) = os.read(leader, 10_000).decode().splitlines()
    finally:
        os.close(leader)
        os.close(follower)
    assert ("\x1b[" in line) is not bool(environment)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info\] listening address=127\.0\.0\.1:1 store=s3://\*\*\*@bucket", bare)


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
