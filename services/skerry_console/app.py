"""The console's pages and streams, a client of the syncer as any other."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, TypeVar

import zstandard
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from skerry import RunNotFoundError, RunsClient, SkerryError
from skerry.cli import policy_text
from skerry.cli.console import count_text
from skerry.history.run_history import VersionView, status_word, version_view
from skerry.runtime.clock import SystemClock
from skerry.v1.runs_pb2 import VersionRecord
from skerry.v1.types_pb2 import RUN_STATUS_OPEN
from skerry.wire.layout import check_name
from skerry_console.feed import RunFeed
from skerry_console.report import bokeh_script, report
from skerry_console.view import Settings, error_page, events_html, page, runs_page, version_html
from skerry_console.webhook import Webhook

R = TypeVar("R")

_CLOCK: Final = SystemClock()
_START_S: Final = 20.0
_PAINT_S: Final = 0.1  # for which a page waits for events; those that come later it gets as changes
_ALERT_PAUSE_S: Final = 1.0
_LIST_PAUSE_S: Final = 10.0


@dataclass
class Console:
    """The runs that are looked at, each followed once."""

    connect: Callable[[], RunsClient]
    settings: Settings
    webhook_url: str | None = None

    def __post_init__(self) -> None:
        """Connects; feeds begin when somebody looks."""
        self.client = self.connect()
        self._client_lock = asyncio.Lock()
        self._feeds: dict[str, RunFeed] = {}

    async def call(self, work: Callable[[RunsClient], R]) -> R:
        """Returns what `work` returns of the client, which one thread uses at a time."""
        async with self._client_lock:
            return await asyncio.to_thread(work, self.client)

    async def feed(self, run: str, patience_s: float = _START_S) -> RunFeed:
        """Returns the feed of a run, once it has started, and has the newest that happened or had time for that.

        Raises:
            SkerryError, TimeoutError: there is no such run, or the syncer does not answer.
            ValueError: that is no name of a run.
        """
        check_name(run, kind="run")
        if run in self._feeds and self._feeds[run].failure is not None:  # deleted, and perhaps made again
            self._feeds.pop(run).close()
        if run not in self._feeds:
            known = await self.call(lambda client: client.get_run(run))  # a feed would wait for one to be created
            if run not in self._feeds:  # nobody else made it meanwhile
                self._feeds[run] = RunFeed(self.connect, run, self.settings, position=known.run.position)
        feed = self._feeds[run]
        try:
            await asyncio.to_thread(feed.wait_started, _START_S)
            await asyncio.to_thread(feed.wait_current, patience_s)
        except (SkerryError, TimeoutError):
            if self._feeds.get(run) is feed:  # nobody else who waited for it has taken it out
                del self._feeds[run]
            feed.close()
            raise
        return feed

    async def watch(self) -> None:
        """Follows every open run, and posts its alerts, for as long as the console runs."""
        hooks: dict[str, Webhook] = {}
        listed_at_s = -math.inf
        while True:
            if _CLOCK.monotonic_s() - listed_at_s >= _LIST_PAUSE_S:
                listed_at_s = _CLOCK.monotonic_s()
                with suppress(SkerryError, TimeoutError):
                    await self._follow_open_runs()
            for name, feed in list(self._feeds.items()):
                if self.webhook_url is not None:
                    hook = hooks.setdefault(name, Webhook(self.webhook_url, name))
                    await asyncio.to_thread(hook.update, feed.alerts())
            await _CLOCK.sleep(_ALERT_PAUSE_S)

    async def _follow_open_runs(self) -> None:
        for run in await self.call(RunsClient.list_runs):
            if run.status == RUN_STATUS_OPEN:
                await self.feed(run.name)

    def close(self) -> None:
        """Closes every connection."""
        for feed in self._feeds.values():
            feed.close()
        self.client.close()


class Pages:
    """What a browser may ask for."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def index(self, _: Request) -> Response:
        """Lists the runs, or shows the only one."""
        runs = await self._console.call(RunsClient.list_runs)
        if len(runs) == 1:
            return RedirectResponse(f"/runs/{runs[0].name}")
        rows = [
            {
                "run": run.name,
                "status": status_word(run.status),
                "parameters": count_text(sum(math.prod(tensor.shape) for tensor in run.tensors)),
                "fragments": str(len(run.fragments)),
            }
            for run in runs
        ]
        return HTMLResponse(runs_page(rows))

    async def run_page(self, request: Request) -> Response:
        """Shows a run."""
        feed = await self._console.feed(request.path_params["run"], _PAINT_S)
        with feed.history() as history:
            html = page(history, self._console.settings, _CLOCK.unix_s(), title=f"{feed.run}: Skerry", feed=feed.id)
        return HTMLResponse(html)

    async def changes(self, request: Request) -> Response:
        """Streams what changes on the page of a run."""
        feed = await self._console.feed(request.path_params["run"])
        stream: AsyncIterator[str | bytes] = feed.changes(request.query_params.get("feed", ""))
        headers = {"Cache-Control": "no-store"}
        if "zstd" in request.headers.get("accept-encoding", ""):
            stream, headers["Content-Encoding"] = compressed(stream), "zstd"
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def log(self, request: Request) -> Response:
        """Returns a page of a run's events."""
        feed = await self._console.feed(request.path_params["run"])
        try:
            number = max(0, int(request.query_params.get("page", "0")))
        except ValueError as error:
            raise HTTPException(400, "`page` is not a number") from error
        with feed.history() as history:
            return HTMLResponse(events_html(history, request.query_params.get("words", ""), number))

    async def version(self, request: Request) -> Response:
        """Returns what is known of a version."""
        feed = await self._console.feed(request.path_params["run"])
        fragment, number = request.path_params["fragment"], request.path_params["version"]
        with feed.history() as history:
            known = history.fragments.get(fragment)
            seen = reversed(history.versions)
            view = next((view for view in seen if (view.fragment, view.version) == (fragment, number)), None)
        if known is None or (view is None and number > known.version):
            return HTMLResponse(f"<p>{feed.run} has no such version.</p>", 404)
        if view is None or (view.delta_count and not view.deltas):
            view = await _read_version(self._console, feed.run, fragment, number, view)
        if view is None:
            return HTMLResponse("<p>The run has forgotten that version.</p>", 404)
        with feed.history() as history:
            return HTMLResponse(version_html(history, view, allows_actions=self._console.settings.allows_actions))

    async def whole_report(self, request: Request) -> Response:
        """Returns the run as one file."""
        feed = await self._console.feed(request.path_params["run"])
        with feed.history() as history:
            html = report(history, self._console.settings)
        return HTMLResponse(html, headers={"Content-Disposition": f'attachment; filename="{feed.run}.html"'})

    async def action(self, request: Request) -> Response:
        """Changes a run: rolls it back or closes it, changes its policy, ejects or readmits a learner."""
        identities = getattr(request.state, "identities", ["skerry://admin/"])  # whoever uses this machine
        is_admin = any(identity.startswith("skerry://admin/") for identity in identities)
        if not self._console.settings.allows_actions or request.headers.get("x-skerry-console") != "1":
            raise HTTPException(403, "start the console with --actions")
        if not is_admin:
            return PlainTextResponse("your certificate is not an admin's", 403)
        try:
            values = json.loads(await request.body())
            act = _action(request.path_params["run"], request.path_params["action"], values)
            await self._console.call(act)
        except (KeyError, TypeError) as error:
            raise HTTPException(400, "there is no such action, or it needs another value") from error
        except ValueError as error:
            return PlainTextResponse(str(error), 400)
        except SkerryError as error:
            return PlainTextResponse(str(error), 409)
        return PlainTextResponse("done")


