"""Makes wrong inputs of right ones: bytes, JSON, protobuf messages and frames, each with its own structure in mind."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e-300, 1e38, 3.5e38, 1e300),
    *map(float, ("inf", "-inf", "nan")),
)
_TEXTS: Final = (
    *("", "a", "body", "head", "..", "../x", "a/b", "/", "UPPER", "a\0b", "ä"),
    *("x" * 65, "0" * 32, "n" * 5000),
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


def _few(source: Random) -> range:
    return range(1 + int(source.random() ** 2 * 4))


def mutated_bytes(source: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Returns `data` after one to four changes, or a piece of it joined to a piece of another."""
    out = bytearray(data)
    for _ in _few(source):
        start = int(source.random() * (len(out) + 1))
        length = 1 + int(source.random() ** 3 * 64)
        match int(source.random() * 8):
            case 0 | 1 if out:
                out[start - 1] ^= 1 << int(source.random() * 8)
            case 2:
                out[start:start] = source.randbytes(length)
            case 3:
                del out[start : start + length]
            case 4:
                out[start:start] = out[start : start + length] * pick(source, (1, 2, 50))
            case 5:
                del out[start:]
            case 6:
                width = pick(source, (1, 2, 4, 8))
                number = pick(source, INTEGERS) % 2**64
                out[start : start + width] = number.to_bytes(8, pick(source, ("little", "big")))[:width]
            case 7 if others:
                other = pick(source, others)
                out[start:] = other[int(source.random() * (len(other) + 1)) :]
    return bytes(out)


def mutated_json(source: Random, value: Any, others: Sequence[Any] = ()) -> bytes:
    """Returns JSON with one to four changes of a tree's values, keys and lists; seldom of its text alone."""
    for _ in _few(source):
        value = _changed(source, value, others)
    text = msgspec.json.encode(value)
    return mutated_bytes(source, text) if source.random() < 0.1 else text


def _changed(source: Random, value: Any, others: Sequence[Any]) -> Any:
    """Returns a tree after one change; `others` are values that the same place has elsewhere."""
    if isinstance(value, dict | list) and value and source.random() < 0.9:
        elements = dict(enumerate(value)) if isinstance(value, list) else dict(value)
        key = pick(source, list(elements))
        match int(source.random() * 12):
            case 0:
                del elements[key]
            case 1:
                elements[pick(source, ("x", "", "format", "kind"))] = elements[key]
            case 2:
                elements[key] = pick(source, list(elements.values()))
            case _:
                alike = [dict(enumerate(other)) if isinstance(other, list) else other for other in others]
                same = [other[key] for other in alike if isinstance(other, dict) and key in other]
                elements[key] = _changed(source, elements[key], same)
        return list(elements.values()) if isinstance(value, list) else elements
    chance = source.random()
    if others and chance < 0.3:
        return pick(source, others)
    if chance < 0.45:
        return pick(source, _LITERALS)
    return _changed_scalar(source, value)


def _changed_scalar(source: Random, value: Any) -> Any:
    """Returns something like a number, a text or bytes, or an extreme of its type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = pick(source, (value + 1, value - 1, -value, value * 2, value + 0.5))
        return pick(source, (near, near, pick(source, INTEGERS), pick(source, _FLOATS), str(value)))
    if isinstance(value, bytes):
        return mutated_bytes(source, value)
    if isinstance(value, str):
        middle = int(source.random() * (len(value) + 1))
        texts = (value[:middle], value[middle:], value[:middle] + "0" + value[middle + 1 :], value * 2)
        return pick(source, (pick(source, texts), pick(source, _TEXTS)))
    return pick(source, ([value], {"a": value}, None, []))


def mutated_message(source: Random, message: M, others: Sequence[M] = ()) -> M:
    """Returns a copy of `message` with one to four of its fields changed, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in _few(source):
        if others and source.random() < 0.05:
            copy.MergeFrom(pick(source, others))
        _change_message(source, copy)
    return copy


def _change_message(source: Random, message: Message) -> None:
    present: list[Any] = [field for field, _ in message.ListFields()]
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field: FieldDescriptor = pick(source, present if present and source.random() < 0.8 else fields)
    if source.random() < 0.06:
        message.ClearField(field.name)
        return
    value: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        default = field.message_type.fields_by_name["value"].default_value  # a scalar in all maps of this project
        _assign(source, default, lambda changed: value.__setitem__(pick(source, _TEXTS), changed))
    elif field.is_repeated:
        _change_repeated(source, value, field)
    elif field.message_type is not None:
        value.SetInParent()
        _change_message(source, value)
    else:
        _assign(source, value, lambda changed: setattr(message, field.name, changed))


def _change_repeated(source: Random, values: Any, field: FieldDescriptor) -> None:
    index = int(source.random() * (len(values) + 1)) - 1
    chance = source.random()
    if len(values) and chance < 0.1:
        del values[index]
    elif len(values) and chance < 0.25:
        values.extend([values[index]] * pick(source, (1, 1, 2, 100)))
    elif field.message_type is not None:
        _change_message(source, values[index] if len(values) and chance < 0.9 else values.add())
    elif len(values) and chance < 0.8:
        _assign(source, values[index], lambda changed: values.__setitem__(index, changed))
    else:
        is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        _assign(source, "" if is_text else 0, values.append)


def _assign(source: Random, value: Any, assign: Callable[[Any], object]) -> None:
    """Assigns a changed value; one that the field's type can't hold is not assigned, and another one tried."""
    for _ in range(100):
        with suppress(TypeError, ValueError):
            assign(_changed_scalar(source, value))
            return


_HEADER: Final = struct.Struct("<4sBBHQIII")
_MODULI: Final = (0, 2**8, 2**8, 2**16, 2**64, 2**32, 2**32, 2**32)
_COMPRESSOR, _SIZE, _RAW_SIZE = 2, 6, 7


def mutated_frames(source: Random, frames: Sequence[bytes]) -> bytes:
    """Returns frames with changed headers, payloads, order and count; most of them with a right checksum."""
    changed = list(frames)
    for _ in _few(source):
        index = int(source.random() * len(changed))
        match int(source.random() * 12):
            case 0:
                changed.insert(index, pick(source, frames))
            case 1 if len(changed) > 1:
                del changed[index]
            case 2:
                changed[index] = mutated_bytes(source, changed[index], frames)
            case 3:
                changed = changed[index:] + changed[:index]
            case _:
                changed[index] = _mutated_frame(source, changed[index])
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
    elif chance < 0.5 and fields[_COMPRESSOR] == 0:  # the same codes, compressed: honestly, or for another size
        raw = payload if source.random() < 0.5 else mutated_bytes(source, payload)
        payload = zstandard.compress(raw, 1)
        fields[_COMPRESSOR], fields[_RAW_SIZE] = 1, pick(source, (fields[_RAW_SIZE], len(raw)))
    elif chance < 0.6:
        payload = _compressed_zeros(pick(source, (0, 1, 2**10, 2**20)))
        fields[_COMPRESSOR] = 1
    if chance < 0.6:
        fields[_SIZE] = len(payload)
    else:
        index = 1 + int(source.random() * 7)
        value = pick(source, (pick(source, INTEGERS), fields[index] + 1, fields[index] - 1))
        fields[index] = value % _MODULI[index]
    header = _HEADER.pack(*fields)
    checksum = zlib.crc32(payload, zlib.crc32(header)) if source.random() < 0.95 else 0
    return header + struct.pack("<I", checksum) + payload
