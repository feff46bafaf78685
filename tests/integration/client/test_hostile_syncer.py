"""A client against a server that means it harm."""

from __future__ import annotations

import asyncio
import gzip
import struct
import sys

from tests.support.http2 import http2, literal

ZEROS = gzip.compress(bytes(50 * 2**20))
CLIENT = """
import asyncio, resource, sys
from skerry import SkerryError
from skerry.net.grpc_transport import GrpcTransport
from skerry.v1 import capabilities_pb2

async def main():
    transport = GrpcTransport(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        await transport.get_capabilities(capabilities_pb2.GetCapabilitiesRequest(), timeout_s=20)
    except SkerryError as error:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
    await transport.close()

asyncio.run(main())
"""


async def _answer_inflatable(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the connection's first call with zeros that gRPC's compression makes a thousandth of.

    grpcio's own server would not: it compresses for no client that does not accept it.
    """
    message = struct.pack(">BI", 1, len(ZEROS)) + ZEROS
    headers = b"\x88" + literal("content-type", "application/grpc") + literal("grpc-encoding", "gzip")
    writer.write(http2(4, 0, 0, b""))
    await reader.readexactly(24)
    while (head := await reader.readexactly(9))[3] != 1:  # until the call begins
        await reader.readexactly(int.from_bytes(head[:3]))
    writer.write(http2(1, 4, 1, headers))
    for at in range(0, len(message), 2**14):
        writer.write(http2(0, 0, 1, message[at : at + 2**14]))
    writer.write(http2(1, 5, 1, literal("grpc-status", "0")))
    await writer.drain()
    await reader.read(-1)
    writer.close()


async def test_answers_that_grpc_compressed_are_refused_and_not_inflated() -> None:
    server = await asyncio.start_server(_answer_inflatable, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, f"127.0.0.1:{port}"), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await client.communicate()
    server.close()
    grown_kib, message = said.decode().split(" ", 1)
    assert (int(grown_kib) < 2**14, "gzip" in message) == (True, True), said
