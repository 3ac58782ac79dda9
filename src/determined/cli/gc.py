"""`det gc`: bring the checkpoint store and the record together again."""

from __future__ import annotations

from typing import Annotated

import typer

from determined import _home, storage

from . import _output


def gc(
    store: Annotated[str | None, typer.Argument(help="A checkpoint folder, if not that of the home folder.")] = None,
) -> None:
    """Clear what crashes left behind, in checkpoints, their record and new experiments, and logs out of date."""
    from determined.core.checkpoint_gc import mark_missing, record_unrecorded, remove_unlisted
    from determined.experiment.control import remove_expired_logs, remove_leftovers

    home = _home.home()
    folder = storage.store_for(store, home.checkpoints)
    done = {
        "half-written checkpoints cleared": folder.clear_leftovers(),
        "checkpoints put on record": record_unrecorded(folder, home.database) if home.database.exists() else [],
        "folders of deleted checkpoints removed": remove_unlisted(folder, home.database),
        "records of vanished checkpoints closed": mark_missing(folder, home.database),
        "experiments cleared that were not created to the end": remove_leftovers(home),
        "logs removed that had been kept long enough": [str(log) for log in remove_expired_logs(home)],
    }
    for what, names in done.items():
        typer.echo(f"{len(names)} {what}" + "".join(f"\n  {_output.plain(name)}" for name in names))
