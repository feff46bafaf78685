"""HTTP/2 below gRPC, for peers that say what no gRPC library says."""

from __future__ import annotations

import struct
from typing import Final


def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


# What a client's connection begins with.
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, b"")


def literal(name: str, value: str) -> bytes:
    """Returns one header, not compressed."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def header_block(method: str) -> bytes:
    """Returns the headers of a call of `method`, for a HEADERS frame."""
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(literal(name, value) for name, value in headers.items())
