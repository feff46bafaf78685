"""The committed test vectors: what another language is told is what this code does, and both match a slow codec."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.digests import delta_digest, tree_digest
from skerry.wire.errors import FrameError
from skerry.wire.frames import decode_frame, encode_frames, parse_frames, raw_bytes
from tests.support.decoding import decode_frames
from tests.unit.wire import slow_codec


def load(name: str) -> dict[str, Any]:
    vectors: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / name).read_text())
    return vectors


def layout_of(vectors: dict[str, Any]) -> FragmentLayout:
    return FragmentLayout(
        "f", tuple(TensorSpec(tensor["name"], tuple(tensor["shape"])) for tensor in vectors["tensors"])
    )


def floats(text: str) -> NDArray[np.float32]:
    return np.array([int(pattern, 16) for pattern in text.split()], np.uint32).view(np.float32)


def patterns(bits: list[int]) -> str:
    """Returns each value's bits as eight hexadecimal digits, the sign first."""
    return " ".join(f"{pattern:08x}" for pattern in bits)


CASES = [
    pytest.param(vectors, case, id=f"{name}: {case['name']}")
    for name in (*(f"{codec}.json" for codec in Codec), "compressed.json")
    for vectors in [load(name)]
    for case in vectors["cases"]
]


@pytest.mark.parametrize(("vectors", "case"), CASES)
def test_a_vectors_frames_decode_to_its_values_also_by_another_hand(
    vectors: dict[str, Any], case: dict[str, Any]
) -> None:
    layout = layout_of(vectors)
    buffer = bytes.fromhex("".join(case["frames"]))
    out = np.empty_like(floats(case["values"]))
    decode_frames(buffer, layout, out, first=case["first"])
    assert patterns(out.view(np.uint32).tolist()) == case["decoded"]
    raw = [raw_bytes(frame) for frame in parse_frames(buffer)]
    assert [data.hex() for data in raw] == case["raw"]
    assert blake3(b"".join(raw)).hexdigest() == case["part_digest"]
    assert tree_digest(out).hex() == case["tree_digest"]
    tensors = [(offset, tensor.numel) for offset, tensor in zip(layout.offsets, layout.tensors, strict=True)]
    decoded: list[int] = []
    for frame in slow_codec.frames(buffer):
        lengths = list(slow_codec.block_lengths(tensors, frame.first, frame.numel, frame.block)) if frame.block else []
        decoded += slow_codec.dequantise(frame, lengths)
    assert patterns(decoded) == case["decoded"]


@pytest.mark.parametrize(("vectors", "case"), CASES)
def test_a_vectors_values_encode_to_its_bytes(vectors: dict[str, Any], case: dict[str, Any]) -> None:
    encoding = Encoding(
        Codec(case["codec"]), case["block"], Codec(case["vector_codec"]), Compressor(case["compressor"])
    )
    frames = list(encode_frames(floats(case["values"]), layout_of(vectors), encoding, first=case["first"]))
    assert [raw_bytes(frame).hex() for frame in parse_frames(b"".join(frames))] == case["raw"]
    if encoding.compressor is Compressor.NONE:
        assert [frame.hex() for frame in frames] == case["frames"]


REFUSED = load("refused.json")


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in REFUSED["cases"]])
def test_a_bad_frame_is_refused_for_its_reason(case: dict[str, Any]) -> None:
    layout = layout_of(REFUSED)
    with pytest.raises(FrameError) as caught:
        [decode_frame(frame, layout) for frame in parse_frames(bytes.fromhex(case["frame"]))]
    assert caught.value.reason == case["reason"]


def test_digests_are_those_of_the_vectors() -> None:
    vectors = load("digests.json")
    for delta in vectors["deltas"]:
        parts = [(part["first"], part["numel"], bytes.fromhex(part["digest"])) for part in delta["parts"]]
        assert delta_digest(parts).hex() == delta["delta_digest"]
    for tree in vectors["trees"]:
        values = np.arange(tree["numel"], dtype=np.float32)
        assert tree_digest(values).hex() == tree["tree_digest"]


def test_the_worked_example_of_the_specification_is_what_the_code_does() -> None:
    text = (Path(__file__).parents[3] / "protos" / "FORMAT.md").read_text()
    blocks = [bytes.fromhex(block) for block in re.findall(r"```hex\n(.*?)```", text, re.DOTALL)]
    layout = FragmentLayout("example", (TensorSpec("w", (1, 5)), TensorSpec("b", (2,))))
    values = np.array([3.5, -1, 0.75, 0.2, -0.3, 1, -2.5], np.float32)
    encoding = Encoding(Codec.INT4, block=4, compressor=Compressor.NONE)
    decoded, digest = np.empty_like(values), blake3()
    frames = list(encode_frames(values, layout, encoding, decoded=decoded, digest=digest))
    assert [*frames, digest.digest()] == blocks
    assert decoded.tolist() == np.array([3.5, -1, 1, 0, -0.3, 1, -2.5], np.float32).tolist()
