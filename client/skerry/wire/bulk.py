"""The two messages that carry weights, in protobuf's format but without its library, which copies them several times.

Here a message is written with one copy, and read in place. The classes stand for protobuf's: they serialize to the
same bytes and have those of its methods that callers use; every field but `data` is empty. Messages of any other shape
are parsed by protobuf.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal, NamedTuple, cast

from google.protobuf.message import Message

from skerry.v1 import exchange_pb2 as v1

# Tags of fields: their number, and the kind of what follows.
_PUSH_DATA, _PULL_DATA = 3 << 3 | 2, 2 << 3 | 2
_OBJECT_INDEX, _OFFSET, _DATA = 1 << 3, 2 << 3, 3 << 3 | 2
# Fewer bytes are copied: a view of them would take about as much memory.
_SMALLEST_VIEW_BYTES: Final = 2**10


class PullData(NamedTuple):
    """Bytes of an object of a plan, and where they lie in it; stands for protobuf's `PullData`."""

    object_index: int
    offset: int
    data: bytes | memoryview


class _DataMessage:
    _EMPTY: ClassVar[Message]

    def __init__(self, data: bytes | memoryview | PullData, head: bytes, payload: bytes | memoryview) -> None:
        self.data = data
        self._head, self._payload = head, payload

    def __getattr__(self, name: str) -> Any:
        """Returns what protobuf has in a field that is not set; nothing may be written to it."""
        if name not in self._EMPTY.DESCRIPTOR.fields_by_name:
            raise AttributeError(name)
        return getattr(self._EMPTY, name)

    # As protobuf's, whose names they have.

    def HasField(self, name: str) -> bool:  # noqa: N802
        return name == "data"

    def WhichOneof(self, _: str) -> Literal["data"]:  # noqa: N802
        return "data"

    def ByteSize(self) -> int:  # noqa: N802
        return len(self._head) + len(self._payload)

    def SerializeToString(self) -> bytes:  # noqa: N802
        return b"".join((self._head, self._payload))


class DataRequest(_DataMessage):
    """A `PushDeltaRequest` with `data`."""

    _EMPTY = v1.PushDeltaRequest()

    @staticmethod
    def FromString(message: bytes) -> v1.PushDeltaRequest:  # noqa: N802 - protobuf's name
        """Returns any request; its data may be a view of `message`.

        Raises:
            DecodeError: it is not a `PushDeltaRequest`.
        """
        length, at = _number_after(message, 0, _PUSH_DATA)
        if length and at + length == len(message):
            return data_request(_rest(message, at))
        return v1.PushDeltaRequest.FromString(message)


class DataResponse(_DataMessage):
    """A `PullFragmentResponse` with `data`."""

    _EMPTY = v1.PullFragmentResponse()

    @staticmethod
    def FromString(message: bytes) -> v1.PullFragmentResponse:  # noqa: N802 - protobuf's name
        """Returns any response; its data may be a view of `message`.

        Raises:
            DecodeError: it is not a `PullFragmentResponse`.
        """
        inner, at = _number_after(message, 0, _PULL_DATA)
        if inner and at + inner == len(message):
            index, at = _number_after(message, at, _OBJECT_INDEX)
            offset, at = _number_after(message, at, _OFFSET, longest=9)
            length, at = _number_after(message, at, _DATA)
            if length and at + length == len(message):
                return data_response(index, offset, _rest(message, at))
        return v1.PullFragmentResponse.FromString(message)


def data_request(data: bytes | memoryview) -> v1.PushDeltaRequest:
    """Returns a request with `data`."""
    return cast("v1.PushDeltaRequest", DataRequest(data, _head(_PUSH_DATA, len(data)), data))


def data_response(object_index: int, offset: int, data: bytes | memoryview) -> v1.PullFragmentResponse:
    """Returns a response with `data`."""
    fields = ((_OBJECT_INDEX, object_index), (_OFFSET, offset), (_DATA, len(data)))
    inner = b"".join(_head(tag, number) for tag, number in fields if number)
    head = _head(_PULL_DATA, len(inner) + len(data)) + inner
    return cast("v1.PullFragmentResponse", DataResponse(PullData(object_index, offset, data), head, data))


def serialized(message: Any) -> bytes:
    """Returns the bytes of a message, protobuf's or one that stands for it."""
    data: bytes = message.SerializeToString()
    return data


def _head(tag: int, number: int) -> bytes:
    """Returns a tag and a number, at least 0, as protobuf writes them."""
    written = bytearray([tag])
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def _number_after(message: bytes, at: int, tag: int, *, longest: int = 4) -> tuple[int, int]:
    """Returns the number after `tag` and where it ends; 0 and `at` if no such tag is there.

    The same if the number has more than `longest` bytes, which is left to protobuf: an index of 5 bytes may be beyond
    32 bits, and an offset of 10 is negative.
    """
    if at >= len(message) or message[at] != tag:
        return 0, at
    number = 0
    for nth, byte in enumerate(message[at + 1 : at + 1 + longest]):
        number |= (byte & 0x7F) << 7 * nth
        if byte < 0x80:
            return number, at + 2 + nth
    return 0, at


def _rest(message: bytes, at: int) -> bytes | memoryview:
    """Returns the message from `at` on: a view, unless it is short."""
    return message[at:] if len(message) < _SMALLEST_VIEW_BYTES else memoryview(message)[at:]
