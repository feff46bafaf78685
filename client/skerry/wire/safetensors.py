"""Safetensors files, written and read in pieces of any size: snapshots and exports of any length need no second copy.

The format: a little-endian u64 with the size of the header, the header (JSON, padded with spaces to a multiple of 8),
then the bytes of the tensors in row-major order. The safetensors project specifies it, and its libraries read it.
protos/FORMAT.md says what Skerry's snapshots hold. Nothing here does I/O but `read_file_header`.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from operator import index as index_of
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.wire.errors import TensorFileError, WireReason
from skerry.wire.layout import FragmentLayout

_METADATA: Final = "__metadata__"
_SIZE: Final = struct.Struct("<Q")
# A header has some 100 bytes a tensor. A larger one is not read into memory.
MAX_HEADER_BYTES: Final = 2**26
_PIECE_NUMEL: Final = 2**18
_DTYPES: Final = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float64": ("F64", 8),
}


def tensor_key(name: str, names: Iterable[str]) -> str:
    """Returns the name that the tensor `name` has in the file: its own, unless the format reserves it.

    A tensor called `__metadata__` becomes `__metadata__.tensor`, with as many `.tensor` as it takes to differ from the
    other `names`.
    """
    if name != _METADATA:
        return name
    taken = set(names)
    key = f"{_METADATA}.tensor"
    while key in taken:
        key += ".tensor"
    return key


def written_dtype(dtype: str, wanted: str) -> str:
    """Returns the element type of a run's tensor in a file: `wanted`, or if that is "original" its own.

    Of a tensor whose own type can't be written it is float32.
    """
    return wanted if wanted != "original" else dtype if dtype in _DTYPES else "float32"


class FileTensor(NamedTuple):
    """A tensor in a file: its element type as the format calls it, and where its bytes are."""

    path: Path
    code: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    size_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an element; 0 if there is none."""
        return self.size_bytes // max(1, math.prod(self.shape))

    def data(self) -> NDArray[np.uint8]:
        """Returns its bytes, which are read where they are looked at."""
        if not self.size_bytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, mode="r", offset=self.offset, shape=(self.size_bytes,))


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]] | FileTensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file whose tensors have these (dtype, shape) and follow in this order.

    Of a tensor of another file, type, shape and size are taken over.

    Raises:
        ValueError: a dtype can't be written.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, FileTensor):
            code, shape, size = tensor.code, tensor.shape, tensor.size_bytes
        else:
            dtype, shape = tensor
            if dtype not in _DTYPES:
                known = sorted(_DTYPES)
                raise ValueError(f"element type can't be written. tensor={name}, dtype={dtype}, known={known}")
            code, item_bytes = _DTYPES[dtype]
            size = item_bytes * math.prod(shape)
        key = tensor_key(name, tensors)
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _SIZE.pack(len(text)) + text


def tensor_bytes(values: NDArray[np.float32], dtype: str = "float32") -> Iterator[bytes]:
    """Yields a tensor's bytes as elements of `dtype`, rounded to nearest even, in pieces of at most 2^18 elements."""
    flat = np.ascontiguousarray(values).reshape(-1)
    for start in range(0, len(flat), _PIECE_NUMEL):
        piece = flat[start : start + _PIECE_NUMEL]
        if dtype == "bfloat16":
            yield _to_bfloat16(piece).tobytes()
        else:
            with np.errstate(over="ignore"):  # what float16 can't hold becomes infinite
                data = piece.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
            yield data  # outside of the context, which a generator may leave on another thread than it entered


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the values' bits as bfloat16, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def read_file_header(path: Path) -> dict[str, FileTensor]:
    """Returns the tensors of a file by name.

    Raises:
        OSError: it can't be read.
        TensorFileError: it is no safetensors file.
    """
    with path.open("rb") as file:
        (size,) = _SIZE.unpack(file.read(_SIZE.size).ljust(_SIZE.size, b"\0"))
        begin, end = _SIZE.size + size, file.seek(0, os.SEEK_END)
        if not 0 < size <= min(MAX_HEADER_BYTES, end):
            raise TensorFileError(WireReason.BAD_HEADER, f"not a safetensors file. path={path}")
        file.seek(_SIZE.size)
        text = file.read(size)
    tensors: dict[str, FileTensor] = {}
    try:
        for name, entry in json.loads(text).items():
            if name != _METADATA:
                first, stop = (begin + index_of(offset) for offset in entry["data_offsets"])
                if not begin <= first <= stop <= end:
                    raise ValueError(f"data is outside of the file. tensor={name}")
                shape = tuple(map(index_of, entry["shape"]))
                tensors[name] = FileTensor(path, str(entry["dtype"]), shape, first, stop - first)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TensorFileError(WireReason.BAD_HEADER, f"header can't be read. path={path}, cause={error!r}") from error
    return tensors


