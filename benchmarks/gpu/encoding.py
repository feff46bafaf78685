"""Deltas quantised on the device, in Gparam/s, beside copying float32 there and to the host, and one core of the host.

Encoding includes error feedback, so what a receiver decodes is written too. Frames hold codes that are copied to the
host, with header and checksum. Every encoding is compared, byte by byte, with the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.part_run import PartRun
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import SEED, alternate, exhaust, paired, rates
from benchmarks.speed.models import layout_of
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout
from skerry.wire.torch_codecs import encode_frames_torch

_CODECS = (Codec.INT4, Codec.INT8, Codec.FLOAT32)


def rows(run: PartRun) -> Iterator[Row]:
    """Fragments of 4 and of 100 million parameters."""
    for numel in (run.pick(4_000_000, 100_000), run.pick(100_000_000, 400_000)):
        layout = layout_of(numel)
        values = np.random.default_rng(SEED).standard_normal(layout.numel, np.float32)
        for codec in _CODECS:
            yield from _codec_rows(codec, values, layout, run)


def _codec_rows(codec: Codec, values: np.ndarray[Any, Any], layout: FragmentLayout, run: PartRun) -> Iterator[Row]:
    device = run.device
    tensor = torch.from_numpy(values).to(device)
    decoded, copied = torch.empty_like(tensor), torch.empty_like(tensor)
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    on_host = np.empty_like(values)
    stored, compressed = Encoding(codec, compressor=Compressor.NONE), Encoding(codec)
    case = f"{codec}, {layout.numel / 1e6:.3g}M normal values"

    def awaited(action: Callable[[], object]) -> Callable[[], None]:
        def act() -> None:
            action()
            run.wait()

        return act

    wanted = b"".join(encode_frames(values, layout, stored, decoded=on_host))
    made = b"".join(encode_frames_torch(tensor, layout, stored, decoded=decoded))
    run.wait()
    is_equal = made == wanted and np.array_equal(decoded.cpu().numpy(), on_host)
    yield measured(case, "frames and decoded values equal to the host's (1: yes)", [float(is_equal)], "", limit=1.0)
    actions: dict[str, Callable[[], object]] = {
        "copy": awaited(lambda: copied.copy_(tensor)),
        "to host": awaited(lambda: host.copy_(tensor, non_blocking=True)),
        "encode": awaited(lambda: exhaust(encode_frames_torch(tensor, layout, stored, decoded=decoded))),
        "compress": awaited(lambda: exhaust(encode_frames_torch(tensor, layout, compressed, decoded=decoded))),
        "host": lambda: exhaust(encode_frames(values, layout, stored, decoded=on_host)),
    }
    found = {name: rates(layout.numel / 1e9, one) for name, one in alternate(actions, run.pick(5, 2)).items()}
    unit = "Gparam/s"
    yield measured(case, "copy on the device, bytes read and written", [8 * rate for rate in found["copy"]], "GB/s")
    yield paired(case, "frames / copy on the device", found["encode"], unit, limits=found["copy"])
    yield paired(case, "frames / copy of float32 to the host", found["encode"], unit, limits=found["to host"])
    yield paired(case, "frames / the same on one core of the host", found["encode"], unit, limits=found["host"])
    yield paired(case, "frames with zstd on one core / frames", found["compress"], unit, limits=found["encode"])
