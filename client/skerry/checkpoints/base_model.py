"""What an export takes from files that its caller names: the tensors of the model that the run does not train."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from skerry.wire.safetensors import FileTensor, header_bytes, read_file_header
from skerry.wire.untrained import UntrainedTensor, values_checksum

_NAMED: Final = 5  # tensors in a warning


class BaseModel:
    """The tensors of a run's model that come from files, and what there is to say about them.

    `missing`: tensors of the model that are in no file. `other`: those whose shape or values are not what the
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
        in_files: dict[str, FileTensor] = {}
        for path in paths:
            in_files = in_files | read_file_header(path) | in_files  # of tensors of one name, the first file's
        self._recorded = {tensor.name: tensor for tensor in untrained}
        self.missing = [name for name in self._recorded if name not in in_files]
        self.unknown = [name for name in in_files if name not in self._recorded and name not in trained]
        self.other: list[str] = []
        taken = self._recorded.keys() if self._recorded else set(self.unknown)
        self.tensors = {name: tensor for name, tensor in in_files.items() if name in taken}

    def write_model(
        self,
        file: BinaryIO,
        trained: Mapping[str, tuple[str, tuple[int, ...]]],
        data: Iterable[bytes | memoryview],
        metadata: Mapping[str, str],
    ) -> list[str]:
        """Writes a safetensors file of these tensors and of the trained ones, and returns the names of all.

        Args:
            file: at its beginning.
            trained: dtype and shape by name.
            data: bytes of the trained tensors, in order, cut anywhere.
            metadata: of the file.
        """
        # Tensors of at least four bytes an element come before the run's, the others behind: so all are aligned.
        ordered = sorted(self.tensors.items(), key=lambda item: -item[1].item_bytes)
        before, behind = [{k: t for k, t in ordered if (t.item_bytes >= 4) == is_wide} for is_wide in (True, False)]
        file.write(header_bytes({**before, **trained, **behind}, metadata))
        for name in before:
            self._write(name, file)
        file.writelines(data)
        for name in behind:
            self._write(name, file)
        return [*before, *trained, *behind]

    def _write(self, name: str, file: BinaryIO) -> None:
        """Writes a tensor's bytes, and takes note if they are not those of the run's creator."""
        tensor, wanted = self.tensors[name], self._recorded.get(name)
        data = tensor.data()
        file.write(data.data)
        if wanted is not None and wanted.checksum is not None:
            bits = data.view(f"<i{tensor.item_bytes}") if tensor.item_bytes > 1 else data
            if tensor.shape != wanted.shape or values_checksum(bits.reshape(tensor.shape)) != wanted.checksum:
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