class TensorFileReader:
    """Copies the tensors of a file into a fragment's flat vector while the file's bytes arrive.

    The file must hold exactly the tensors of the range, whole and as float32; their data may come in any order, but
    without a gap or an overlap. One thread at a time.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        out: NDArray[np.float32],  # (layout.numel,) contiguous; written in [first, first + numel)
        *,
        first: int,
        numel: int,
    ) -> None:
        self._layout = layout
        self._first = first
        self._numel = numel
        self._target = out.data.cast("B")
        self._header = bytearray()
        self._left: deque[memoryview] | None = None  # of the target, in the order of the file; None: no whole header

    def feed(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the file.

        Raises:
            TensorFileError: the file is not what it must be; `out` is then of no use.
        """
        if self._left is None:
            self._header += data
            size = self._header_size()
            if len(self._header) < size:
                return
            self._left = deque(self._parse(self._header[_SIZE.size : size]))
            data = bytes(self._header[size:])
            self._header.clear()
        rest = memoryview(data)
        while rest:
            if not self._left:
                raise TensorFileError(WireReason.LAYOUT, f"file has more data than its range. numel={self._numel}")
            place = self._left.popleft()
            count = min(len(rest), len(place))
            place[:count] = rest[:count]
            rest = rest[count:]
            if count < len(place):
                self._left.appendleft(place[count:])

    def finish(self) -> None:
        """Checks that the file has ended where it must.

        Raises:
            TensorFileError: TRUNCATED: bytes are missing.
        """
        if self._left is None or self._left:
            missing_bytes = sum(map(len, self._left or ()))
            raise TensorFileError(WireReason.TRUNCATED, f"file ends early. missing_data_bytes={missing_bytes}")

    def _header_size(self) -> int:
        """Returns the bytes before the data, or those of the size field while that is not whole."""
        if len(self._header) < _SIZE.size:
            return _SIZE.size
        (size,) = _SIZE.unpack_from(self._header)
        if not 0 < size <= MAX_HEADER_BYTES:
            raise TensorFileError(
                WireReason.TOO_LARGE if size else WireReason.BAD_HEADER,
                f"not a safetensors file. header_bytes={size}, limit={MAX_HEADER_BYTES}",
            )
        return _SIZE.size + int(size)

    def _parse(self, header: bytearray) -> Iterator[memoryview]:
        """Yields where the data of each tensor belongs, in the order of the file."""
        try:
            places = sorted(self._places(json.loads(header)))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise TensorFileError(WireReason.BAD_HEADER, f"header can't be read. cause={error!r}") from error
        position = 0
        for begin, end, start in places:
            if begin != position:
                raise TensorFileError(
                    WireReason.LAYOUT, f"tensors overlap or leave a gap. expected_begin={position}, begin={begin}"
                )
            yield self._target[4 * start : 4 * start + end - begin]
            position = end

    def _places(self, header: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
        """Yields of each tensor where its bytes begin and end in the data, and its first element in the fragment."""
        ranges = list(self._layout.ranges(self._first, self._numel))
        names = [self._layout.tensors[index].name for index, _, _ in ranges]
        for index, start, stop in ranges:
            spec = self._layout.tensors[index]
            entry = header[tensor_key(spec.name, names)]
            begin, end = map(index_of, entry["data_offsets"])
            expected = ("F32", list(spec.shape), 4 * spec.numel)
            if stop - start != spec.numel or (entry["dtype"], entry["shape"], end - begin) != expected:
                raise TensorFileError(
                    WireReason.LAYOUT,
                    f"tensor does not fit the fragment, or its range cuts it. tensor={spec.name}, "
                    f"shape={spec.shape}, range={start}..{stop}, entry={entry!r:.200}",
                )
            yield begin, end, start
