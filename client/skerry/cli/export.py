"""`skerry export`: a run's weights as a safetensors file or a folder of Hugging Face's, from a syncer or the store."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from skerry import RunsClient
from skerry.cli.adapters import write_adapter
from skerry.cli.connection import UID, with_client, with_run
from skerry.cli.console import as_json, shown_progress
from skerry.net.records import Run
from skerry.runtime.files import replacing
from skerry.runtime.options import INPUT_FILE, INPUT_FOLDER, OUTPUT, Count
from skerry.wire.base_model import BaseModel
from skerry.wire.safetensors import checkpoint_header, tensor_bytes
from skerry.wire.untrained import UntrainedTensor

# The group of entry points for commands that read a store themselves: the command line knows no store.
_STORED_GROUP: Final = "skerry.stored"
# From the nearest place to the furthest.
_PLACES: Final = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.DEFAULT,
)
# Files of a Hugging Face folder that are not weights.
_COPIED_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja"})
# By format: the files that the folder of --like must have, and the one for the weights.
_FOLDERS: Final = {
    "hf": (("config.json",), "model.safetensors"),
    "peft": (("adapter_config.json", "adapter_model.safetensors"), "adapter_model.safetensors"),
}


@click.command("export")
@click.option(
    "--out",
    "out_path",
    type=OUTPUT,
    required=True,
    help="The file to write; with --format hf or peft the folder.",
)
@click.option(
    "--uid", type=UID, help="The run's uid, if it must be this one.  [default: that of the run that has the name]"
)
@click.option(
    "--position",
    type=Count(),
    help="Position in the log whose weights to write.  [default: the log's end]",
)
@click.option(
    "--base",
    "base_paths",
    type=INPUT_FILE,
    multiple=True,
    help="A safetensors file with what the run does not train: frozen parameters, buffers. May be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(["original", "float32"]),
    default="original",
    help="Element types: the learners' own, or float32, which is exact.",
)
@as_json
@with_client
def _download(
    client: RunsClient,
    run: str,
    *,
    out_path: Path,
    uid: str | None,
    position: int | None,
    base_paths: tuple[Path, ...],
    dtype: str,
    is_json: bool,
    is_adapter: bool = False,
    is_whole: bool = False,
) -> None:
    shown = client.get_run(run, uid=uid).run
    if position is not None:
        shown = client.run_at(run, position)
    untrained = [UntrainedTensor(one.name, one.shape, one.dtype, one.digest) for one in shown.untrained]
    base = BaseModel(untrained, {tensor.name for tensor in shown.tensors}, base_paths)
    if is_whole and base.missing:
        raise click.UsageError(next(base.remarks()))
    _write(client, shown, out_path, dtype, base=base)
    versions = {version.fragment: version.version for version in shown.versions}
    lacks: dict[str, Any] = {}
    if not is_adapter:
        for remark in base.remarks():
            click.echo(f"warning: {remark}", err=True)
        lacks = {"missing": base.missing, "other": base.other}
    if is_json:
        click.echo(json.dumps({"path": str(out_path), "position": shown.position, "versions": versions, **lacks}))
        return
    listed = ", ".join(f"{fragment} {version}" for fragment, version in versions.items())
    click.echo(f"wrote {out_path}: position {shown.position}, versions {listed}")


def _write(client: RunsClient, run: Run, path: Path, dtype: str, *, base: BaseModel) -> None:
    before, behind = base.wide(is_wide=True), base.wide(is_wide=False)
    own = {tensor.name: (tensor.dtype, tensor.shape) for tensor in run.tensors}
    header, dtypes = checkpoint_header(
        {name: own[name] for fragment in run.fragments for name in fragment.tensors},
        before={name: one.place for name, one in before.items()},
        behind={name: one.place for name, one in behind.items()},
        dtype=dtype,
        run=run.name,
        uid=run.uid,
        position=run.position,
        versions={version.fragment: version.version for version in run.versions},
    )
    try:
        with shown_progress("exporting") as progress, replacing(path) as file:
            file.write(header)
            file.writelines(piece for name in before for piece in base.pieces(name))
            for name, values in client.pull(run, progress=progress):
                for piece in tensor_bytes(values, dtypes[name]):
                    file.write(piece)
                del values  # and with it its fragment, while the next is received
            file.writelines(piece for name in behind for piece in base.pieces(name))
    except OSError as error:
        raise click.BadParameter(f"can't be written: {error.strerror}. path={path}", param_hint="--out") from error


def _stored() -> click.Command | None:
    """Returns the command that exports from a store; None where this installation has no store."""
    for found in importlib.metadata.entry_points(group=_STORED_GROUP, name="export"):
        try:
            command = found.load()
        except ImportError:
            return None
        assert isinstance(command, click.Command)
        return command
    return None


_STORED: Final = _stored()


def _params() -> list[click.Parameter]:
    """Returns what both ways take, those of a syncer first, but for the run's name."""
    own = {param.name: param for param in _download.params}
    return list({param.name: param for param in (*(_STORED.params if _STORED else ()), *own.values())}.values())


