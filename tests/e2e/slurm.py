"""Slurm on one machine: munged, a controller and one node, in a process namespace of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.e2e.machine import SYSTEM_PATH, CommandError, Namespace, run, tail, wait_until
from tests.support.ports import free_ports

PACKAGES: Final = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
_CONFIG: Final = """\
ClusterName=e2e
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# How long the controller waits until it starts a job again that it has requeued; two minutes otherwise.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running cluster of one node."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="skerry-slurm-"))
        self.folder.chmod(0o755)
        self._namespace = Namespace("sleep", "infinity")

    @property
    def env(self) -> dict[str, str]:
        """What makes Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Returns when the node takes jobs.

        Raises:
            AssertionError: it doesn't; the message holds the ends of the daemons' logs.
        """
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        controller_port, node_port = free_ports(2)
        host = socket.gethostname().partition(".")[0]
        config = _CONFIG.format(folder=self.folder, host=host, controller_port=controller_port, node_port=node_port)
        (self.folder / "slurm.conf").write_text(config, encoding="utf-8")
        try:
            self._daemon(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                f"--seed-file={self.folder}/munge.seed",
            )  # fmt: skip
            wait_until(self._munge_answers, what="munged listens", timeout_s=30)
            self._daemon("slurmctld", "-D")
            self._daemon("slurmd", "-D", "-N", socket.gethostname().partition(".")[0])
            wait_until(lambda: "idle" in self._state(), what="the node is idle", timeout_s=90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tails()}") from None

    def stop(self) -> None:
        """Ends every daemon and job at once, and removes what they wrote."""
        self._namespace.end()
        shutil.rmtree(self.folder)

    def submit(self, *words: str | Path, env: Mapping[str, str]) -> str:
        """Returns the number of a job that `sbatch` takes."""
        return run(["sbatch", "--parsable", *words], timeout_s=30, env={**env, **self.env}).strip()

    def control(self, *words: str) -> str:
        """Returns what `scontrol` printed."""
        return run(["scontrol", *words], timeout_s=30, env=self.env)

    def job(self, number: str) -> dict[str, str]:
        """Returns what the controller says of a job: JobState, Restarts."""
        words = self.control("show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log_tails(self) -> str:
        """Returns the ends of all logs."""
        return "\n".join(tail(path, lines=15) for path in sorted(self.folder.glob("*.log")))

    def _state(self) -> str:
        try:
            return run(["sinfo", "--noheader", "--format=%T"], timeout_s=15, env=self.env)
        except CommandError:
            return ""

    def _munge_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / "munge.socket")) == 0

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out.log").open("wb") as output:
            subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *self._namespace.inside(*words)],
                env={**os.environ, "PATH": SYSTEM_PATH, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
