"""`det checkpoint`: list, describe, copy, consolidate and delete checkpoints."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from determined import errors, experiment, tracking
from determined.experiment import wording

from . import _output
from ._arguments import CheckpointUuid, Csv, Json, Yes, add, complete_checkpoint, complete_experiment
from ._errors import each

app = typer.Typer(help="Checkpoints: the saved state of a trial.", no_args_is_help=True)

COLUMNS = ("uuid", "experiment", "trial", "step", "state", "size", "time", "path")


def list_checkpoints(
    experiment_id: Annotated[
        int | None, typer.Argument(help="Only checkpoints of this experiment.", autocompletion=complete_experiment)
    ] = None,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """List checkpoints, oldest first."""
    format = _output.chosen_format(json, csv)
    checkpoints = _output.open_records().checkpoints(experiment_id=experiment_id)
    rows = [row(record, in_bytes=csv) for record in checkpoints]
    _output.print_listing(format, COLUMNS, rows, checkpoints)


def row(record: tracking.CheckpointRecord, in_bytes: bool = False) -> tuple[Any, ...]:
    """Return the cells of a checkpoint in a listing, in the order of `COLUMNS`."""
    return (
        record.uuid,
        record.experiment_id,
        record.trial_id,
        record.steps_completed,
        record.state.value,
        record.size if in_bytes else wording.bytes_text(record.size),
        wording.when(record.time),
        record.path,
    )


def describe(uuid: CheckpointUuid, json: Json = False) -> None:
    """Show a checkpoint: its path, trial, metadata and files."""
    record = _output.open_records().checkpoint(uuid)
    if json:
        _output.print_json(record)
        return
    shown = dict(zip(("checkpoint", *COLUMNS[1:]), row(record), strict=True))
    _output.print_fields({**shown, "metadata": record.metadata})
    files = [(name, wording.bytes_text(size)) for name, size in sorted(record.resources.items())]
    _output.print_table(("file", "size"), files, title="Files")


def download(
    uuid: CheckpointUuid,
    output_dir: Annotated[
        pathlib.Path | None,
        typer.Option("--output-dir", "-o", help="The folder to write to. (default: checkpoints/UUID)"),
    ] = None,
) -> None:
    """Copy the files of a checkpoint into a new or empty folder."""
    record = _output.open_records().checkpoint(uuid)
    copy_to(record, output_dir or pathlib.Path("checkpoints", record.uuid))


def copy_to(record: tracking.CheckpointRecord, folder: pathlib.Path) -> None:
    """Copy the files of a checkpoint into a new or empty folder, and print its path."""
    target = experiment.control.download_checkpoint(record, folder)
    typer.echo(f"Copied {wording.bytes_text(record.size)} to {_output.plain(target)}")


def delete(
    uuids: Annotated[
        list[str],
        typer.Argument(
            metavar="UUID...",
            help="The ids, or their first characters (at least 4).",
            autocompletion=complete_checkpoint,
        ),
    ],
    yes: Yes = False,
) -> None:
    """Delete checkpoints permanently, except versions of a model."""
    records = _output.open_records()
    chosen = {records.checkpoint(uuid).uuid: records.checkpoint(uuid) for uuid in uuids}
    if not yes:
        size = wording.bytes_text(sum(record.size for record in chosen.values()))
        typer.confirm(f"Delete {_output.plain(', '.join(chosen))} ({size}) permanently?", abort=True)
    each(chosen, experiment.control.delete_checkpoint, "Deleted checkpoint {}.")


def consolidate(
    uuid: CheckpointUuid,
    folder: Annotated[pathlib.Path, typer.Argument(help="The new or empty folder to write to.")],
) -> None:
    """Copy a sharded checkpoint into a folder, with the whole model in one state_dict.pth."""
    from determined import pytorch, storage

    target = folder.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise errors.StorageException(f"{str(target)!r} exists and is not an empty folder; name another one.")
    with (
        experiment.open_checkpoint(_output.open_records().checkpoint(uuid)) as saved,
        storage.staged(target) as staging,
    ):
        pytorch.consolidate_checkpoint(saved.folder, staging)
    typer.echo(f"The consolidated checkpoint is in {_output.plain(target)}")


add(app, list_checkpoints, "list", example="det checkpoint list 3 --csv", short="ls")
add(app, describe, example="det checkpoint describe 169787e6", short="desc")
add(app, download, example="det checkpoint download 169787e6 --output-dir best")
add(app, delete, example="det checkpoint delete 169787e6")
add(app, consolidate, example="det checkpoint consolidate 169787e6 whole")
