"""Azurite, Microsoft's emulator of Azure's blob storage, from npm; it keeps everything in memory, and forgets it.

Unlike Azure, it answers a range behind the end of an object with nothing instead of status 416. Unless told otherwise
it reports its use to its makers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.machine import BUILD, SYSTEM_PATH, CommandError, installing, need_programs, run, tail, wait_until
from tests.support.ports import free_ports

AZURITE: Final = (pytest.mark.e2e, pytest.mark.timeout(900))  # of a test that may have to install it
PACKAGES: Final = {"node": "nodejs", "npm": "npm"}
_VERSION: Final = "3.37.0"
_FOLDER: Final = BUILD / f"azurite-{_VERSION}"
_PROGRAM: Final = _FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
# Known to everyone, and to obstore.
_ACCOUNT: Final = "devstoreaccount1"
_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def need_azurite() -> None:
    """Installs it, or skips the test."""
    need_programs(PACKAGES)
    with installing():
        if _PROGRAM.exists():
            return
        _FOLDER.mkdir(parents=True, exist_ok=True)
        words = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(_FOLDER), f"azurite@{_VERSION}"]
        try:
            run(words, timeout_s=400)
        except CommandError as error:
            pytest.skip(f"npm can't install Azurite: {error}")


@dataclass
class Azurite:
    """A running emulator."""

    port: int
    log: Path
    _process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path) -> Azurite:
        """Returns one that answers, some seconds later."""
        (port,) = free_ports(1)
        log = folder / "azurite.log"
        options = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "node", _PROGRAM, *options, "--silent"],
                env={**os.environ, "PATH": SYSTEM_PATH},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        azurite = cls(port, log, process)
        try:
            wait_until(azurite._answers, what="Azurite answers", timeout_s=60)
        except AssertionError as error:
            azurite.stop()
            raise AssertionError(f"{error}\n{tail(log)}") from None
        return azurite

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def env(self, port: int | None = None) -> dict[str, str]:
        """What leads obstore to it, by this port if it is behind another."""
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def create_container(self, name: str) -> None:
        """Creates a container, for which obstore has no call."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = ["PUT", *[""] * 11, *(f"{header}:{headers[header]}" for header in sorted(headers))]
        signed = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"])
        signature = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}"
        url = f"http://127.0.0.1:{self.port}/{_ACCOUNT}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10):
            pass

    def _answers(self) -> bool:
        assert self._process.poll() is None, "Azurite ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}", timeout=5)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