def _action(run: str, name: str, values: dict[str, str]) -> Callable[[RunsClient], object]:
    """Returns what carries an action out; raises KeyError, ValueError or TypeError if there is none of these values."""

    def set_policy(client: RunsClient) -> object:
        current = client.get_policy(run)
        return client.set_policy(run, policy_text.apply(values["assignments"].split(), current), base=current)

    if name == "policy":
        return set_policy
    if name == "roll-back":
        position = int(values["position"])
        return lambda client: client.roll_back(run, position)
    if name == "close":
        return lambda client: client.close_run(run)
    learner, method = values["learner"], {"eject": RunsClient.eject, "readmit": RunsClient.readmit}[name]
    return lambda client: method(client, run, learner)


async def compressed(texts: AsyncIterator[str | bytes]) -> AsyncIterator[bytes]:
    """Yields texts as one stream of zstd, flushed after each: most of a change repeats what was sent before."""
    compressor = zstandard.ZstdCompressor().compressobj()
    async for text in texts:
        data = text.encode() if isinstance(text, str) else text
        yield compressor.compress(data) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


async def _refused(_: Request, error: Exception) -> Response:
    """Returns a page that says what is wrong: with the request's name or value, or else with the syncer."""
    if isinstance(error, HTTPException):
        status, reason = error.status_code, error.detail
    else:
        status, reason = 404 if isinstance(error, RunNotFoundError | ValueError) else 502, str(error)
    return HTMLResponse(error_page(reason, may_pass=status == 502), status)


def application(console: Console, *, hosts: list[str]) -> Starlette:
    """Returns the web application; `hosts` are the names by which browsers may call it."""
    pages = Pages(console)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(console.watch())
        yield
        watching.cancel()
        console.close()

    packed = gzip.compress(bokeh_script().read_bytes(), 6)  # once, and before anybody waits for it

    async def script(_: Request) -> Response:
        headers = {"Cache-Control": "max-age=86400", "Content-Encoding": "gzip"}
        return Response(packed, media_type="text/javascript", headers=headers)

    routes = [
        Route("/", pages.index),
        Route("/runs/{run}", pages.run_page),
        Route("/runs/{run}/changes", pages.changes),
        Route("/runs/{run}/log", pages.log),
        Route("/runs/{run}/report", pages.whole_report),
        Route("/runs/{run}/versions/{fragment}/{version:int}", pages.version),
        Route("/runs/{run}/actions/{action}", pages.action, methods=["POST"]),
        Route("/static/bokeh.min.js", script),
        Mount("/static", StaticFiles(packages=[("skerry_console", "static")])),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
        Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
    ]
    handlers = dict.fromkeys((HTTPException, SkerryError, TimeoutError, ValueError), _refused)
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)


async def _read_version(
    console: Console, run: str, fragment: str, number: int, seen: VersionView | None
) -> VersionView | None:
    """Returns a version as the syncer remembers it, with the times that the watch has seen; None if it is forgotten."""

    def read(client: RunsClient) -> list[VersionRecord]:
        return list(islice(client.list_versions(run, fragment, before_version=number + 2), 2))  # the next one is first

    records = await console.call(read)
    record = next((record for record in records if record.version.version == number), None)
    if record is None:
        return seen
    if seen is not None:
        return replace(seen, deltas=record.merged)
    return replace(
        version_view(record, record.position),
        until=None if records[0] is record else records[0].position,
        source_version=record.source_version,
        is_abandoned=record.is_abandoned,
    )
