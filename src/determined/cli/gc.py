"""`det gc`: make the checkpoint store and the database consistent again."""

from __future__ import annotations

from typing import Annotated

import typer

from determined import _home, experiment, storage

from . import _output


def gc(
    store: Annotated[str | None, typer.Argument(help="A checkpoint folder. (default: that of the home folder)")] = None,
) -> None:
    """Remove what crashes left behind in checkpoints, the database and new experiments, and expired logs."""
    from determined.core.checkpoint_gc import mark_missing, record_unrecorded, remove_unlisted

    home = _home.home()
    folder = storage.store_for(store, home.checkpoints)
    done = {
        "incomplete checkpoints removed": folder.clear_leftovers(),
        "checkpoints added to the database": record_unrecorded(folder, home.database) if home.database.exists() else [],
        "folders of deleted checkpoints removed": remove_unlisted(folder, home.database),
        "missing checkpoints marked as deleted": mark_missing(folder, home.database),
        "incompletely created experiments removed": experiment.control.remove_leftovers(home),
        "expired logs removed": [str(log) for log in experiment.control.remove_expired_logs(home)],
    }
    for what, names in done.items():
        typer.echo(f"{len(names)} {what}" + "".join(f"\n  {_output.plain(name)}" for name in names))
