"""Encoding and decoding on one core, in Gparam/s of CPU time, beside copying the input and the sum of the parts' times.

`a / b` names the measured action and the limit of its row. Error feedback is part of every encoding: the encoder
also writes what the receiver will decode. "Frames" are those of the wire, with header and checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from benchmarks.report import Row
from benchmarks.speed.measuring import SEED, Size, alternate, exhaust, paired, rates
from benchmarks.speed.models import layout_of
from skerry.algorithm.step import accumulate
from skerry.wire.codecs import Codec, Compressor, Encoding, cut_frames
from skerry.wire.frames import encode_frames, parse_frames, quantise_cut, raw_bytes
from skerry.wire.layout import FragmentLayout

Float32s = NDArray[np.float32]


def rows(size: Size) -> Iterator[Row]:
    """Every codec on normal values."""
    layout = layout_of(size.pick(2**24, 2**21))
    values = np.random.default_rng(SEED).standard_normal(layout.numel, np.float32)
    for codec in (Codec.INT4, Codec.INT8, Codec.FLOAT32):
        yield from _codec_rows(codec, values, layout, size.samples)


def _codec_rows(codec: Codec, values: Float32s, layout: FragmentLayout, samples: int) -> Iterator[Row]:
    encoding, plain = Encoding(codec), Encoding(codec, compressor=Compressor.NONE)
    out, acc, ones = np.empty_like(values), np.zeros_like(values), np.ones(len(layout.tensors), np.float32)
    stored = b"".join(encode_frames(values, layout, plain))
    buffer = b"".join(encode_frames(values, layout, encoding))
    codes = [raw_bytes(frame) for frame in parse_frames(stored)]
    zstd = zstandard.ZstdCompressor(level=1)
    cuts, frames = list(cut_frames(layout, encoding, 0, layout.numel)), list(parse_frames(stored))

    def quantise() -> None:
        for cut in cuts:
            inside = slice(cut.first, cut.first + cut.numel)
            quantise_cut(values[inside], layout, cut, decoded=out[inside])

    actions: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: np.copyto(out, values),
        "quantise alone": quantise,
        "accumulate alone": lambda: accumulate(acc, frames, layout, ones, is_first=False),
        "quantise": lambda: exhaust(encode_frames(values, layout, plain, decoded=out)),
        "encode": lambda: exhaust(encode_frames(values, layout, encoding, decoded=out, digest=blake3())),
        "zstd": lambda: exhaust(map(zstd.compress, codes)),
        "digest": lambda: exhaust(map(blake3().update, codes)),
        "accumulate": lambda: accumulate(acc, parse_frames(stored), layout, ones, is_first=False),
    }
    seconds = alternate(actions, samples, clock=time.process_time)
    found = {name: rates(layout.numel / 1e9, one) for name, one in seconds.items()}
    # Quantising already makes frames with their checksum over codes that are not compressed yet, as float32 never is.
    parts = [found[part] for part in ("quantise", "digest", "zstd")][: 2 if codec is Codec.FLOAT32 else 3]
    implied = [1 / sum(1 / rate for rate in one) for one in zip(*parts, strict=True)]
    case, unit = f"{codec}, {layout.numel / 1e6:.3g}M normal values", "Gparam/s"
    copying = found["memcpy"]
    yield paired(case, "quantise, with error feedback / memcpy", found["quantise alone"], unit, limits=copying)
    yield paired(case, "decode and accumulate / memcpy", found["accumulate alone"], unit, limits=copying)
    yield paired(case, "quantise to frames, with error feedback / memcpy", found["quantise"], unit, limits=copying)
    yield paired(case, "decode frames and accumulate / memcpy", found["accumulate"], unit, limits=copying)
    yield paired(case, "encode end to end / its parts one after another", found["encode"], unit, limits=implied)
    bits = 8 * len(buffer) / layout.numel
    yield Row(case, "size / codes without scales", bits, "bits/parameter", codec.bits, bits / codec.bits)
