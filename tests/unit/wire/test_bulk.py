"""The messages that carry weights are protobuf's, byte for byte, and nothing else is taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from skerry.v1 import exchange_pb2 as v1
from skerry.wire.bulk import DataRequest, DataResponse, data_request, data_response

EDGES = (0, 1, 127, 128, 2**14, 2**28 - 1, 2**28)
INDEXES = st.integers(0, 2**31 - 1) | st.sampled_from(EDGES)
OFFSETS = st.integers(0, 2**63 - 1) | st.sampled_from((*EDGES, 2**35, 2**63 - 1))
DATA = st.binary(max_size=300) | st.sampled_from([bytes(size) for size in (127, 128, 1023, 1024, 2**14, 2**20)])


@given(DATA)
def test_a_request_with_data_is_protobufs(data: bytes) -> None:
    message = v1.PushDeltaRequest(data=data)
    request = data_request(memoryview(data))

    assert request.SerializeToString() == message.SerializeToString()
    assert request.ByteSize() == message.ByteSize()
    read = DataRequest.FromString(message.SerializeToString())
    assert isinstance(read, DataRequest if data else v1.PushDeltaRequest)
    assert (read.WhichOneof("kind"), read.HasField("part_end"), read.data) == ("data", False, data)
    assert isinstance(read.data, memoryview) == (message.ByteSize() >= 1024)
    assert read.SerializeToString() == message.SerializeToString()


@given(INDEXES, OFFSETS, DATA)
def test_a_response_with_data_is_protobufs(object_index: int, offset: int, data: bytes) -> None:
    message = v1.PullFragmentResponse(data=v1.PullData(object_index=object_index, offset=offset, data=data))
    response = data_response(object_index, offset, memoryview(data))

    assert response.SerializeToString() == message.SerializeToString()
    assert response.ByteSize() == message.ByteSize()
    read = DataResponse.FromString(message.SerializeToString())
    assert isinstance(read, DataResponse if data and object_index < 2**28 else v1.PullFragmentResponse)
    assert (read.HasField("data"), read.HasField("plan")) == (True, False)
    assert (read.data.object_index, read.data.offset, read.data.data) == (object_index, offset, data)
    assert read.SerializeToString() == message.SerializeToString()


def test_fields_that_are_not_set_are_empty() -> None:
    request = data_request(b"weights")
    assert request.header == v1.PushHeader()
    assert request.part.size_bytes == 0
    assert data_response(0, 0, b"weights").plan == v1.PullPlan()
    with pytest.raises(AttributeError):
        request.MergeFrom(v1.PushDeltaRequest())


def _varint(source: random.Random) -> bytes:
    """A number of any size; sometimes in more bytes than it needs, or without an end."""
    number = source.choice((0, 1, 7, 300, 2**28 - 1, 2**28, 2**31, 2**32 + 3, 2**63, 2**64 - 1, 2**70))
    low = [number >> 7 * nth & 0x7F | 0x80 for nth in range(source.choice((1, 2, 3, 4, 5, 9, 10, 11)))]
    return bytes(low[:-1]) + bytes([low[-1] & 0x7F if source.random() < 0.9 else low[-1]])


def _length(number: int, *, is_short: bool = False) -> bytes:
    return bytes([number & 0x7F]) if is_short else bytes([number & 0x7F | 0x80, number >> 7 & 0x7F])


def _field(source: random.Random, number: int) -> bytes:
    """A field of this number, which may be wrong."""
    kind = source.choice((0, 0, 2, 2, 2, 5))
    tag = bytes([number << 3 | kind])
    if kind == 0:
        return tag + _varint(source)
    content = source.choice((bytes(source.randrange(4)), bytes(200), b"weights", b""))
    if source.random() < 0.4:
        content = b"".join(_field(source, source.choice((1, 2, 3))) for _ in range(source.randrange(4)))
    length = len(content) + source.choice((0, 0, 0, 0, 1, -1))
    return tag + _length(length, is_short=length < 128 and source.random() < 0.8) + content


def _pull_data(source: random.Random, number: int) -> bytes:
    """A field as a response has it, in which something may be out of place."""
    fields = [bytes([tag]) + _varint(source) for tag in (1 << 3, 2 << 3) if source.random() < 0.7]
    content = source.choice((b"weights", bytes(200), bytes(2000)))
    fields.append(bytes([3 << 3 | 2]) + _length(len(content)) + content)
    if source.random() < 0.3:
        source.shuffle(fields)
    if source.random() < 0.3:
        fields.insert(source.randrange(3), _field(source, source.choice((1, 2, 3, 4))))
    inner = b"".join(fields)
    length = len(inner) + source.choice((0, 0, 0, 0, 0, 1, -1, -200))
    return bytes([number << 3 | 2]) + _length(length) + inner


def _message(source: random.Random) -> bytes:
    makers: tuple[Callable[[random.Random, int], bytes], ...] = (_field, _pull_data, _pull_data)
    count = source.choice((1, 1, 1, 1, 2, 3))
    return b"".join(source.choice(makers)(source, source.choice((1, 2, 2, 3, 3, 4))) for _ in range(count))


def _content(message: Any) -> object:
    """What a message says, as far as it is about data."""
    data = message.data
    if isinstance(message, v1.PushDeltaRequest | DataRequest):
        return message.WhichOneof("kind"), bytes(data)
    return message.WhichOneof("kind"), data.object_index, data.offset, bytes(data.data)


@pytest.mark.parametrize(
    ("own", "theirs"), [(DataRequest, v1.PushDeltaRequest), (DataResponse, v1.PullFragmentResponse)]
)
def test_any_bytes_are_read_as_protobuf_reads_them(own: Any, theirs: Any) -> None:
    source, own_count, refused_count = random.Random(7), 0, 0
    for _ in range(20_000):
        data = _message(source)
        try:
            expected = theirs.FromString(data)
        except DecodeError:
            refused_count += 1
            with pytest.raises(DecodeError):
                own.FromString(data)
            continue
        read = own.FromString(data)
        own_count += isinstance(read, own)
        assert _content(read) == _content(expected), data
    assert min(own_count, refused_count) > 500
