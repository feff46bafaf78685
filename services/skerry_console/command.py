"""`skerry console` and `skerry report`: a run in a browser, live or as one file."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click

from skerry import RunsClient, Tls
from skerry.cli.connection import with_run
from skerry.cli.console import size_text
from skerry.net.tls import Insecure, is_loopback
from skerry.net.tls_options import PEM_FILE, checked, with_target
from skerry.runtime.addresses import server_address
from skerry.runtime.files import replacing
from skerry.runtime.logs import log_to_stderr
from skerry.runtime.options import ADDRESS, OUTPUT_FILE, Number, Parsed

_PAST_S: Final = 86400.0  # longer than any log takes to be told


def _price(text: str) -> tuple[str, float]:
    name, _, price = text.partition("=")
    if not name or not price:
        raise ValueError("write NAME=PRICE, for example us=98")
    if not 0 <= (hourly := float(price)) < math.inf:
        raise ValueError("a price is a number from 0 on")
    return name, hourly


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write the URL of an HTTP server, for example https://hooks.example/T0/B0")
    return text


_prices = click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=PRICE",
    type=Parsed("price", _price),
    help="What an hour of a learner, or of each learner of a region, costs; repeated for each.",
)


@click.command(
    epilog="""\b
Examples:
  skerry console                                         the runs of a syncer on this machine, on port 8080
  skerry console --target syncer.example:443 --tls-ca keys/ca.pem --tls-cert keys/me.pem --tls-key keys/me.key
  skerry console --price us=98 --price eu=71             with costs
  skerry console --webhook https://hooks.example/T0/B0   and alerts to a chat

The console has no passwords. On an address that others reach, ask for client certificates (--listen-client-ca), or put
a proxy before it that knows who may see the runs.
"""
)
@click.option("--listen", type=ADDRESS, default="127.0.0.1:8080", metavar="HOST:PORT", help="Port 0 picks a free port.")
@click.option("--port-file", type=OUTPUT_FILE, help="Write the port to this file once the console answers.")
@click.option(
    "--webhook",
    "webhook_url",
    metavar="URL",
    type=Parsed("url", _url),
    help="Post alerts there, in the shape that Slack reads.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    type=Parsed("host", lambda text: server_address(f"{text}:0").host),
    metavar="NAME",
    help="A name or address by which browsers call it; repeated for each.  [default: on loopback localhost, else any]",
)
@click.option("--listen-cert", type=PEM_FILE, help="Serve with TLS, and present this certificate (PEM).")
@click.option("--listen-key", type=PEM_FILE, help="The private key of --listen-cert.")
@click.option("--listen-client-ca", type=PEM_FILE, help="Accept only browsers with a certificate of this authority.")
@click.option(
    "--actions",
    "allows_actions",
    is_flag=True,
    help="Let the page change runs: of whoever uses this machine, or with --listen-client-ca of admins.",
)
@_prices
@with_target
def console(
    *,
    target: str,
    tls: Tls | Insecure | None,
    listen: str,
    port_file: Path | None,
    webhook_url: str | None,
    hosts: tuple[str, ...],
    listen_cert: Path | None,
    listen_key: Path | None,
    listen_client_ca: Path | None,
    allows_actions: bool,
    prices: tuple[tuple[str, float], ...],
) -> None:
    """Show runs in a browser: losses, learners, versions, rounds, events and alerts, live."""
    import uvicorn  # here: `skerry --help` does without the extra [console]

    from skerry_console.app import Console, application
    from skerry_console.serving import server_options
    from skerry_console.view import Settings

    host, port = server_address(listen)
    own = checked(Tls(listen_client_ca, listen_cert, listen_key))
    if own.ca is not None and own.cert is None:
        raise click.UsageError("--listen-client-ca needs the console's own certificate: --listen-cert and --listen-key")
    if allows_actions and own.ca is None and not is_loopback(host):
        raise click.UsageError("--actions needs a loopback address or --listen-client-ca, to know who acts")
    log_to_stderr("warning")
    served = Console(
        lambda: RunsClient(target, tls=tls),
        Settings(prices=dict(prices), allows_actions=allows_actions),
        webhook_url=webhook_url,
    )
    app = application(served, hosts=list(hosts) or (["localhost", "127.0.0.1"] if is_loopback(host) else ["*"]))
    with socket.create_server((host, port)) as listening:
        bound = listening.getsockname()[1]
        click.echo(f"console: {'http' if own.cert is None else 'https'}://{host}:{bound}")
        if port_file is not None:
            with replacing(port_file) as written:
                written.write(f"{bound}\n".encode())
        uvicorn.Server(uvicorn.Config(app, **server_options(own))).run(sockets=[listening])


@click.command(
    "report",
    epilog="""\b
Examples:
  skerry report demo                        what is in the run's log, to demo.html
  skerry report demo --follow --out a.html  watch until the run is closed, with the losses that learners report
""",
)
@with_run
@click.option("--out", type=OUTPUT_FILE, help="The file to write.  [default: RUN.html]")
@click.option(
    "--follow", "follows", is_flag=True, help="Watch until the run is closed and judged, and write the file then."
)
@_prices
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(0, min_open=True),
    default=30.0,
    help="Seconds to wait for an answer, and for what judges report of the last version.",
)
@with_target
def report_command(
    *,
    target: str,
    tls: Tls | Insecure | None,
    run: str,
    out: Path | None,
    follows: bool,
    prices: tuple[tuple[str, float], ...],
    timeout_s: float,
) -> None:
    """Write what happened in a run as one HTML file that opens without a network.

    Learners' losses and paces are in no log, so a report has them only with --follow, from its start on. What judges
    report of the merged model is in every report.
    """
    from skerry_console.feed import RunFeed  # here: likewise
    from skerry_console.report import report
    from skerry_console.view import Settings

    log_to_stderr("warning")
    settings, path = Settings(prices=dict(prices)), out or Path(f"{run}.html")
    if not follows:
        with RunsClient(target, tls=tls, timeout_s=timeout_s) as client:
            client.get_run(run)  # refuses a run that does not exist at once
    feed = RunFeed(lambda: RunsClient(target, tls=tls), run, settings)
    try:
        if follows:
            feed.wait_closed(timeout_s)
        else:
            feed.wait_started(timeout_s)
            feed.wait_current(_PAST_S)
        with feed.history() as history:
            html = report(history, settings).encode()
            count, position = history.version_count, history.applied_position
    finally:
        feed.close()
    with replacing(path) as written:
        written.write(html)
    click.echo(f"{path}: {size_text(len(html))}, {count} versions, up to position {position}")
