"""`skerry export`: a run's weights as a safetensors file or a folder of Hugging Face's, from a syncer or the store."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from skerry import RunsClient
from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.folders import copy_companions
from skerry.cli.adapters import adapter_keys
from skerry.cli.connection import UID, with_client, with_run
from skerry.cli.console import as_json, shown_progress
from skerry.runtime.files import replacing
from skerry.runtime.options import INPUT_FILE, INPUT_FOLDER, OUTPUT, Count
from skerry.v1.types_pb2 import Run
from skerry.wire.messages import untrained_from_messages
from skerry.wire.safetensors import tensor_bytes, written_dtype

# The command line stands on no service: what reads a store is imported by its name, once --store is given.
_STORE_READER: Final = "skerry_syncer.store.maintenance.export"
_STORE_OPTIONS: Final = "skerry_syncer.store.maintenance.options"
# By format: the files that the folder of --like must have, and the one for the weights.
_FOLDERS: Final = {
    "hf": (("config.json",), "model.safetensors"),
    "peft": (("adapter_config.json", "adapter_model.safetensors"), "adapter_model.safetensors"),
}
# Gives a command the files for a `BaseModel` as its keyword `base_paths`.
with_base: Final = click.option(
    "--base",
    "base_paths",
    type=INPUT_FILE,
    multiple=True,
    help="A safetensors file with what the run does not train: frozen parameters, buffers. May be repeated.",
)

# Gives a command the element type of what the run trains as its keyword `dtype`.
with_dtype: Final = click.option(
    "--dtype",
    type=click.Choice(["original", "float32", "bfloat16"]),
    default="original",
    show_default=True,
    help="Element types of trained tensors: the learners' own, or one for all, of which float32 is exact.",
)


@click.command(
    epilog="""\b
Examples:
  # ca.pem, rita.pem and rita.key were made by `skerry keys`
  skerry export demo --target syncer.example:443 --tls-ca ca.pem --tls-cert rita.pem --tls-key rita.key --out out
  skerry export demo --store s3://bucket/skerry --position 4711 --dtype float32 --out then.safetensors
  skerry export demo --format hf --like ./gemma-3-1b --out ./gemma-3-1b-merged
  skerry export tuned --format hf --like ./gemma --base ./gemma/model.safetensors --out ./gemma-tuned
  skerry export demo --format peft --like ./adapter --out ./adapter-merged
