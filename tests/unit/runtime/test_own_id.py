"""A learner's own id: what keeps it, and what does not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from skerry.runtime.own_id import own_id
from tests.support.heard_logs import heard_logs

_WITH_A_CHILD = """
import os, signal, sys
from pathlib import Path
from skerry.runtime.own_id import own_id

name, lock = own_id(Path(sys.argv[1]))
if os.fork() == 0:
    print(name, os.getpid(), flush=True)
signal.pause()
"""


def take(folder: Path) -> str:
    """Returns the id that a process which starts in the folder has."""
    name, lock = own_id(folder)
    assert lock is not None
    lock.close()
    return name


def test_an_id_is_free_once_its_process_was_killed_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        name, child = parent.stdout.readline().split()
        try:
            other = take(tmp_path)
            assert other != name  # while the parent lives
            parent.kill()
            parent.wait()
            assert take(tmp_path) == name
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_folder_that_was_copied_has_an_id_of_its_own(tmp_path: Path) -> None:
    names = [take(tmp_path / "here")]
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    names += [take(tmp_path / folder) for folder in ("there", "here", "there")]
    assert names[0] == names[2]
    assert names[1] == names[3] != names[0]


def test_a_folder_that_moved_to_another_host_has_another_id(tmp_path: Path) -> None:
    name = take(tmp_path)
    with patch.object(socket, "gethostname", lambda: "elsewhere"):
        assert take(tmp_path).startswith("elsewhere-")
    (tmp_path / ".learner-id-1").write_bytes(b"\xff\xfe no id")
    assert take(tmp_path) not in {name, ""}


def _cannot_be_made(folder: Path) -> AbstractContextManager[object]:
    folder.write_text("a file")
    return nullcontext()


def _has_no_locks(_: Path) -> AbstractContextManager[object]:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    return patch.object(fcntl, "flock", flock)


@pytest.mark.parametrize("break_folder", [_cannot_be_made, _has_no_locks])
def test_a_folder_that_can_keep_no_id_costs_only_the_same_id_at_the_next_start(
    break_folder: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    with break_folder(tmp_path / "kept"), heard_logs() as logs:
        first, second = own_id(tmp_path / "kept"), own_id(tmp_path / "kept")
    assert first[0] != second[0]
    assert first[1] is second[1] is None
    assert [entry["folder"] for entry in logs] == [str(tmp_path / "kept")] * 2
