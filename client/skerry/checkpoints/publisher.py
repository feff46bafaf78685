"""Writes versions of a run as checkpoint folders, full or as deltas, and collects old ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from skerry.checkpoints import folders
from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.deltas import ENCODINGS, OVERWRITE_LIMIT_BYTES, Bytes, checksum, encode
from skerry.follower import Version
from skerry.v1.types_pb2 import Run
from skerry.wire.safetensors import FileTensor, header_bytes, tensor_bytes, written_dtype

# A delta of xor's that has a larger share of a full version is the smaller one: overwrite's is where 0.05 % or fewer of
# the bytes change. To find out takes 20 times as long where most of them do.
_SPARSE: Final = 0.01


class Published(NamedTuple):
    """A version's folder, and the bytes of its weights in each way to write them."""

    folder: Path
    encoding: str  # the key of `sizes` that was taken
    sizes: Mapping[str, int]  # "full", and the encodings of a delta that were tried


class Publisher:
    """Publishes versions in a folder; one process at a time.

    Versions have the numbers 1, 2, 3 and so on. The first of a process is full; later ones are deltas where these are
    smaller, and at least each `keep`-th is full. The `keep` newest versions stay, with those that their chains begin
    with.

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
        out.mkdir(parents=True, exist_ok=True)
        folders.remove_partial(out)
        self.number = max(folders.version_numbers(out), default=0)  # of the last version
        self._data: dict[str, Bytes] = {}  # of its trained tensors
        self._versions: Mapping[str, int] = {}  # of its fragments
        self._checksums = {name: checksum(tensor.data()) for name, tensor in base.tensors.items()}

    def publish(self, version: Version) -> Published:
        """Returns the folder of the version.

        Raises:
            OSError: it can't be written.
        """
        dtypes = {tensor.name: written_dtype(tensor.dtype, self._dtype) for tensor in version.run.tensors}
        changed = self._changed(version, dtypes)
        data = self._data | changed
        full_bytes = sum(map(len, data.values())) + sum(t.size_bytes for t in self._base.tensors.values())
        deltas = self._deltas(changed, full_bytes) if self._data else {}
        sizes = {"full": full_bytes}
        sizes |= {encoding: sum(map(len, delta.values())) for encoding, delta in deltas.items()}
        must_be_full = not deltas or self.number + 1 - folders.full_before(self._out, self.number) >= self._keep
        encoding = "full" if must_be_full else min(sizes, key=sizes.__getitem__)
        checksums = self._checksums | {name: checksum(values) for name, values in changed.items()}
        metadata = {"version": f"{self.number + 1:06d}", "position": version.position, "versions": version.versions}
        metadata |= {"run": version.run.name, "uid": version.run.uid}
        metadata |= {"checksum_format": "blake3", "checksums": checksums}
        folder = folders.version_folder(self._out, self.number + 1)
        with folders.publishing(folder) as partial:
            if encoding == "full":
                names = self._write_full(partial, version.run, dtypes, data)
                metadata["total_size"] = full_bytes
            else:
                names = _write_delta(partial, deltas[encoding], checksums)
                metadata |= {"base_version": f"{self.number:06d}", "delta_encoding": encoding}
                metadata["compression_format"] = "zstd"
            index = {"metadata": metadata, "weight_map": dict.fromkeys(names, folders.WEIGHTS)}
            (partial / folders.INDEX).write_text(json.dumps(index), encoding="utf-8")
        self.number += 1
        self._data, self._checksums, self._versions = data, checksums, version.versions
        self._collect()
        return Published(folder, encoding, sizes)

    def _changed(self, version: Version, dtypes: Mapping[str, str]) -> dict[str, Bytes]:
        """Returns the trained tensors whose bytes are not those of the last version."""
        changed, arrays = {}, version.arrays()
        for fragment in version.run.fragments:
            if version.versions[fragment.name] == self._versions.get(fragment.name):
                continue
            for name in fragment.tensors:
                data = np.frombuffer(b"".join(tensor_bytes(arrays[name], dtypes[name])), np.uint8)
                if name not in self._data or not np.array_equal(data, self._data[name]):
                    changed[name] = data
        return changed

    def _deltas(self, changed: Mapping[str, Bytes], full_bytes: int) -> dict[str, dict[str, bytes]]:
        """Returns the delta in each encoding that may be the smaller one."""
        is_placeable = max(map(len, self._data.values())) < OVERWRITE_LIMIT_BYTES
        deltas: dict[str, dict[str, bytes]] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for encoding in ENCODINGS:
                encoded = pool.map(lambda name, to=encoding: encode(self._data[name], changed[name], to), changed)
                deltas[encoding] = dict(zip(changed, encoded, strict=True))
                if not is_placeable or sum(map(len, deltas[encoding].values())) > full_bytes * _SPARSE:
                    break
        return deltas

    def _write_full(
        self, folder: Path, run: Run, dtypes: Mapping[str, str], data: Mapping[str, Bytes]
    ) -> Iterable[str]:
        if self._like is not None:
            folders.copy_companions(self._like, folder)
        shapes = {tensor.name: tuple(tensor.shape) for tensor in run.tensors}
        trained = {name: (dtypes[name], shapes[name]) for name in data}
        with (folder / folders.WEIGHTS).open("xb") as file:
            return self._base.write_model(file, trained, (values.data for values in data.values()), {"format": "pt"})

    def _collect(self) -> None:
        numbers = folders.version_numbers(self._out)
        first = folders.full_before(self._out, numbers[-self._keep :][0])
        for number in numbers:
            if number < first:
                folders.remove(folders.version_folder(self._out, number))


def _write_delta(folder: Path, deltas: Mapping[str, bytes], checksums: Mapping[str, str]) -> Iterable[str]:
    tensors = {name: FileTensor(folder, "U8", (len(delta),), 0, len(delta)) for name, delta in deltas.items()}
    with (folder / folders.WEIGHTS).open("xb") as file:  # SGLang takes the checksums from here
        file.write(header_bytes(tensors, {name: checksums[name] for name in deltas}))
        file.writelines(deltas.values())
    return deltas
