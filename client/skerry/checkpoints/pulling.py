"""Brings a checkpoint on a local disk to a published version, and answers those who ask for it over HTTP."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import numpy as np

from skerry.checkpoints.deltas import apply, checksum
from skerry.checkpoints.folders import INDEX, read_metadata, version_folder
from skerry.errors import SkerryError
from skerry.exchange.adopt import corrupt
from skerry.runtime.addresses import Address
from skerry.runtime.files import replacing
from skerry.wire.errors import TensorFileError
from skerry.wire.safetensors import FileTensor, read_file_header

_STATE_FOLDER: Final = ".weight_sync"  # where SGLang has it


def pull_weights(local_checkpoint_dir: Path, source_dir: Path, target_version: int) -> None:
    """Makes a local checkpoint that of `target_version`, an ordinary model folder.

    It goes on from the version that the folder has where a chain of deltas leads from it to the target, else from the
    newest full version at or below the target. A pull that was cut off begins with a full version. Processes that pull
    into one folder take turns.

    Raises:
        CorruptDownloadError: a tensor does not have its checksum. The next pull begins with a full version.
        FileNotFoundError: a version that it takes is not there.
        ValueError: the local folder has files, but no pull has made it; or a file can't be read.
    """
    with _state_of(local_checkpoint_dir) as state_path:
        applied = json.loads(state_path.read_bytes())["version"] if state_path.exists() else None
        chain: list[int] = []
        number = target_version
        while str(applied) != f"{number:06d}":
            base = read_metadata(version_folder(source_dir, number)).get("base_version")
            chain.insert(0, number)
            if base is None:
                break
            number = int(base)
        for number in chain:
            state_path.unlink(missing_ok=True)
            folder = version_folder(source_dir, number)
            metadata = read_metadata(folder)
            if "base_version" in metadata:
                _apply(local_checkpoint_dir, folder, metadata)
            else:
                _copy(local_checkpoint_dir, folder)
                _check(metadata, _tensors(local_checkpoint_dir))
            with replacing(state_path) as file:
                file.write(json.dumps({"version": f"{number:06d}"}).encode())


@contextmanager
def _state_of(local: Path) -> Iterator[Path]:
    """Yields the file that says which version the folder has, while no other process pulls into it."""
    folder = local / _STATE_FOLDER
    if not folder.exists() and local.exists() and any(local.iterdir()):
        raise ValueError(f"the folder has files that no pull has made: name a new or empty one. folder={local}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / "state.json"


def _copy(local: Path, folder: Path) -> None:
    """Makes the local folder's files those of a full version."""
    names = {path.name for path in folder.iterdir()}
    for path in list(local.iterdir()):
        if path.is_file() and path.name not in names:
            path.unlink()
    for name in names:
        with (folder / name).open("rb") as source, replacing(local / name) as copy:
            shutil.copyfileobj(source, copy)


def _apply(local: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Changes the tensors of a delta in place, and has the index say whose they are."""
    tensors, changed = _tensors(local), _tensors(folder)
    for name, delta in changed.items():
        tensor = tensors[name]
        data = np.memmap(tensor.path, mode="r+", offset=tensor.offset, shape=(tensor.size_bytes,))
        apply(data, delta.data().data, metadata["delta_encoding"])
        data.flush()
    _check(metadata, {name: tensors[name] for name in changed})
    index = json.loads((local / INDEX).read_bytes())
    index["metadata"] |= {key: value for key, value in metadata.items() if key in index["metadata"]}
    with replacing(local / INDEX) as file:
        file.write(json.dumps(index).encode())


def _check(metadata: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> None:
    checksums = metadata.get("checksums", {})
    wrong = [name for name, tensor in tensors.items() if checksum(tensor.data()) != checksums.get(name)]
    if wrong:
        raise corrupt(f"tensors do not have their checksums. version={metadata.get('version')}, names={wrong[:5]}")


def _tensors(folder: Path) -> dict[str, FileTensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in read_file_header(path).items()}


class PullServer(ThreadingHTTPServer):
    """Answers `POST /pull_weights` with the arguments of `pull_weights` as JSON by {"success": …, "message": …}."""

    daemon_threads = True

    def __init__(self, address: Address) -> None:
        super().__init__((address.host, address.port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # for a request to arrive

    def do_POST(self) -> None:
        """Pulls, and answers once the local checkpoint has the version or can't have it."""
        if self.path != "/pull_weights" or "Origin" in self.headers:  # or it is a web page in somebody's browser
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        status, message = HTTPStatus.OK, ""
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            folders = (Path(request["local_checkpoint_dir"]), Path(request["source_dir"]))
            pull_weights(*folders, int(request["target_version"]))
        except (OSError, ValueError, KeyError, TypeError, SkerryError, TensorFileError) as error:
            status, message = HTTPStatus.BAD_REQUEST, repr(error)
        body = json.dumps({"success": status == HTTPStatus.OK, "message": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
