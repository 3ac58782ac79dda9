"""`det checkpoint`: list, describe, copy and consolidate checkpoints."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from determined import errors, tracking

from . import _output

app = typer.Typer(help="Checkpoints: the saved state of a trial.", no_args_is_help=True)

CheckpointUuid = Annotated[str, typer.Argument(metavar="UUID", help="The id, or its first characters (4 or more).")]

COLUMNS = ("uuid", "experiment", "trial", "step", "state", "size", "time", "path")


@app.command("list")
def list_checkpoints(
    experiment_id: Annotated[int | None, typer.Argument(help="Only those of this experiment.")] = None,
    json: _output.Json = False,
    csv: _output.Csv = False,
) -> None:
    """List checkpoints, oldest first."""
    format = _output.chosen_format(json, csv)
    checkpoints = _output.open_records().checkpoints(experiment_id=experiment_id)
    rows = [row(record, in_bytes=csv) for record in checkpoints]
    _output.print_listing(format, COLUMNS, rows, checkpoints)


def row(record: tracking.CheckpointRecord, in_bytes: bool = False) -> tuple[Any, ...]:
    """Return what a listing shows of a checkpoint, in the order of `COLUMNS`."""
    return (
        record.uuid,
        record.experiment_id,
        record.trial_id,
        record.steps_completed,
        record.state.value,
        record.size if in_bytes else _output.bytes_text(record.size),
        _output.when(record.time),
        record.path,
    )


@app.command()
def describe(uuid: CheckpointUuid, json: _output.Json = False) -> None:
    """Show a checkpoint: where it is, what it holds, how it came about."""
    record = _output.open_records().checkpoint(uuid)
    if json:
        _output.print_json(record)
        return
    shown = dict(zip(("checkpoint", *COLUMNS[1:]), row(record), strict=True))
    _output.print_fields({**shown, "metadata": record.metadata})
    files = [(name, _output.bytes_text(size)) for name, size in sorted(record.resources.items())]
    _output.print_table(("file", "size"), files, title="Files")


@app.command()
def download(
    uuid: CheckpointUuid,
    output_dir: Annotated[
        pathlib.Path | None,
        typer.Option("--output-dir", "-o", help="The folder to fill. (default: checkpoints/UUID)"),
    ] = None,
) -> None:
    """Copy the files of a checkpoint into a new or empty folder."""
    record = _output.open_records().checkpoint(uuid)
    source = _folder_of(record)
    target = (output_dir or pathlib.Path("checkpoints", record.uuid)).absolute()
    _refuse_to_overwrite(target)
    with _staged(target) as staging:
        shutil.copytree(source, staging, symlinks=True, dirs_exist_ok=True)
        _check_sizes(record, staging)
    typer.echo(f"Copied {_output.bytes_text(record.size)} to {_output.plain(target)}")


@app.command()
def consolidate(
    uuid: CheckpointUuid,
    folder: Annotated[pathlib.Path, typer.Argument(help="The new or empty folder to fill.")],
) -> None:
    """Copy a checkpoint of a model that was spread over processes, whole in one state_dict.pth."""
    record = _output.open_records().checkpoint(uuid)
    source, target = _folder_of(record), folder.absolute()
    _refuse_to_overwrite(target)
    from determined.pytorch._consolidate import consolidate as write_whole

    with _staged(target) as staging:
        write_whole(source, staging)
    typer.echo(f"The whole checkpoint is in {_output.plain(target)}")


def _folder_of(record: tracking.CheckpointRecord) -> pathlib.Path:
    if record.state is tracking.CheckpointState.DELETED:
        raise errors.CheckpointNotFoundException(
            f"checkpoint {record.uuid} was deleted; `det checkpoint list` shows those that are COMPLETED."
        )
    folder = pathlib.Path(record.path)
    if not folder.is_dir():
        raise errors.CheckpointNotFoundException(
            f"the folder {record.path!r} of checkpoint {record.uuid} is not there; "
            "run this on a machine that has it, or put it back."
        )
    return folder


def _refuse_to_overwrite(target: pathlib.Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise errors.StorageException(
            f"{str(target)!r} exists and is not an empty folder; pass another one (for download, with --output-dir)."
        )


@contextlib.contextmanager
def _staged(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give a folder beside the target that takes its place on success and vanishes on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield staging
        if target.exists():
            target.rmdir()  # only an empty folder goes, and Windows renames over none
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _check_sizes(record: tracking.CheckpointRecord, folder: pathlib.Path) -> None:
    for name, size in record.resources.items():
        if name.endswith("/"):  # a folder
            continue
        file = folder / name
        found = file.stat().st_size if file.is_file() else "no"
        if found != size:
            raise errors.InvalidCheckpointException(
                f"{name!r} of checkpoint {record.uuid} has {found} bytes instead of {size} under "
                f"{record.path!r}; the checkpoint is damaged: use another one."
            )
