"""Writes versions of a run as checkpoint folders, full or as deltas, and collects old ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.deltas import ENCODINGS, OVERWRITE_LIMIT_BYTES, Bytes, checksum, encode
from skerry.checkpoints.folders import (
    INDEX,
    WEIGHTS,
    copy_companions,
    full_before,
    publishing,
    read_metadata,
    remove,
    remove_partial,
    version_folder,
    version_numbers,
)
from skerry.follower import Version
from skerry.v1.types_pb2 import Run
from skerry.wire.safetensors import WRITABLE_DTYPES, FileTensor, header_bytes, tensor_bytes


class Published(NamedTuple):
    """A version's folder, and the bytes of its weights in each way to write them."""

    folder: Path
    number: int
    encoding: str  # the key of `sizes` that was taken
    sizes: Mapping[str, int]  # "full", and where a version was there before it, each encoding of a delta


class Publisher:
    """Publishes versions in a folder; one process at a time.

    Versions have the numbers 1, 2, 3 and so on. The first of a process is full, unless the newest folder has its
    weights already; later ones are deltas where these are smaller, and at least each `keep`-th is full. The `keep`
    newest versions stay, with those that their chains begin with.

    Args:
        out: the folder, which is made.
        base: the tensors of the model that the run does not train.
        like: a model's folder, whose configuration and tokenizer each full version gets.
        dtype: of all trained tensors, or "original".
        keep: how many versions stay.
    """

    def __init__(self, out: Path, *, base: BaseModel, like: Path | None, dtype: str, keep: int) -> None:
        self._out: Final = out
        self._base: Final = base
        self._like: Final = like
        self._dtype: Final = dtype
        self._keep: Final = keep
        self._number = 0  # of the last version
        self._data: dict[str, Bytes] = {}  # of its trained tensors
        self._versions: Mapping[str, int] = {}  # of its fragments
        self._checksums = {name: checksum(tensor.data()) for name, tensor in base.tensors.items()}
        out.mkdir(parents=True, exist_ok=True)
        remove_partial(out)

    def publish(self, version: Version) -> Published | None:
        """Returns the folder of the version; None: an earlier process has published these weights as the newest.

        Raises:
            OSError: it can't be written.
            ValueError: the folder has another run's versions.
        """
        old, new = self._data, self._changed(version)
        data, checksums = old | new, self._checksums | {name: checksum(values) for name, values in new.items()}
        is_published = not old and self._is_published(version.run, checksums)
        published = None if is_published else self._published(version, data, new, checksums)
        self._data, self._checksums, self._versions = data, checksums, version.versions
        return published

    def _changed(self, version: Version) -> dict[str, Bytes]:
        """Returns the trained tensors whose bytes are not those of the last version."""
        changed, arrays, dtypes = {}, version.arrays(), self._dtypes(version.run)
        for fragment in version.run.fragments:
            if version.versions[fragment.name] == self._versions.get(fragment.name):
                continue
            for name in fragment.tensors:
                data = np.frombuffer(b"".join(tensor_bytes(arrays[name], dtypes[name])), np.uint8)
                if name not in self._data or not np.array_equal(data, self._data[name]):
                    changed[name] = data
        return changed

    def _dtypes(self, run: Run) -> dict[str, str]:
        def written(dtype: str) -> str:
            return dtype if dtype in WRITABLE_DTYPES else "float32"

        return {t.name: written(t.dtype) if self._dtype == "original" else self._dtype for t in run.tensors}

    def _is_published(self, run: Run, checksums: Mapping[str, str]) -> bool:
        """Finds the version after which to go on, and returns whether it has these weights."""
        numbers = version_numbers(self._out)
        if not numbers:
            return False
        self._number = numbers[-1]
        metadata = read_metadata(version_folder(self._out, self._number))
        if metadata.get("uid") != run.uid:
            raise ValueError(f"the folder has versions of another run. folder={self._out}, run={metadata.get('run')}")
        return bool(metadata["checksums"] == checksums)

    def _published(
        self, version: Version, data: Mapping[str, Bytes], new: Mapping[str, Bytes], checksums: Mapping[str, str]
    ) -> Published:
        sizes = {"full": sum(map(len, data.values())) + sum(t.size_bytes for t in self._base.tensors.values())}
        deltas: dict[str, dict[str, bytes]] = {}
        if self._data:
            largest = max(map(len, data.values()))
            for encoding in ENCODINGS if largest < OVERWRITE_LIMIT_BYTES else ENCODINGS[:1]:
                deltas[encoding] = self._encoded(new, encoding)
                sizes[encoding] = sum(map(len, deltas[encoding].values()))
        must_be_full = not deltas or self._number + 1 - full_before(self._out, self._number) >= self._keep
        encoding = "full" if must_be_full else min(sizes, key=sizes.__getitem__)
        metadata = {"version": f"{self._number + 1:06d}", "position": version.position, "versions": version.versions}
        metadata |= {"run": version.run.name, "uid": version.run.uid}
        metadata |= {"checksum_format": "blake3", "checksums": checksums}
        folder = version_folder(self._out, self._number + 1)
        with publishing(folder) as partial:
            if encoding == "full":
                self._write_full(partial, version.run, data, metadata | {"total_size": sizes["full"]})
            else:
                metadata |= {"base_version": f"{self._number:06d}", "delta_encoding": encoding}
                _write_delta(partial, deltas[encoding], metadata | {"compression_format": "zstd"})
        self._number += 1
        self._collect()
        return Published(folder, self._number, encoding, sizes)

    def _encoded(self, new: Mapping[str, Bytes], encoding: str) -> dict[str, bytes]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(
                zip(new, pool.map(lambda name: encode(self._data[name], new[name], encoding), new), strict=True)
            )

    def _write_full(self, folder: Path, run: Run, data: Mapping[str, Bytes], metadata: Mapping[str, object]) -> None:
        if self._like is not None:
            copy_companions(self._like, folder)
        dtypes = self._dtypes(run)
        trained = {tensor.name: (dtypes[tensor.name], tuple(tensor.shape)) for tensor in run.tensors}
        before, behind = self._base.wide(is_wide=True), self._base.wide(is_wide=False)
        tensors: dict[str, tuple[str, tuple[int, ...]] | FileTensor] = {**before, **trained, **behind}
        with (folder / WEIGHTS).open("xb") as file:
            file.write(header_bytes(tensors, {"format": "pt"}))
            for name in tensors:
                if name in data:
                    file.write(data[name].data)
                else:
                    self._base.write(name, file)
        _write_index(folder, tensors, metadata)

    def _collect(self) -> None:
        numbers = version_numbers(self._out)
        first = full_before(self._out, numbers[-self._keep :][0])
        for number in numbers:
            if number < first:
                remove(version_folder(self._out, number))


def _write_delta(folder: Path, deltas: Mapping[str, bytes], metadata: Mapping[str, object]) -> None:
    tensors = {name: FileTensor(folder, "U8", (len(delta),), 0, len(delta)) for name, delta in deltas.items()}
    checksums = metadata["checksums"]
    assert isinstance(checksums, dict)
    with (folder / WEIGHTS).open("xb") as file:  # other receivers take the checksums from the file
        file.write(header_bytes(tensors, {name: checksums[name] for name in deltas}))
        for delta in deltas.values():
            file.write(delta)
    _write_index(folder, deltas, metadata)


def _write_index(folder: Path, names: Mapping[str, object], metadata: Mapping[str, object]) -> None:
    index = {"metadata": metadata, "weight_map": dict.fromkeys(names, WEIGHTS)}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
