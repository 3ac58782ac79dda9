"""`det doctor`, `det gc` and `det backup`: check and clean up the home folder, and copy the tracking database."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Container, Iterable, Iterator
from typing import Annotated

import typer

from determined import _home, errors, experiment, storage, tracking
from determined.tracking import CheckpointState, Problem

from . import _output
from ._arguments import Json

_MAX_LINE = 2000  # characters of a problem


def doctor(json: Json = False) -> None:
    """Check the tracking database and the files in the home folder, and print what is wrong and what to do.

    Nothing is changed. The exit status is 1 if something is wrong.
    """
    home = _home.home()
    problems = tracking.check_database(home.database)
    with contextlib.suppress(errors.DatabaseException):  # then the database is among the problems
        problems += _file_problems(home)
    if json:
        _output.print_json(problems)
    for problem in [] if json else problems:
        typer.echo(f"{_output.plain(problem.what, _MAX_LINE)}\n  {_output.plain(problem.remedy, _MAX_LINE)}")
    if problems:
        raise typer.Exit(1)
    if not json:
        typer.echo(f"No problems found in {_output.plain(home.path)}.")


def gc(
    store: Annotated[
        str | None, typer.Argument(help="A checkpoint folder or URL. (default: that of the home folder)")
    ] = None,
) -> None:
    """Remove what crashes left behind in checkpoints, the database and new experiments, and expired logs."""
    from determined.core.checkpoint_gc import finish_uploads, mark_missing, record_unrecorded, remove_unlisted

    home = _home.home()
    folder = storage.store_for(store, home.checkpoints)
    done = {
        "interrupted uploads finished": finish_uploads(home) if home.may_have_database else [],
        "incomplete checkpoints removed": folder.clear_leftovers(),
        "checkpoints added to the database": record_unrecorded(folder, home.database) if home.may_have_database else [],
        "folders of deleted checkpoints removed": remove_unlisted(folder, home.database),
        "missing checkpoints marked as deleted": mark_missing(folder, home.database),
        "incompletely created experiments removed": experiment.control.remove_leftovers(home),
        "expired logs removed": [str(log) for log in experiment.control.remove_expired_logs(home)],
    }
    for what, names in done.items():
        typer.echo(f"{len(names)} {what}" + "".join(f"\n  {_output.plain(name)}" for name in names))


def backup(path: Annotated[pathlib.Path, typer.Argument(help="The new file.", show_default=False)]) -> None:
    """Copy the tracking database into a new file; runs may go on writing to it."""
    tracking.back_up(path, _home.home().database)
    typer.echo(f"Wrote {_output.plain(path)}")


def _file_problems(home: _home.Home) -> Iterator[Problem]:
    records = tracking.TrackingReader(home.database)
    experiments = records.experiments(include_archived=True)
    ids, trials = {one.id for one in experiments}, records.trial_ids()
    tensorboard = home.tensorboards(0).parent
    yield from _orphans("experiment", home.experiments.glob("*"), r"(\d+)", ids)
    yield from _orphans("experiment", tensorboard.glob("experiment-*"), r"experiment-(\d+)", ids)
    for one in experiments:
        for folder in (home.experiment(one.id), home.tensorboards(one.id)):
            yield from _orphans("trial", folder.glob("trial-*"), r"trial-(\d+)", trials.get(one.id, ()))
        if not (one.is_local or one.state.is_final or home.code(one.id).is_dir()):
            what = f"Experiment {one.id} has not ended, but its program ({home.code(one.id)}) is gone."
            yield Problem(what=what, remedy=f"Put the folder back, or run `det experiment kill {one.id}`.")
    yield from _checkpoint_problems(home, records)


def _orphans(kind: str, folders: Iterable[pathlib.Path], pattern: str, known: Container[int]) -> Iterator[Problem]:
    """Yield the folders of experiments or trials that are not on record."""
    for folder in sorted(folders):
        found = re.fullmatch(pattern, folder.name)
        if found and int(found[1]) not in known:
            what = f"{folder} belongs to {kind} {found[1]}, which is not on record."
            yield Problem(what=what, remedy="Delete the folder, unless you want to restore a backup of the database.")


def _checkpoint_problems(home: _home.Home, records: tracking.TrackingReader) -> Iterator[Problem]:
    for location, uuids in storage.abandoned_uploads(home.stores).items():
        what = f"{len(uuids)} checkpoints are in {home.stores}, but not yet in {location}: {', '.join(uuids)}."
        yield Problem(what=what, remedy="`det gc` uploads them, and so does the next run with this checkpoint_storage.")
    recorded = {one.uuid: one for one in records.checkpoints()}
    # Read second, since a checkpoint is recorded after it is in the store.
    store = storage.store_for(None, home.checkpoints)
    present = set(store.list())
    for uuid in sorted(present - recorded.keys()):
        what = f"Checkpoint {uuid} is in {store.location}, but not on record."
        yield Problem(what=what, remedy="`det gc` records it if it is of an experiment on record; else delete it.")
    for uuid, one in recorded.items():
        is_here = one.path == storage.location_in(store, uuid)
        if is_here and one.state is CheckpointState.COMPLETED and uuid not in present:
            what = f"Checkpoint {uuid} of trial {one.trial_id} is on record, but its files ({one.path}) are gone."
            yield Problem(what=what, remedy="Put them back, or let `det gc` record that it is deleted.")
