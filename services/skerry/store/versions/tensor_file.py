"""Reads a snapshot, a plain safetensors file, into a fragment's flat vector while it streams in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.store.errors import LogCorruptError
from skerry.store.versions.safetensors_stream import tensor_key
from skerry.wire.layout import FragmentLayout

# A header holds some 100 bytes a tensor; more than this is not one that the store wrote.
_LARGEST_HEADER_BYTES: Final = 2**26


class _Place(NamedTuple):
    """Bytes `[begin, end)` of the file's data go to the vector's bytes from `target`."""

    begin: int
    end: int
    target: int


async def read_tensor_file(
    pieces: AsyncIterator[bytes],
    layout: FragmentLayout,
    out: NDArray[np.float32],  # (layout.numel,) written in [first, first + numel)
    *,
    first: int,
    numel: int,
) -> None:
    """Fills `[first, first + numel)` of `out` from a file that holds exactly the tensors of that range, as float32.

    Raises:
        LogCorruptError: the file is not that; `out` is then of no use.
    """
    target = out.view(np.uint8)
    places: list[_Place] | None = None
    buffer = bytearray()
    position = 0  # bytes of data, after the header, that were placed
    async for piece in pieces:
        data = piece
        if places is None:
            buffer += piece
            header_size = _header_size(buffer)
            if header_size is None:
                continue
            places = _places(buffer[8:header_size], layout, first, numel)
            data = bytes(buffer[header_size:])
        _copy(places, data, position, target)
        position += len(data)
    if places is None or position != 4 * numel:
        raise LogCorruptError(f"snapshot has the wrong size. expected_bytes={4 * numel}, actual_bytes={position}")


def _header_size(buffer: bytearray) -> int | None:
    """Returns the header's size with its length field, or None while it is not all there."""
    if len(buffer) < 8:
        return None
    size = int.from_bytes(buffer[:8], "little")
    if size > _LARGEST_HEADER_BYTES:
        raise LogCorruptError(f"snapshot is no safetensors file. header_bytes={size}")
    return 8 + size if len(buffer) >= 8 + size else None


def _places(header: bytearray, layout: FragmentLayout, first: int, numel: int) -> list[_Place]:
    try:
        values: dict[str, Any] = json.loads(header)
        places = []
        ranges = list(layout.ranges(first, numel))
        names = [layout.tensors[index].name for index, _, _ in ranges]
        for index, start, stop in ranges:
            spec = layout.tensors[index]
            entry = values[tensor_key(spec.name, names)]
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "F32" or entry["shape"] != list(spec.shape) or end - begin != 4 * (stop - start):
                raise ValueError(f"tensor does not fit the fragment. tensor={spec.name}, entry={entry}")
            places.append(_Place(begin, end, 4 * start))
    except (KeyError, TypeError, ValueError) as error:
        raise LogCorruptError(f"snapshot's header does not fit the fragment. cause={error!r}") from error
    places.sort()
    if any(one.end > other.begin for one, other in pairwise(places)):
        raise LogCorruptError("snapshot's tensors overlap")
    return places


def _copy(places: list[_Place], data: bytes, position: int, target: NDArray[np.uint8]) -> None:
    """Copies what of `data`, which lies at `position`, belongs to each place."""
    source = np.frombuffer(data, np.uint8)
    for place in places:
        low, high = max(place.begin, position), min(place.end, position + len(data))
        if low < high:
            at = place.target + low - place.begin
            target[at : at + high - low] = source[low - position : high - position]
