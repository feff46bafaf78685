"""Deltas of a tensor's bytes."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from skerry import CorruptDownloadError
from skerry.checkpoints.deltas import ENCODINGS, apply, encode

PAIRS = st.integers(1, 200).flatmap(lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2))


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(pair=PAIRS)
def test_a_delta_gives_the_new_bytes_of_the_old_ones(encoding: str, pair: tuple[bytes, bytes]) -> None:
    old, new = (np.frombuffer(data, np.uint8) for data in pair)
    data = old.copy()
    apply(data, encode(old, new, encoding), encoding)
    assert data.tobytes() == new.tobytes()


def test_deltas_have_the_layout_that_other_receivers_read() -> None:
    old, new = np.array([1, 2, 3, 4], np.uint8), np.array([1, 7, 3, 5], np.uint8)
    unpack = zstandard.ZstdDecompressor().decompress
    assert unpack(encode(old, new, "xor")) == bytes([0, 5, 0, 1])
    assert unpack(encode(old, new, "overwrite")) == b"\2\0\0\0" + b"\1\0\0\0" + b"\3\0\0\0" + bytes([7, 5])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("wrong", ["another tensor's", "cut", "not compressed"])
def test_a_delta_of_other_bytes_is_refused(encoding: str, wrong: str) -> None:
    old, new = np.zeros(100, np.uint8), np.arange(100, dtype=np.uint8)
    delta = encode(old, new, encoding)
    delta = {"another tensor's": delta, "cut": delta[:-3], "not compressed": new.tobytes()}[wrong]
    with pytest.raises(CorruptDownloadError, match="delta can't be applied"):
        apply(old[:50], delta, encoding)
