"""How fast fragments are encoded and decoded on one core, and how small they get.

    python -m benchmarks.codecs [--numel 16777216] [--samples 5]

Throughput is of float32 on the caller's side, in GB/s. It is set against copying that memory, and against zstd alone on
the very bytes that the codec hands it, in the same unit. `a / b` names the measured action and the limit of the row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.report import Row, measured, write_rows
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.frames import decode_frames, encode_frames, parse_frames, raw_bytes

COLUMNS: Final = 4096
SEED: Final = 20260


def distributions(numel: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield `(name, values)`: how well codes compress depends on how far a block's largest value stands out."""
    generator = np.random.default_rng(SEED)
    yield "normal", generator.standard_normal(numel, np.float32)
    yield "heavy tails", generator.standard_t(4, numel).astype(np.float32)


def rates(actions: dict[str, Callable[[], object]], size_bytes: int, samples: int) -> dict[str, list[float]]:
    """Return GB/s of `samples` runs of each action, after one that warms up.

    Actions take turns, so that a neighbour who comes and goes slows all of them alike and ratios hold.
    """
    for action in actions.values():
        action()
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(samples):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            found[name].append(size_bytes / (time.perf_counter() - start) / 1e9)
    return found


def exhaust(items: Iterable[object]) -> None:
    """Take all items and keep none: results of one frame are freed before the next, as a sender would."""
    deque(items, maxlen=0)


def codec_rows(name: str, codec: Codec, values: NDArray[np.float32], samples: int) -> Iterator[Row]:
    """Measure one codec on one distribution."""
    case = f"{codec}, {name}"
    layout = layout_of(values)
    encoding, plain = Encoding(codec), Encoding(codec, compressor=Compressor.NONE)
    out = np.empty_like(values)
    buffer = b"".join(encode_frames(values, layout, encoding))
    codes = [raw_bytes(frame) for frame in parse_frames(buffer)]
    compressor, decompressor = zstandard.ZstdCompressor(level=encoding.level), zstandard.ZstdDecompressor()
    compressed = [compressor.compress(code) for code in codes]
    found = rates(
        {
            "memcpy": lambda: np.copyto(out, values),
            "zstd alone": lambda: exhaust(map(compressor.compress, codes)),
            "zstd alone, back": lambda: exhaust(map(decompressor.decompress, compressed)),
            "encode": lambda: exhaust(encode_frames(values, layout, encoding)),
            "encode and tell what is decoded": lambda: exhaust(encode_frames(values, layout, encoding, decoded=out)),
            "encode without zstd": lambda: exhaust(encode_frames(values, layout, plain)),
            "decode": lambda: decode_frames(buffer, layout, out),
        },
        values.nbytes,
        samples,
    )
    for action, limit in (
        ("encode", "memcpy"),
        ("encode", "zstd alone"),
        ("encode and tell what is decoded", "memcpy"),
        ("encode without zstd", "memcpy"),
        ("decode", "memcpy"),
        ("decode", "zstd alone, back"),
    ):
        yield measured(case, f"{action} / {limit}", found[action], "GB/s", limit=statistics.median(found[limit]))
    size = 8 * len(buffer) / len(values)
    yield measured(case, "size / codes without scales", [size], "bits/parameter", limit=codec.bits)


def layout_of(values: NDArray[np.float32]) -> FragmentLayout:
    """Return a fragment of one matrix."""
    return FragmentLayout("fragment", (TensorSpec("matrix", (len(values) // COLUMNS, COLUMNS)),))


def gpu_rows(name: str, codec: Codec, values: NDArray[np.float32], samples: int) -> Iterator[Row]:
    """Measure the torch encoder where there is a GPU: against copying all of the float32 values to the host."""
    try:
        import torch

        from skerry.wire.torch_codecs import encode_frames_torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    layout, tensor = layout_of(values), torch.from_numpy(values).cuda()
    encoding, plain = Encoding(codec), Encoding(codec, compressor=Compressor.NONE)
    found = rates(
        {
            "copy of float32 to the host": tensor.cpu,
            "encode from the GPU": lambda: exhaust(encode_frames_torch(tensor, layout, encoding)),
            "encode from the GPU without zstd": lambda: exhaust(encode_frames_torch(tensor, layout, plain)),
        },
        values.nbytes,
        samples,
    )
    copying = found.pop("copy of float32 to the host")
    for action, achieved in found.items():
        metric = f"{action} / copy of float32 to the host"
        yield measured(f"{codec}, {name}", metric, achieved, "GB/s", limit=statistics.median(copying))


def main() -> None:
    """Measure every codec, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2**24, help="elements of the fragment, rounded to whole rows")
    parser.add_argument("--samples", type=int, default=5, help="measurements of each value")
    arguments = parser.parse_args()
    numel = max(arguments.numel // COLUMNS, 1) * COLUMNS
    rows = [
        row
        for name, values in distributions(numel)
        for codec in Codec
        for measure in (codec_rows, gpu_rows)
        for row in measure(name, codec, values, arguments.samples)
    ]
    write_rows("codecs", rows)


if __name__ == "__main__":
    main()
