"""A learner's own id: what keeps it, and what does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from skerry.client.own_id import own_id

_WITH_A_CHILD = """
import os, signal, sys
from pathlib import Path
from skerry.client.own_id import own_id

name, lock = own_id(Path(sys.argv[1]))
if os.fork() == 0:
    print(name, os.getpid(), flush=True)
signal.pause()
"""


def test_an_id_is_free_once_its_process_was_killed_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        name, child = parent.stdout.readline().split()
        try:
            other, lock = own_id(tmp_path)
            lock.close()
            assert other != name  # while the parent lives
            parent.kill()
            parent.wait()
            again, lock = own_id(tmp_path)
            lock.close()
            assert again == name
        finally:
            os.kill(int(child), signal.SIGKILL)