""",
)
@click.option(
    "--store",
    "store_url",
    default="file://./skerry-data",  # where `skerry serve` keeps it
    show_default=True,
    help="Read this store, as file:///var/lib/skerry or s3://, gs:// or az://bucket/prefix, and ask no syncer.",
)
@click.option(
    "--out", "out_path", type=OUTPUT, required=True, help="The file to write; with --format hf or peft the folder."
)
@click.option(
    "--uid", type=UID, help="The run's uid, if it must be this one.  [default: that of the run that has the name]"
)
@click.option("--position", type=Count(0), help="Position in the log whose weights to write.  [default: the log's end]")
@with_base
@with_dtype
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", *_FOLDERS]),
    default="safetensors",
    help="One file, or a folder that from_pretrained loads, of Hugging Face or of PEFT, which takes --like.",
)
@click.option(
    "--like",
    type=INPUT_FOLDER,
    help="A folder of the same model or adapter, whose configuration and tokenizer are copied; of an adapter also what "
    "is not trained.",
)
@as_json
@with_run
@with_client
def export(
    client: RunsClient,
    run: str,
    *,
    store_url: str,
    out_path: Path,
    uid: str | None,
    position: int | None,
    base_paths: tuple[Path, ...],
    dtype: str,
    file_format: str,
    like: Path | None,
    is_json: bool,
) -> None:
    """Write a run's weights as a safetensors file, a Hugging Face folder or a PEFT adapter, at any time.

    With --target, or SKERRY_TARGET, they are downloaded from the syncer, which takes a reader's certificate where the
    syncer has roles, and no access to its store. With --store, or without a target, they are read from the store,
    without a syncer.

    The run has only the tensors that it trains. A model with frozen parameters or buffers is complete with --base: the
    files that learners loaded it from. What is missing, or differs from the run's record, is said on standard error
    and, with --json, in `missing` and `other`; with --format hf nothing is written while something is missing.

    Exporting needs memory for the largest fragment. If the log in a store is damaged, the default position is that of
    the last good entry, and the exit status is 1.
    """
    is_adapter = file_format == "peft"
    if is_adapter and base_paths:
        raise click.UsageError("an adapter has none of its base's tensors: leave out --base")
    if file_format in _FOLDERS:
        out_path = _prepared(out_path, like, file_format)
    elif out_path.is_dir():
        raise click.BadParameter(f"is a folder; name a file in it. path={out_path}", param_hint="--out")
    context = click.get_current_context()
    store_place, target_place = map(context.get_parameter_source, ("store_url", "target"))
    if store_place is ParameterSource.COMMANDLINE or target_place is ParameterSource.DEFAULT:
        (option,) = (parameter for parameter in context.command.params if parameter.name == "store_url")
        importlib.import_module(_STORE_OPTIONS).STORE.convert(store_url, option, context)
        source = importlib.import_module(_STORE_READER).stored_weights(store_url, run, uid, position)
    else:
        source = _downloaded(client, run, uid, position)
    with source as (shown, pull, is_cut):
        keys = {tensor.name: tensor.name for tensor in shown.tensors}  # the tensors' names in the file
        if is_adapter:
            assert like is not None
            base_paths = (like / out_path.name,)
            shapes = {tensor.name: tuple(tensor.shape) for tensor in shown.tensors}
            try:
                keys = adapter_keys(shapes, base_paths[0])
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="--format peft") from error
        untrained = () if is_adapter else untrained_from_messages(shown.untrained)
        base = BaseModel(untrained, keys.values(), base_paths)
        if file_format == "hf" and base.missing:  # from_pretrained would fill in what is missing at random
            raise click.UsageError(next(base.remarks()))
        _write(shown, pull, out_path, dtype, base=base, keys=keys)
    versions = {version.fragment: version.version for version in shown.versions}
    report: dict[str, Any] = {"path": str(out_path), "position": shown.position, "versions": versions}
    if not is_adapter:
        for remark in base.remarks():
            click.echo(f"warning: {remark}", err=True)
        report |= {"missing": base.missing, "other": base.other}
    listed = ", ".join(f"{fragment} {version}" for fragment, version in versions.items())
    click.echo(json.dumps(report) if is_json else f"wrote {out_path}: position {shown.position}, versions {listed}")
    sys.exit(is_cut)


@contextmanager
def _downloaded(
    client: RunsClient, name: str, uid: str | None, position: int | None
) -> Iterator[tuple[Run, Any, bool]]:
    """Yields what `stored_weights` does, from a syncer."""
    run = client.get_run(name, uid=uid).run
    if position is not None:
        run = client.run_at(name, position)
    yield run, lambda progress: client.pull(run, progress=progress), False


def _write(run: Run, pull: Any, path: Path, dtype: str, *, base: BaseModel, keys: Mapping[str, str]) -> None:
    tensors = {tensor.name: tensor for tensor in run.tensors}
    names = [name for fragment in run.fragments for name in fragment.tensors]
    dtypes = {name: written_dtype(tensors[name].dtype, dtype) for name in names}
    places = {keys[name]: (dtypes[name], tuple(tensors[name].shape)) for name in names}
    versions = {version.fragment: version.version for version in run.versions}
    # Loaders of model files expect the format.
    metadata = {"format": "pt", "run": run.name, "uid": run.uid, "position": str(run.position)}

    def pieces(progress: Callable[[int, int], None]) -> Iterator[bytes]:
        for name, values in pull(progress):
            yield from tensor_bytes(values, dtypes[name])
            del values  # and with it its fragment, while the next is received

    try:
        with shown_progress("exporting") as progress, replacing(path) as file:
            base.write_model(file, places, pieces(progress), metadata | {"versions": json.dumps(versions)})
    except OSError as error:
        raise click.BadParameter(f"can't be written: {error.strerror}. path={path}", param_hint="--out") from error


def _prepared(folder: Path, like: Path | None, file_format: str) -> Path:
    """Copies what is not weights, and returns the file for the weights.

    Raises:
        click.UsageError: there is no model folder to copy from, or it can't be copied.
    """
    wanted, weights = _FOLDERS[file_format]
    if like is None or not all((like / name).is_file() for name in wanted):
        raise click.UsageError(
            f"--format {file_format} takes --like FOLDER, a folder with {' and '.join(wanted)}, as save_pretrained "
            f"writes. like={like}"
        )
    try:
        folder.mkdir(exist_ok=True)
        copy_companions(like, folder)
    except shutil.SameFileError as error:
        raise click.BadParameter("is the folder of --like; name another one", param_hint="--out") from error
    except OSError as error:
        raise click.BadParameter(f"can't be written: {error.strerror}. path={folder}", param_hint="--out") from error
    return folder / weights