@click.command(
    params=[param for param in _params() if param.name != "run"],
    epilog="""\b
Examples:
  # keys/ was made by `skerry keys`
  skerry export demo --target a.example:443 --tls-ca keys/ca.pem --tls-cert keys/rita.pem --tls-key keys/rita.key \\
      --out model.safetensors
  skerry export demo --store s3://bucket/skerry --position 4711 --dtype float32 --out then.safetensors
  skerry export demo --format hf --like ./gemma-3-1b --out ./gemma-3-1b-merged
  skerry export tuned --format hf --like ./gemma --base ./gemma/model.safetensors --out ./gemma-tuned
  skerry export demo --format peft --like ./adapter --out ./adapter-merged
""",
)
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
@with_run
def export(run: str, *, file_format: str, like: Path | None, out_path: Path, **values: Any) -> None:
    """Write a run's weights as a safetensors file, a Hugging Face folder or a PEFT adapter, at any time.

    With --target they are downloaded from the syncer, which takes a reader's certificate where the syncer has
    roles, and no access to its store. With --store they are read from the store, without a syncer. If neither is given,
    it is the store in ./skerry-data. If both are given in different ways, a flag counts before an environment variable,
    and that before the settings file.

    The run has only the tensors that it trains. A model with frozen parameters or buffers is complete with --base: the
    files that learners loaded it from. What is missing, or differs from the run's record, is said on standard error
    and, with --json, in `missing` and `other`; with --format hf nothing is written while something is missing.

    Exporting needs memory for the largest fragment. If the log in a store is damaged, the default position is that of
    the last good entry, and the exit status is 1.
    """
    is_adapter = file_format == "peft"
    if is_adapter and values.get("base_paths"):
        raise click.UsageError("an adapter has none of its base's tensors: leave out --base")
    if file_format not in _FOLDERS and out_path.is_dir():
        raise click.BadParameter(f"is a folder; name a file in it. path={out_path}", param_hint="--out")
    if file_format in _FOLDERS:
        out_path = _prepared(out_path, like, file_format)
    chosen = _chosen(click.get_current_context())
    names = {param.name for param in chosen.params}
    assert chosen.callback is not None
    status: str | int | None = 0
    try:
        chosen.callback(
            run=run,
            out_path=out_path,
            is_adapter=is_adapter,
            is_whole=file_format == "hf",  # from_pretrained would fill in what is missing at random
            **{name: value for name, value in values.items() if name in names},
        )
    except SystemExit as ended:  # the store's command ends so, having written
        status = ended.code
    if is_adapter:
        try:
            assert like is not None
            write_adapter(out_path, like / out_path.name)
        except ValueError as error:
            out_path.unlink()
            raise click.BadParameter(str(error), param_hint="--format peft") from error
    sys.exit(status)


def _chosen(context: click.Context) -> click.Command:
    """Returns the command to carry out.

    Raises:
        click.UsageError: both a store and a syncer are given, or an option of the other command.
    """
    if _STORED is None:
        return _download
    target, store = (_place(context, name) for name in ("target", "store_url"))
    if target == store == 0:
        raise click.UsageError("give --target to download from a syncer, or --store to read the store, not both")
    chosen, other = (_download, _STORED) if target < store else (_STORED, _download)
    own = {"run", *(param.name for param in chosen.params)}
    for param in other.params:
        if param.name not in own and param.name in context.params and not _place(context, param.name):
            raise click.UsageError(
                f"{param.opts[0]} is for {'--store' if chosen is _download else '--target'}, which is not given"
            )
    return chosen


def _place(context: click.Context, name: str) -> int:
    source = context.get_parameter_source(name)
    return len(_PLACES) if source is None else _PLACES.index(source)


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
        for path in like.iterdir():
            if path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    except shutil.SameFileError as error:
        raise click.BadParameter("is the folder of --like; name another one", param_hint="--out") from error
    except OSError as error:
        raise click.BadParameter(f"can't be written: {error.strerror}. path={folder}", param_hint="--out") from error
    return folder / weights
