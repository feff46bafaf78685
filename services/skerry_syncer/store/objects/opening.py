"""Opens the object store at a URL; the errors say what to do."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from skerry.net.tls import is_loopback
from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.logs import get_logger
from skerry.runtime.workers import ThreadWorkers
from skerry_syncer.store.errors import StoreURLError
from skerry_syncer.store.objects.buckets import ObstoreObjects
from skerry_syncer.store.objects.credentials import CLOUDS, checked_endpoint, found_credentials
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.local import FOLDER_MODE, MARKER, FileSystem, LocalObjects

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_LOG: Final = get_logger(__name__)
_HELP: Final = (
    "use file:///path/of/a/folder, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://"
)
_BUCKETS: Final[dict[str, Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
# Enough that one slow write does not delay other files; the threads mostly wait in write and fsync.
_FILE_THREADS: Final = 8
_READ_THREADS: Final = 4  # apart, since most of what is read is in memory
# A request that takes longer is taken as lost. The log itself reads back and retries, so few retries are made here.
# Plain HTTP is used only if the endpoint's own URL says http.
_CLIENT: Final[ClientConfig] = {"timeout": "60s", "connect_timeout": "5s", "allow_http": True}
# The only words by which obstore leaves the proxies of the environment out.
_WITHOUT_PROXY: Final[ClientConfig] = {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": "localhost,127.0.0.0/8,::1"}
# They take longer than the second that Google wants between two writes to a name.
_RETRIES: Final[RetryConfig] = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.5)},
}


def open_objects(url: str, *, writes: bool = True, new: bool = True, reserve: bool = False) -> Objects:
    """Returns the object store at `url`: a `file://`, `memory://`, `s3://`, `gs://` or `az://` one.

    A bucket's region, account and endpoint come from the cloud's own variables, AWS_*, GOOGLE_* or AZURE_*; credentials
    also from where else `found_credentials` looks. Of a `file://` store, `new` begins one where there is none, and
    makes its folder. Without `new` that is refused, because the store may be on a volume that is not mounted, whether
    its folder is the mount point or below. `reserve` sets 16 MiB of a `file://` store's disk aside, so that collections
    work on a full one.

    Raises:
        StoreURLError: the URL can't be used; the message says what to do.
    """
    scheme, root = parse_url(url)
    if scheme == "file":
        folder = _open_folder(root, writes=writes, new=new)
        if reserve:
            folder.fill_reserve()
        return folder
    if scheme == "memory":
        return ObstoreObjects(MemoryStore())
    return _open_bucket(scheme, url.strip())


def parse_url(url: str) -> tuple[str, Path]:
    """Returns a store URL's scheme and path, without looking whether there is a store.

    All that follows file:// is the path, which may be relative, because ? and # may be in names of folders.

    Raises:
        StoreURLError: no store has such a URL; the message says what to do.
    """
    scheme, colon, rest = url.strip().partition(":")
    scheme, rest = scheme.lower(), rest.removeprefix("//")
    if not unquote(url).isprintable():
        raise StoreURLError(f"store URL has control characters; {_HELP}. url={url!r}")
    if not colon or "/" in scheme:
        raise StoreURLError(f"store URL has no scheme; did you mean file://{_absolute(url, url)} ? url={url!r}")
    if scheme not in {"file", "memory", *_BUCKETS}:
        raise StoreURLError(f"store URL's scheme is not known; {_HELP}. url={url!r}")
    if scheme in _BUCKETS and not rest.partition("/")[0]:
        raise StoreURLError(f"{scheme} URL needs a bucket; {scheme}://bucket/prefix. url={url!r}")
    if scheme in _BUCKETS and ("?" in rest or "#" in rest):
        advice = CLOUDS[scheme].settings_advice
        raise StoreURLError(f"{scheme} URL has a ? or #, which no prefix may have; {advice}. url={url!r}")
    if scheme != "file":
        return scheme, Path(rest)
    path = unquote(rest[len("localhost") :] if rest.startswith("localhost/") else rest)
    root = _absolute(path, url)
    if path in {"", "localhost"} or os.path.normpath(root) == root.anchor:
        raise StoreURLError(f"file URL names no folder; file:///path/of/a/folder. url={url!r}")
    return scheme, root


def _absolute(path: str, url: str) -> Path:
    """Returns a path with ~ replaced by the home of a user, as a shell does."""
    if path.lstrip("/").startswith("$"):
        raise StoreURLError(f"store URL begins with a variable that no shell replaced; write the path. url={url!r}")
    try:
        return (Path(path).expanduser() if path.startswith("~") else Path(path)).absolute()
    except RuntimeError as error:
        raise StoreURLError(f"store URL names the home of nobody who is known here. url={url!r}") from error


def _open_folder(root: Path, *, writes: bool, new: bool) -> LocalObjects:
    try:
        if new:
            _make_durable(root)
        is_marked = root.is_dir() and (root / MARKER).exists()
        if root.exists():
            next(root.iterdir(), None)
    except OSError as error:
        raise StoreURLError(f"store's folder can't be used: {error.strerror}. path={root}") from error
    if not is_marked and not new:
        fact = f"the folder has no {MARKER}" if root.exists() else "the folder does not exist"
        raise StoreURLError(
            f"there is no store: {fact}. path={root}. Is its volume mounted? "
            "`skerry serve --new-store` begins a new store."
        )
    if writes and not os.access(root, os.W_OK):
        raise StoreURLError(f"store's folder can't be used: permission denied. path={root}")
    objects = LocalObjects(
        root,
        workers=ThreadWorkers(_FILE_THREADS, name="skerry-store"),
        readers=ThreadWorkers(_READ_THREADS, name="skerry-read"),
        entropy=SystemEntropy(),
        is_marked=is_marked,
    )
    if not is_marked:
        try:
            objects.mark()
        except OSError as error:
            raise StoreURLError(f"store's folder can't be written. path={root}, cause={error.strerror}") from error
        _LOG.info("store begun", path=str(root))
    return objects


def _make_durable(folder: Path) -> None:
    """Makes the folder and what is above it, each synced into its parent."""
    if folder.is_dir():
        return
    _make_durable(folder.parent)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    FileSystem().sync_folder(folder.parent)


def _open_bucket(scheme: str, url: str) -> Objects:
    try:
        client: ClientConfig = {**_CLIENT, **_WITHOUT_PROXY} if is_loopback(checked_endpoint(scheme)) else _CLIENT
        options = found_credentials(scheme)
        store = _BUCKETS[scheme].from_url(url, client_options=client, retry_config=_RETRIES, **options)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        cause = str(error).partition("\n")[0]
        advice = CLOUDS[scheme].settings_advice
        raise StoreURLError(f"bucket can't be used; {advice}. url={url!r}, cause={cause}") from error
    return ObstoreObjects(store)
