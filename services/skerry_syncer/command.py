"""`skerry serve`: one syncer process on the command line."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from skerry.net.tls import Tls, is_loopback
from skerry.net.tls_options import PEM_FILE, checked
from skerry.runtime.addresses import server_address
from skerry.runtime.clock import SystemClock
from skerry.runtime.files import replacing
from skerry.runtime.logs import get_logger, log_to_stderr
from skerry.runtime.options import ADDRESS, OUTPUT_FILE, OUTPUT_FOLDER, Count, Number
from skerry.runtime.otlp import otlp_settings
from skerry.runtime.redaction import redacted
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.server import ServerSettings, SyncerServer, serving
from skerry_syncer.store.errors import StoreRefusedError, StoreURLError
from skerry_syncer.store.maintenance.options import STORE
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects

_LOG: Final = get_logger(__name__)
# How long a worker thread that runs Python keeps the event loop waiting. With Python's default of 5 ms, drafts of
# 60,000 tensors reduced other learners from 26 merges a second to 1.6.
_SWITCH_INTERVAL_S: Final = 2e-4
_LEVELS: Final = ("debug", "info", "warning", "error")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)  # that shut a syncer down
_EPILOG: Final = """\b
Examples:
  skerry serve --new-store                           a syncer on this machine, with a new store in ./skerry-data
  skerry serve                                       the same from the second start on
  skerry serve --store s3://bucket/skerry            one of several syncers with the same bucket
  skerry serve --listen 127.0.0.1:0 --port-file p    listen on a free port and write its number to the file p
  skerry serve --listen 0.0.0.0:50051 --tls-cert keys/a.example.pem --tls-key keys/a.example.key \\
      --tls-client-ca keys/ca.pem                    for other machines, with mutual TLS

