"""Files that take another's place at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from skerry.runtime.identifiers import SystemEntropy


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that takes the place of `path` at the end of the context, durable; after an error it is gone.

    It lies in the same folder under a random name and must not exist, so that no other process can have put a link
    there.
    """
    partial = path.with_name(f".{path.name}.{SystemEntropy().hex_id()[:8]}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
