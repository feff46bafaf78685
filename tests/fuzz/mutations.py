"""Makes wrong inputs of right ones: bytes, JSON, protobuf messages and frames, each with its own structure in mind."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any, Final, TypeVar

import msgspec
import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)

# Numbers at the ends of the types that somebody may keep them in.
INTEGERS: Final = (
    *(0, 1, -1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**18, 2**18 + 1, 2**24, 10**6),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**53 + 1, 2**62, 2**63 - 1, -(2**31), -(2**63)),
)
_FLOATS: Final = (
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    1e-45,
    1e-300,
    1e38,
    3.5e38,
    1e300,
    float("inf"),
    -float("inf"),
    float("nan"),
)
_TEXTS: Final = (
    "",
    "a",
    "body",
    "head",
    "..",
    "../x",
    "a/b",
    "/",
    "x" * 65,
    "UPPER",
    "a\0b",
    "ä",
    "0" * 32,
    "n" * 5000,
)
_LITERALS: Final = tuple(
    msgspec.Raw(text)
    for text in (
        *(b"null", b"true", b"false", b"{}", b"[]", b'""', b"0", b"-0", b"0.5", b"1e5", b"1e400", b"-1e400", b"1e-400"),
        *(b"NaN", b"Infinity", b"-Infinity", b"1" + b"0" * 400, b"9" * 5000, b"9223372036854775808", b"-1"),
        *(b'"\\ud800"', b'"a\\u0000b"', b'"../x"', b'"' + b"n" * 5000 + b'"', b"[[]]", b'[{"a":[]}]', b'"0x1p3"'),
        *(b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[0" + b",0" * 3000 + b"]"),
    )
)


def pick(source: Random, among: Sequence[T]) -> T:
    """Returns one of `among`."""
    return among[int(source.random() * len(among))]


def mutated_bytes(source: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Returns `data` after one to four changes, or a piece of it joined to a piece of another."""
    out = bytearray(data)
    for _ in range(1 + int(source.random() ** 2 * 4)):
        size = len(out)
        at = int(source.random() * (size + 1))
        length = 1 + int(source.random() ** 3 * 64)
        match int(source.random() * 9):
            case 0 | 1 if size:
                out[at - 1] ^= 1 << int(source.random() * 8)
            case 2 if size:
                out[at - 1] = int(source.random() * 256)
            case 3:
                out[at:at] = source.randbytes(length)
            case 4:
                del out[at : at + length]
            case 5:
                out[at:at] = out[at : at + length] * pick(source, (1, 2, 50))
            case 6:
                del out[at:]
            case 7:
                number = pick(source, INTEGERS) % 2**64
                width = pick(source, (1, 2, 4, 8))
                out[at : at + width] = number.to_bytes(8, pick(source, ("little", "big")))[:width]
            case 8 if others:
                other = pick(source, others)
                out[at:] = other[int(source.random() * (len(other) + 1)) :]
    return bytes(out)


def mutated_json(source: Random, value: Any, others: Sequence[Any] = ()) -> bytes:
    """Returns JSON with one to four changes of a tree's values, keys and lists; seldom of its text alone."""
    for _ in range(1 + int(source.random() ** 2 * 4)):
        value = _changed(source, value, others)
    text = msgspec.json.encode(value)
    return mutated_bytes(source, text) if source.random() < 0.1 else text


