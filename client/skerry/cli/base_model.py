"""What an export takes from files that its caller names: the tensors of the model that the run does not train."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from skerry.wire.safetensors import FileTensor, read_file_header
from skerry.wire.untrained import UntrainedTensor, values_checksum

_PIECE_BYTES: Final = 2**20
_NAMED: Final = 5  # tensors in a warning
# What a file of safetensors calls the element types of frameworks.
_DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of a safetensors file."""

    path: Path
    place: FileTensor

    @property
    def item_bytes(self) -> int:
        """Bytes of an element; 0 if there is none."""
        return self.place.size_bytes // max(1, math.prod(self.place.shape))

    def pieces(self) -> Iterator[bytes]:
        """Yields its bytes."""
        left = self.place.size_bytes
        with self.path.open("rb") as file:
            file.seek(self.place.offset)
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise OSError(None, "file ended early", str(self.path))
                left -= len(piece)
                yield piece

    def checksum(self) -> int:
        """Returns the checksum of its values."""
        if not self.place.size_bytes:
            return 0
        kind = "u1" if self.item_bytes == 1 else f"<i{self.item_bytes}"
        return values_checksum(
            np.memmap(self.path, kind, mode="r", offset=self.place.offset, shape=self.place.shape or (1,))
        )


class BaseModel:
    """The tensors of a run's model that come from files, and what there is to say about them.

    `missing`: tensors of the model that are in no file. `other`: those whose shape, type or values are not what the
    run's creator had; it is complete once all were read. `unknown`: what the run does not know of; if it knows of any
    untrained tensor, these are not of its model, or are other names of tied tensors, and are left out.
    """

    def __init__(
        self, untrained: Iterable[UntrainedTensor], trained: Collection[str], paths: Sequence[Path] = ()
    ) -> None:
        """Reads the headers of the files; of tensors that several of them have, the first counts.

        Args:
            untrained: what the run's creator had besides.
            trained: the names of the tensors that the run trains.
            paths: safetensors files.

        Raises:
            OSError: a file can't be read.
            TensorFileError: a file is no safetensors file.
        """
        in_files: dict[str, BaseTensor] = {}
        for path in paths:
            for name, place in read_file_header(path).items():
                in_files.setdefault(name, BaseTensor(path, place))
        self._recorded = {tensor.name: tensor for tensor in untrained}
        self.missing = [name for name in self._recorded if name not in in_files]
        self.unknown = [name for name in in_files if name not in self._recorded and name not in trained]
        self.other: list[str] = []
        taken = self._recorded.keys() if self._recorded else set(self.unknown)
        self.tensors = {name: tensor for name, tensor in in_files.items() if name in taken}

    def wide(self, *, is_wide: bool) -> dict[str, BaseTensor]:
        """Returns the tensors whose elements have at least four bytes, or those whose have fewer.

        A file that has the former before the run's tensors, and the latter behind them, has all of them aligned.
        """
        ordered = sorted(self.tensors.items(), key=lambda pair: -pair[1].item_bytes)
        return {name: tensor for name, tensor in ordered if (tensor.item_bytes >= 4) == is_wide}

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yields a tensor's bytes, and takes note if they are not those of the run's creator."""
        tensor, wanted = self.tensors[name], self._recorded.get(name)
        yield from tensor.pieces()
        if wanted is not None and wanted.checksum is not None:
            dtype = _DTYPES.get(tensor.place.code)
            if (dtype, tensor.place.shape) != (wanted.dtype, wanted.shape) or tensor.checksum() != wanted.checksum:
                self.other.append(name)

    def remarks(self) -> Iterator[str]:
        """Yields in what way an export is not the whole model of the run's creator, once all tensors were read."""
        advice = "no file of --base has them" if self.tensors else "give the file that has them as --base"
        were = "were taken" if set(self.unknown) <= self.tensors.keys() else "were left out"
        for remark, names in (
            (f"the export lacks tensors that the model has and the run does not train: {advice}", self.missing),
            ("tensors of --base are not those that the run was created with", self.other),
            (f"tensors of --base that the run does not know of {were}", self.unknown),
        ):
            if names:
                more = ", …" if len(names) > _NAMED else ""
                yield f"{remark}. tensors={len(names)}, names={', '.join(names[:_NAMED])}{more}"