The files in keys/ are made by `skerry keys keys --server a.example`.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--listen",
    type=ADDRESS,
    default="127.0.0.1:50051",
    metavar="HOST:PORT",
    help="Address to listen on. Port 0 picks a free port.",
)
@click.option(
    "--socket",
    type=OUTPUT_FILE,
    help="For a program that starts a syncer of its own: listen on this Unix socket and not on --listen, ignore "
    "SIGTERM and SIGINT, and shut down when standard input ends, as it does when that program ends in any way.  "
    "[default: none]",
)
@click.option(
    "--store",
    "store_url",
    type=STORE,
    default="file://./skerry-data",
    metavar="URL",
    help="Object store for all state: file://folder, a bucket (s3://, gs:// or az://bucket/prefix) or memory://.",
)
@click.option(
    "--new-store",
    is_flag=True,
    help="Begin a store if the folder has none, as at the first start. Without it, serve refuses a folder without a "
    "store, because the store may be on a volume that is not mounted.",
)
@click.option(
    "--metrics",
    type=ADDRESS,
    metavar="HOST:PORT",
    help="Address on which Prometheus finds metrics, for example 127.0.0.1:9464. They have no TLS: whoever reaches it "
    "can read the names of runs, and counts.  [default: none]",
)
@click.option(
    "--port-file",
    type=OUTPUT_FILE,
    help="File to write the port number to.",
)
@click.option(
    "--scratch",
    type=OUTPUT_FOLDER,
    help="Folder for caches of model fragments beyond a quarter of the memory, best on a local disk.  "
    "[default: the system's temporary folder]",
)
@click.option("--workers", type=Count(1, 256), help="Worker threads.  [default: one a core, at least 2]")
@click.option("--drain-grace", type=Number(0, 3600), default=20.0, help="Seconds that a shutdown may take.")
@click.option("--tls-cert", type=PEM_FILE, help="Serve with TLS, and present this certificate (PEM).")
@click.option("--tls-key", type=PEM_FILE, help="The private key of --tls-cert.")
@click.option(
    "--tls-client-ca",
    type=PEM_FILE,
    help="Mutual TLS: accept only clients with a certificate of this authority, which says their role.",
)
@click.option(
    "--deny",
    type=PEM_FILE,
    help="Refuse clients though their certificates are valid: a file of skerry:// URIs, which is read as it changes.",
)
@click.option("--no-open-health", is_flag=True, help="Answer health checks only to clients with an identity.")
@click.option("--no-reflection", is_flag=True, help="Do not describe the services to tools such as grpcurl.")
@click.option("--insecure", is_flag=True, help="Allow plaintext on non-loopback addresses.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", help="Least severe level to log.")
def serve(
    *,
    listen: str,
    socket: Path | None,
    store_url: str,
    new_store: bool,
    metrics: str | None,
    port_file: Path | None,
    scratch: Path | None,
    workers: int | None,
    drain_grace: float,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    deny: Path | None,
    no_open_health: bool,
    no_reflection: bool,
    insecure: bool,
    log_level: str,
) -> None:
    """Run a syncer.

    A syncer keeps all state in the store, so any number of them may serve one store, and each may be killed at any
    moment. SIGTERM or SIGINT shuts it down after the calls in flight have ended; a second signal stops it at once.
    """
    if socket is not None:
        _end_with_stdin(socket, 2 * drain_grace)
    tls = _tls(Tls(tls_client_ca, tls_cert, tls_key))
    if (deny or no_open_health) and tls_client_ca is None:
        raise click.UsageError("without --tls-client-ca no client has an identity")
    host = server_address(listen).host
    if tls is None and not insecure and socket is None and not is_loopback(host):
        raise click.UsageError(
            f"traffic on {host} would not be encrypted: anyone on the network could read and change it. Make keys with "
            "`skerry keys DIR --server HOST` and pass --tls-cert, --tls-key and --tls-client-ca, or listen on "
            "127.0.0.1, or pass --insecure if you trust every machine on the network."
        )
    log_to_stderr(log_level)
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    try:
        objects = open_objects(store_url, new=new_store, reserve=True)
    except StoreURLError as error:
        raise click.BadParameter(str(error), param_hint="--store") from error
    settings = ServerSettings(
        listen=listen if socket is None else f"unix:{socket}",
        tls=tls,
        deny_list=_deny_list(deny),
        has_open_health=not no_open_health,
        has_reflection=not no_reflection,
        metrics=metrics,
        otlp=otlp_settings(os.environ),
        drain_grace_s=drain_grace,
        worker_count=workers or max(2, os.cpu_count() or 2),
        scratch_directory=scratch or Path(tempfile.gettempdir()),
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with suppress(OSError, ValueError):  # a learner has several connections, and many shells allow 1024 files
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        asyncio.run(_serve(objects, settings, store_url, port_file, is_own=socket is not None))
    except (StoreRefusedError, StoreURLError) as error:
        raise click.BadParameter(str(error), param_hint="--store") from error
    except OSError as error:  # both addresses are one, or another process was faster
        raise click.ClickException(f"can't listen on an address. because={error}") from error


def _end_with_stdin(socket: Path, patience_s: float) -> None:
    """Has SIGHUP come when standard input ends, and has the process end `patience_s` later at the latest.

    Other signals may be meant for a whole job, whose learner still has work to send. The socket is removed with its
    folder, which whoever made it may not have lived to do.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has children ignore it

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 2**10):
            pass
        nobody = os.open(os.devnull, os.O_WRONLY)  # reads what is written from now on
        for output in (sys.stdout, sys.stderr):
            os.dup2(nobody, output.fileno())
        with suppress(OSError):
            socket.unlink(missing_ok=True)
            socket.parent.rmdir()
        os.kill(os.getpid(), signal.SIGHUP)
        threading.Event().wait(patience_s)
        os._exit(1)

    threading.Thread(target=wait, name="skerry-stdin", daemon=True).start()


def _tls(files: Tls) -> Tls | None:
    if files == Tls():
        return None
    if files.cert is None and files.key is None:
        raise click.UsageError("--tls-client-ca needs the server's own certificate: --tls-cert and --tls-key")
    if not checked(files).is_for_server():
        raise click.UsageError(
            f"--tls-cert is a client's certificate, which no client would take for a server's: give the server's own, "
            f"as `skerry keys DIR --server HOST` makes it. cert={files.cert}"
        )
    return files


def _deny_list(path: Path | None) -> DenyList | None:
    try:
        return None if path is None else DenyList(path, SystemClock())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--deny") from error


async def _serve(
    objects: Objects,
    settings: ServerSettings,
    store_url: str,
    port_file: Path | None,
    *,
    is_own: bool,
) -> None:
    loop, is_told = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGHUP,) if is_own else _SIGNALS
    async with serving(objects, settings) as server:  # until it listens, a signal ends the process
        for number in signals:
            loop.add_signal_handler(number, is_told.set)
        _announce(settings.listen, server, store_url, port_file)
        await is_told.wait()
        for number in signals:
            loop.remove_signal_handler(number)  # a second one ends the process
        if is_own:  # its only clients are gone, though forked children of theirs may keep connections open
            await server.host.drain(settings.drain_grace_s)
        else:
            await server.drain(settings.drain_grace_s)


def _announce(listen: str, server: SyncerServer, store_url: str, port_file: Path | None) -> None:
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{server.port}"
    click.echo(f"listening on {address}, store {redacted(store_url)}")
    if server.metrics_url:
        click.echo(f"metrics at {server.metrics_url}")
    sys.stdout.flush()
    if port_file is not None:
        with replacing(port_file) as file:
            file.write(f"{server.port}\n".encode())
    _LOG.info("listening", address=address, store=store_url)
