"""The `Capabilities` service: the codecs, compressors and limits of this server."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from skerry.v1 import capabilities_pb2, capabilities_pb2_grpc, types_pb2
from skerry.wire import Codec, Compressor
from skerry.wire.codecs import MAX_FRAME_NUMEL
from skerry.wire.messages import enum_to_message
from skerry_syncer.access.limits import MAX_MESSAGE_BYTES
from skerry_syncer.run.lifecycle import MAX_FRAGMENT_NUMEL
from skerry_syncer.run.push import MAX_PART_BYTES, SUGGESTED_PART_BYTES

API_VERSION: Final = "1.0"
_SOFTWARE: Final = importlib.metadata.version("skerry")


class CapabilitiesServicer(capabilities_pb2_grpc.CapabilitiesServicer):
    """Tells clients what this server supports."""

    async def GetCapabilities(
        self, request: capabilities_pb2.GetCapabilitiesRequest, context: Any
    ) -> capabilities_pb2.GetCapabilitiesResponse:
        """Returns codecs, compressors, limits and versions."""
        return capabilities_pb2.GetCapabilitiesResponse(
            api_version=API_VERSION,
            server_version=_SOFTWARE,
            codecs=[enum_to_message(types_pb2.Codec, codec) for codec in Codec],
            compressors=[enum_to_message(types_pb2.Compressor, compressor) for compressor in Compressor],
            max_message_size_bytes=MAX_MESSAGE_BYTES,
            max_frame_numel=MAX_FRAME_NUMEL,
            max_fragment_numel=MAX_FRAGMENT_NUMEL,
            max_part_size_bytes=MAX_PART_BYTES,
            suggested_part_size_bytes=SUGGESTED_PART_BYTES,
        )
