"""`skerry serve` as a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from tests.e2e.machine import tail
from tests.support.ports import free_ports

# SIGUSR1 keeps the main thread, and so the event loop, from going on; gRPC's own threads still answer pings.
_SERVE: Final = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
from skerry.cli.main import main
sys.exit(main())
"""


class ServeProcess:
    """One `skerry serve` on one store; started again on the port that it had."""

    def __init__(self, store_url: str, folder: Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        self.store_url = store_url
        self.host = host
        self.port = free_ports(1, host)[0] if port is None else port
        self._log_path = folder / "serve.log"
        self._log = self._log_path.open("ab")
        self._process: asyncio.subprocess.Process | None = None
        self.first_line = ""

    async def start(self, *options: str) -> None:
        """Returns when the process listens."""
        arguments = ["--new-store", "--listen", f"{self.host}:{self.port}", "--store", self.store_url]
        arguments += ["--drain-grace", "10", *options]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _SERVE,
            "serve",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = self.first_line = (await self._process.stdout.readline()).decode()
        assert line.startswith(f"listening on {self.host}:"), line + tail(self._log_path)
        self.port = int(line.split()[2].rstrip(",").rpartition(":")[2])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def peak_mib(self) -> float:
        """Returns the most memory that the process ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 2**10

    async def kill(self) -> None:
        """Kills the process with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    def stop_running(self) -> None:
        """Takes all time from the process."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Gives it time again."""
        os.kill(self.pid, signal.SIGCONT)

    def block_loop(self) -> None:
        """Has its event loop stand still until it is killed."""
        os.kill(self.pid, signal.SIGUSR1)

    def terminate(self) -> None:
        """Sends SIGTERM, which drains the syncer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    async def exit_status(self) -> int:
        """Waits for the process to end and returns its exit status."""
        assert self._process is not None
        async with asyncio.timeout(20):
            return await self._process.wait()

    async def stop(self) -> None:
        """Ends the process if it still runs."""
        if self._process is not None and self._process.returncode is None:
            await self.kill()
        self._log.close()


@contextlib.asynccontextmanager
async def serve_process(store_url: str, folder: Path, *options: str) -> AsyncIterator[ServeProcess]:
    """Yields a started process, and ends it at the end of the context."""
    process = ServeProcess(store_url, folder)
    try:
        await process.start(*options)
        yield process
    finally:
        await process.stop()