def _changed(source: Random, value: Any, others: Sequence[Any]) -> Any:
    if isinstance(value, dict) and value and source.random() < 0.9:
        return _changed_object(source, value, others)
    if isinstance(value, list) and value and source.random() < 0.85:
        at = int(source.random() * len(value))
        match int(source.random() * 8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[: at + 1] + value[at:]
            case 2:
                return [*value[at:], *value[:at]]
            case _:
                following = [one[at] for one in others if isinstance(one, list) and len(one) > at]
                return [*value[:at], _changed(source, value[at], following), *value[at + 1 :]]
    return _changed_value(source, value, others)


def _changed_object(source: Random, value: dict[str, Any], others: Sequence[Any]) -> Any:
    key = pick(source, list(value))
    changed = dict(value)
    match int(source.random() * 14):
        case 0:
            del changed[key]
        case 1:
            changed[pick(source, ("x", "", "format", "kind", key + "s"))] = changed.pop(key)
        case 2:
            changed[key] = value[pick(source, list(value))]
        case _:
            changed[key] = _changed(
                source, value[key], [one[key] for one in others if isinstance(one, dict) and key in one]
            )
    return changed


def _changed_value(source: Random, value: Any, others: Sequence[Any]) -> Any:
    chance = source.random()
    if others and chance < 0.3:
        return pick(source, others)
    if chance < 0.45:
        return pick(source, _LITERALS)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return pick(source, (value + 1, value - 1, -value, value * 2, value + 0.5, pick(source, INTEGERS), str(value)))
    if isinstance(value, str):
        at = int(source.random() * (len(value) + 1))
        return pick(
            source, (value[:at], value[at:], value[:at] + "0" + value[at + 1 :], value * 2, pick(source, _TEXTS))
        )
    return pick(source, ([value], {"a": value}, None, []))


def mutated_message(source: Random, message: M, others: Sequence[M] = ()) -> M:
    """Returns a copy of `message` with one to four of its fields changed, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(1 + int(source.random() ** 2 * 4)):
        if others and source.random() < 0.05:
            copy.MergeFrom(pick(source, others))
        _change_message(source, copy)
    return copy


def _change_message(source: Random, message: Message) -> None:
    given = message.ListFields()
    field: FieldDescriptor
    if given and source.random() < 0.8:
        field = pick(source, given)[0]
        if source.random() < 0.08:
            message.ClearField(field.name)
            return
    elif message.DESCRIPTOR.fields:
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        field = pick(source, fields)
    else:
        return
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]  # a scalar in all maps of this project
        value[pick(source, _TEXTS)] = _scalar(source, kind, kind.default_value)
    elif field.is_repeated:
        _change_repeated(source, value, field)
    elif field.message_type is not None:
        value.SetInParent()
        _change_message(source, value)
    else:
        setattr(message, field.name, _scalar(source, field, value))


def _change_repeated(source: Random, values: Any, field: FieldDescriptor) -> None:
    at = int(source.random() * (len(values) + 1)) - 1
    chance = source.random()
    if len(values) and chance < 0.1:
        del values[at]
    elif len(values) and chance < 0.25:
        values.extend([values[at]] * pick(source, (1, 1, 2, 100)))
    elif field.message_type is not None:
        _change_message(source, values[at] if len(values) and chance < 0.9 else values.add())
    elif len(values) and chance < 0.8:
        values[at] = _scalar(source, field, values[at])
    else:
        values.append(_scalar(source, field, field.default_value or (0 if field.cpp_type not in _TEXT_TYPES else "")))


_TEXT_TYPES: Final = (FieldDescriptor.CPPTYPE_STRING,)
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _scalar(source: Random, field: FieldDescriptor, value: Any) -> Any:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return min(max(pick(source, (value + 1, value - 1, -value, value * 2, *INTEGERS)), low), high)
    if field.cpp_type in {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}:
        return pick(source, (*_FLOATS, -value, value + 1))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutated_bytes(source, bytes(value) if value else b"")
    at = int(source.random() * (len(value or "") + 1))
    return pick(source, (*_TEXTS, (value or "")[:at], (value or "") + "x"))


_HEADER: Final = struct.Struct("<4sBBHQIII")
_FIELD_VALUES: Final[tuple[tuple[int, ...], ...]] = (
    (),
    (0, 1, 2, 3, 4, 5, 6, 255),
    (0, 1, 2, 255),
    (0, 1, 7, 8, 16, 128, 4096, 65535),
    INTEGERS,
    INTEGERS,
    INTEGERS,
    INTEGERS,
)
_MODULI: Final = (0, 2**8, 2**8, 2**16, 2**64, 2**32, 2**32, 2**32)


def mutated_frames(source: Random, frames: Sequence[bytes]) -> bytes:
    """Returns frames with changed headers, payloads, order and count; most of them with a right checksum."""
    changed = list(frames)
    for _ in range(1 + int(source.random() ** 2 * 3)):
        at = int(source.random() * len(changed))
        match int(source.random() * 12):
            case 0:
                changed.insert(at, pick(source, frames))
            case 1 if len(changed) > 1:
                del changed[at]
            case 2:
                changed[at] = mutated_bytes(source, changed[at], frames)
            case 3:
                changed = changed[at:] + changed[:at]
            case _:
                changed[at] = _mutated_frame(source, changed[at])
    joined = b"".join(changed)
    return mutated_bytes(source, joined) if source.random() < 0.03 else joined


@cache
def _compressed_zeros(size: int) -> bytes:
    return zstandard.compress(bytes(size), 1)


def _mutated_frame(source: Random, frame: bytes) -> bytes:
    if len(frame) < _HEADER.size + 4:
        return frame
    fields = list(_HEADER.unpack_from(frame))
    payload = frame[_HEADER.size + 4 :]
    chance = source.random()
    if chance < 0.35:
        payload = mutated_bytes(source, payload)
        fields[6] = len(payload)
    elif chance < 0.5 and fields[2] == 0:  # the same codes, compressed: honestly, or for a size that is not theirs
        raw = payload if source.random() < 0.5 else mutated_bytes(source, payload)
        payload = zstandard.compress(raw, 1)
        fields[2], fields[6] = 1, len(payload)
        fields[7] = pick(source, (fields[7], len(raw)))
    elif chance < 0.6:
        payload = _compressed_zeros(pick(source, (0, 1, 2**10, 2**20)))
        fields[2], fields[6] = 1, len(payload)
    else:
        index = 1 + int(source.random() * 7)
        value = pick(source, _FIELD_VALUES[index])
        fields[index] = pick(source, (value, fields[index] + 1, fields[index] - 1)) % _MODULI[index]
    header = _HEADER.pack(*fields)
    checksum = zlib.crc32(payload, zlib.crc32(header)) if source.random() < 0.95 else 0
    return header + struct.pack("<I", checksum) + payload
