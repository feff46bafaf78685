"""The one safetensors reader and writer: what is written is read back, and every fault is refused with its reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.wire.errors import TensorFileError, WireReason
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.safetensors import MAX_HEADER_BYTES, TensorFileReader, header_bytes, tensor_bytes
from tests.unit.wire.wire_strategies import bits, fragments

LAYOUT = FragmentLayout(
    "f", (TensorSpec("a", (2, 3)), TensorSpec("__metadata__", (4,)), TensorSpec("__metadata__.tensor", ()))
)
VALUES = np.arange(LAYOUT.numel, dtype=np.float32)
KEYS = ("a", "__metadata__.tensor.tensor", "__metadata__.tensor")


def file_of(layout: FragmentLayout, values: NDArray[np.float32]) -> bytes:
    header = header_bytes({spec.name: ("float32", spec.shape) for spec in layout.tensors}, {"format": "1"})
    return header + b"".join(tensor_bytes(values))


def changed(**entries: Mapping[str, Any] | None) -> bytes:
    """Returns the file of LAYOUT with some fields of its header changed, or entries of it left out."""
    data = file_of(LAYOUT, VALUES)
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    for key, change in entries.items():
        if change is None:
            del header[key]
        else:
            header[key] |= change
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[size:]


def read(
    data: bytes, piece_bytes: int = 2**20, *, layout: FragmentLayout = LAYOUT, first: int = 0, numel: int | None = None
) -> NDArray[np.float32]:
    out = np.full(layout.numel, np.nan, np.float32)
    reader = TensorFileReader(layout, out, first=first, numel=layout.numel if numel is None else numel)
    for start in range(0, len(data), piece_bytes):
        reader.feed(data[start : start + piece_bytes])
    reader.finish()
    return out


def reason_of(data: bytes, first: int = 0, numel: int = LAYOUT.numel) -> WireReason:
    with pytest.raises(TensorFileError) as raised:
        read(data, first=first, numel=numel)
    return raised.value.reason


@given(fragments(), st.integers(1, 300))
def test_what_was_written_is_read_back_however_its_bytes_are_cut(
    fragment: tuple[FragmentLayout, NDArray[np.float32]], piece_bytes: int
) -> None:
    layout, values = fragment
    assert (bits(read(file_of(layout, values), piece_bytes, layout=layout)) == bits(values)).all()


def test_reserved_names_follow_the_key_rule_and_the_projects_own_library_reads_them() -> None:
    data = file_of(LAYOUT, VALUES)
    assert (read(data) == VALUES).all()
    tensors = safetensors.numpy.load(data)
    assert set(tensors) == set(KEYS)
    assert np.concatenate([tensors[key].reshape(-1) for key in KEYS]).tolist() == VALUES.tolist()


def test_data_may_come_in_another_order_than_the_layouts() -> None:
    data = safetensors.numpy.save(
        {
            KEYS[2]: VALUES[10:].reshape(()),
            KEYS[1]: VALUES[6:10] + 100,
            KEYS[0]: VALUES[:6].reshape(2, 3) + 200,
        }
    )
    assert data.index(struct.pack("<f", 10)) < data.index(struct.pack("<f", 200)), "the library writes names in order"
    for piece_bytes in (1, 5, 4096):
        assert read(data, piece_bytes).tolist() == [*(VALUES[:6] + 200), *(VALUES[6:10] + 100), 10]


def test_a_range_takes_only_its_own_tensors() -> None:
    header = header_bytes({"__metadata__": ("float32", (4,))}, {})
    out = read(header + b"".join(tensor_bytes(VALUES[6:10])), first=6, numel=4)
    assert out[6:10].tolist() == VALUES[6:10].tolist()
    assert np.isnan(out[:6]).all()
    assert np.isnan(out[10:]).all()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"a": {"shape": [3, 2]}}, WireReason.LAYOUT),
        ({"a": {"dtype": "I32"}}, WireReason.LAYOUT),
        ({"a": {"data_offsets": [0, 23]}}, WireReason.LAYOUT),
        ({"a": {"data_offsets": [4, 28]}}, WireReason.LAYOUT),  # overlaps the next, and leaves a gap in front
        ({KEYS[1]: {"data_offsets": [0, 16]}}, WireReason.LAYOUT),  # lies on the first tensor
        ({KEYS[2]: {"data_offsets": [44, 48]}}, WireReason.LAYOUT),  # leaves a gap
        ({"a": {"data_offsets": [-24, 0]}}, WireReason.LAYOUT),
        ({"a": {"data_offsets": [0.0, 24.0]}}, WireReason.BAD_HEADER),
        ({"a": {"data_offsets": [0]}}, WireReason.BAD_HEADER),
        ({"a": {"data_offsets": None}}, WireReason.BAD_HEADER),
        ({"a": None}, WireReason.BAD_HEADER),
    ],
)
def test_a_header_that_is_not_the_layouts_is_refused(entries: dict[str, Any], reason: WireReason) -> None:
    assert reason_of(changed(**entries)) is reason


@pytest.mark.parametrize("text", [b"[]", b"{", b"null", b"[" * 100_000, b"\xff\xff", b'{"a": 3}'])
def test_a_header_that_is_no_object_of_tensors_is_refused(text: bytes) -> None:
    assert reason_of(struct.pack("<Q", len(text)) + text) is WireReason.BAD_HEADER


@pytest.mark.parametrize(("first", "numel"), [(0, 5), (1, 10), (0, 8), (7, 4)])
def test_a_tensor_that_the_range_cuts_is_refused(first: int, numel: int) -> None:
    assert reason_of(file_of(LAYOUT, VALUES), first, numel) in {WireReason.LAYOUT, WireReason.BAD_HEADER}


def test_a_file_that_ends_early_or_late_is_refused() -> None:
    data = file_of(LAYOUT, VALUES)
    for end in (0, 7, 8, 100, len(data) - 1):
        assert reason_of(data[:end]) is WireReason.TRUNCATED
    assert reason_of(data + b"\0") is WireReason.LAYOUT


def test_an_oversized_header_is_refused_before_it_is_kept() -> None:
    assert reason_of(struct.pack("<Q", MAX_HEADER_BYTES + 1)) is WireReason.TOO_LARGE
    assert reason_of(bytes(8)) is WireReason.BAD_HEADER


def test_an_element_type_that_is_not_written_is_named() -> None:
    with pytest.raises(ValueError, match="int8"):
        header_bytes({"a": ("int8", (2,))}, {})
