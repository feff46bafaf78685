"""Opens the object store at a URL; the errors say what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from obstore import exceptions
from obstore.store import MemoryStore, S3Store

from skerry.runtime.identifiers import SystemEntropy
from skerry.runtime.workers import ThreadWorkers
from skerry.store.errors import StoreURLError
from skerry.store.objects.buckets import ObstoreObjects
from skerry.store.objects.interface import Objects
from skerry.store.objects.local import LocalObjects

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_HELP: Final = "use file:///path/of/a/folder, s3://bucket/prefix or memory://"
# Enough that one slow write does not delay other files; the threads mostly wait in write and fsync.
_FILE_THREADS: Final = 8
# A request that takes longer is taken as lost. The log itself reads back and retries, so few retries are made here.
_CLIENT: Final[ClientConfig] = {"timeout": "60s", "connect_timeout": "5s"}
_RETRIES: Final[RetryConfig] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


def open_objects(url: str, *, create: bool = True, options: Mapping[str, str] | None = None) -> Objects:
    """Returns the object store at `url`: `file:///path`, `memory://` or `s3://bucket/prefix`.

    Credentials, region and endpoint of `s3://` come from `options` (obstore's names: `endpoint`, `region`,
    `access_key_id`, `secret_access_key` ...) or else the AWS_* environment. `create` makes the folder of a `file://`
    store where it is missing.

    Raises:
        StoreURLError: the URL can't be used; the message says what to do.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _open_folder(url, parts.netloc, unquote(parts.path), create=create)
    if parts.scheme == "memory":
        return ObstoreObjects(MemoryStore())
    if parts.scheme == "s3":
        return _open_bucket(url, parts.netloc, options or {})
    if not parts.scheme:
        raise StoreURLError(f"store URL has no scheme; did you mean file://{Path(url).absolute()} ? url={url!r}")
    raise StoreURLError(f"store URL's scheme is not known; {_HELP}. url={url!r}")


def _open_folder(url: str, host: str, path: str, *, create: bool) -> Objects:
    # file:///absolute/path, and file://relative/path, although a URL's first part is a host by the standard.
    root = Path(path) if host in ("", "localhost") else Path(f"{host}{path}").absolute()
    if root == Path(root.anchor) or (not path and not host):
        raise StoreURLError(f"file URL names no folder; file:///path/of/a/folder. url={url!r}")
    try:
        if create:
            _make_root(root)
        if not root.is_dir():
            raise StoreURLError(f"store's folder does not exist. path={root}")
    except OSError as error:
        raise StoreURLError(f"store's folder can't be used: {error.strerror}. path={root}") from error
    if not os.access(root, os.R_OK | os.X_OK) or (create and not os.access(root, os.W_OK)):
        raise StoreURLError(f"store's folder can't be used: permission denied. path={root}")
    return LocalObjects(root, workers=ThreadWorkers(_FILE_THREADS, name="skerry-store"), entropy=SystemEntropy())


def _make_root(root: Path) -> None:
    """Makes the folder and what is above it, each synced into its parent."""
    if root.is_dir():
        return
    _make_root(root.parent)
    root.mkdir(exist_ok=True)
    descriptor = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_bucket(url: str, bucket: str, options: Mapping[str, str]) -> Objects:
    if not bucket:
        raise StoreURLError(f"s3 URL needs a bucket; s3://bucket/prefix. url={url!r}")
    try:
        # Plain HTTP is used only if the endpoint's own URL says http.
        client: ClientConfig = {**_CLIENT, "allow_http": True}
        store = S3Store.from_url(url, client_options=client, retry_config=_RETRIES, **options)  # type: ignore[arg-type]  # names are checked by obstore
    except (exceptions.BaseError, ValueError, TypeError) as error:
        cause = str(error).partition("\n")[0]
        raise StoreURLError(f"bucket can't be used; {_HELP}. url={url!r}, cause={cause}") from error
    return ObstoreObjects(store)
