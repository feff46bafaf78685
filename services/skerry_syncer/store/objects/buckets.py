"""Objects over `obstore`: buckets, and memory."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

import obstore
from obstore import exceptions
from obstore.store import ObjectStore

from skerry_syncer.store.errors import (
    ObjectExistsError,
    ObjectMissingError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
)
from skerry_syncer.store.objects.interface import STREAM_CHUNK_BYTES, Chunks, ObjectInfo, check_object_name, folder_of

# Bytes up to this size go up in one request. S3 allows 10,000 pieces an object, so pieces of 16 MiB reach 156 GiB.
_PIECE_BYTES: Final = 16 * 2**20
_PIECES_IN_FLIGHT: Final = 4
_DELETES_IN_FLIGHT: Final = 16
# Objects are read in ranges, one request each. At 2.2 Mbit/s and more a range takes less than the 60 s of a request,
# and most objects, such as pushed parts of 8 MiB, are one range.
RANGE_BYTES: Final = 16 * 2**20
# Of a range behind the end.
_END_SIGNS: Final = ("416 Range Not Satisfiable", "Invalid range", "range was invalid", "Wanted range starting at")
_ERROR_CODE: Final = re.compile(r"<Code>(\w+)</Code>")  # in a server's answer
_NO_BUCKET_SIGNS: Final = ("NoSuchBucket", "ContainerNotFound")
# Where obstore asks a cloud machine for its role when it has no credentials.
_METADATA_SIGNS: Final = ("//169.254.169.254/", "//metadata.google.internal/")
_FULL_SIGNS: Final = ("No space left", "Disk quota exceeded", "507 Insufficient Storage", "QuotaExceeded")


class ObstoreObjects:
    """Objects in any store of `obstore` that honours put-if-absent."""

    def __init__(self, store: ObjectStore, *, range_bytes: int = RANGE_BYTES) -> None:
        self.store = store
        self._range_bytes = range_bytes

    async def create(self, name: str, data: bytes) -> None:
        """Puts an object that must not exist, with the store's own put-if-absent."""
        with translated_errors("create", check_object_name(name)):
            await obstore.put_async(self.store, name, data, mode="create", use_multipart=False)

    async def get(self, name: str) -> bytes:
        """Returns the object's bytes."""
        with translated_errors("get", check_object_name(name)):
            return bytes(await (await obstore.get_async(self.store, name)).bytes_async())

    async def write(self, name: str, chunks: Chunks) -> None:
        """Puts a blob, in pieces where it is large or comes piece by piece."""
        with translated_errors("write", check_object_name(name)):
            await obstore.put_async(
                self.store,
                name,
                chunks if isinstance(chunks, bytes | AsyncIterator) else b"".join(chunks),
                chunk_size=_PIECE_BYTES,
                max_concurrency=_PIECES_IN_FLIGHT,
            )

    async def stream(self, name: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the object's bytes from `offset`, one range after another."""
        check_object_name(name)
        size_bytes = offset + 1  # at least, until an answer says it
        with translated_errors("stream", name):
            while offset < size_bytes:
                span = (offset, offset + self._range_bytes)
                try:
                    answer = await obstore.get_async(self.store, name, options={"range": span})
                except exceptions.BaseError as error:
                    if any(sign in str(error) for sign in _END_SIGNS):
                        return
                    raise
                async for piece in answer.stream(min_chunk_size=STREAM_CHUNK_BYTES):
                    view = memoryview(piece)
                    for start in range(0, len(view), STREAM_CHUNK_BYTES):
                        yield bytes(view[start : start + STREAM_CHUNK_BYTES])
                    offset += len(view)
                size_bytes = answer.meta["size"]

    async def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`."""
        with translated_errors("list", prefix):
            result = await obstore.list_with_delimiter_async(self.store, folder_of(prefix) or None)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in result["common_prefixes"])

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields every object below `prefix`."""
        pages = obstore.list(self.store, folder_of(prefix) or None, chunk_size=1000).__aiter__()
        while True:
            with translated_errors("list", prefix):
                page = await anext(pages, None)
            if page is None:
                return
            for meta in page:
                yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these objects, on S3 and Azure many a request."""
        paths = [check_object_name(name) for name in names]
        # Elsewhere than on S3 a name that does not exist ends the call.
        with translated_errors("delete", names[0] if names else ""), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self.store, paths)
            return
        if len(names) > 1:
            for start in range(0, len(names), _DELETES_IN_FLIGHT):
                await asyncio.gather(*(self.delete([name]) for name in names[start : start + _DELETES_IN_FLIGHT]))

    async def sync_parent(self, *names: str) -> None:
        """Does nothing: an object that such a store shows is durable."""


@contextlib.contextmanager
def translated_errors(operation: str, name: str) -> Iterator[None]:
    """Turns obstore's and the operating system's errors into the store's own."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:  # an object has none below it
        if any(sign in str(error) for sign in _NO_BUCKET_SIGNS):  # it must not pass for an empty one
            raise StoreRefusedError(f"bucket does not exist. operation={operation}, name={name}") from error
        raise ObjectMissingError(f"object is missing. name={name}") from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError) as error:
        raise ObjectExistsError(f"object exists. name={name}") from error
    except (exceptions.BaseError, OSError) as error:
        # obstore adds its own source code after the first line; the file system's errors have only one line.
        cause, code = str(error).partition("\n")[0], _ERROR_CODE.search(str(error))
        kind, problem = _kind_of(error)
        facts = f"operation={operation}, name={name}, cause={cause}{f', code={code[1]}' if code else ''}"
        raise kind(f"{problem}. {facts}") from error


def _kind_of(error: Exception) -> tuple[type[StoreFullError | StoreUnavailableError], str]:
    if any(sign in str(error) for sign in _FULL_SIGNS):
        return StoreFullError, "store has no space left"
    if any(sign in str(error) for sign in _METADATA_SIGNS):
        return StoreRefusedError, "the machine has no role that gives it credentials"
    if any(sign in str(error) for sign in _NO_BUCKET_SIGNS):
        return StoreRefusedError, "bucket does not exist"
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return StoreRefusedError, "store refuses the credentials, or does not let them do this"
    return StoreUnavailableError, "store can't be used"
