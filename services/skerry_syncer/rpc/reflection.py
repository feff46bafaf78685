"""Reflection under both of its names: grpcio-reflection has `v1alpha` alone, newer tools ask for `v1` alone.

The two differ only in the package, so one servicer answers for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_ALPHA: Final = reflection.SERVICE_NAME
_V1: Final = _ALPHA.replace("v1alpha", "v1")


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds reflection to `server`, which describes `services` and itself."""
    _describe_v1()
    aio = reflection.aio  # type: ignore[attr-defined]  # missing in its stub alone
    servicer = aio.ReflectionServicer((*services, _ALPHA, _V1))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_V1, {"ServerReflectionInfo": method})])


def _describe_v1() -> None:
    """Makes the descriptor of `v1` known, without which a tool that describes every listed service would fail."""
    alpha = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    v1 = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    described = text_format.Parse(v1, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(described.SerializeToString())
