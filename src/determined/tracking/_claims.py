"""Who runs an experiment: at most one living process."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from determined import errors

from ._data.process import CLAIMED_FOR_S, RunProcess
from ._database import schema as db
from ._database.connections import wait_for_turn
from ._queries import process_columns, process_of

_RUNNERS = db.runners


def claim(connection: sa.Connection, experiment_id: int, process: RunProcess, *, force: bool) -> None:
    """Make a process the runner of an experiment, unless another one is or may be."""
    wait_for_turn(connection, "claims", experiment_id)
    if not force:
        _require_free(experiment_id, _holder(_locked(connection, experiment_id)), process)
    now = time.time()
    connection.execute(sa.delete(_RUNNERS).where(_RUNNERS.c.id == experiment_id))
    columns = {**process_columns(process), "wanted_slots": 0, "since": now, "alive_until": now + CLAIMED_FOR_S}
    connection.execute(sa.insert(_RUNNERS), {"id": experiment_id, **columns})


def renew(connection: sa.Connection, experiment_id: int, process: RunProcess) -> None:
    """Prolong the claim of a process on an experiment; `ConflictException` if it has none any more."""
    require(connection, experiment_id, process)
    _update(connection, experiment_id, alive_until=time.time() + CLAIMED_FOR_S)


def want_slots(connection: sa.Connection, experiment_id: int, count: int) -> None:
    """Store how many slots the runner of an experiment wants."""
    _update(connection, experiment_id, wanted_slots=count)


def _update(connection: sa.Connection, experiment_id: int, **values: float) -> None:
    connection.execute(sa.update(_RUNNERS).where(_RUNNERS.c.id == experiment_id).values(values))


def _require_free(experiment_id: int, holder: RunProcess | None, process: RunProcess) -> None:
    if holder is None or holder.is_gone or holder.is_same(process):
        return
    if holder.is_here:
        raise errors.ConflictException(
            f"experiment {experiment_id} is run by process {holder.pid} on this machine, so process {process.pid} "
            f"cannot run it, too; pause it first by `det experiment pause {experiment_id}`, or end that process."
        )
    raise errors.ConflictException(
        f"experiment {experiment_id} is run by process {holder.pid} on {holder.host!r}, which cannot be asked from "
        f"here whether it still runs; pause it there. If it is gone, wait two minutes until its claim has expired, or "
        f"take over at once by `det experiment activate {experiment_id} --force` (in Python claim(force=True))."
    )


def _locked(connection: sa.Connection, experiment_id: int) -> sa.Row[Any] | None:
    """Return the claim on an experiment, which nobody else can change meanwhile."""
    query = sa.select(_RUNNERS).where(_RUNNERS.c.id == experiment_id)
    return connection.execute(query.with_for_update(key_share=True)).one_or_none()


def _holder(row: sa.Row[Any] | None) -> RunProcess | None:
    return None if row is None else process_of(row)


def require(connection: sa.Connection, experiment_id: int, process: RunProcess | None) -> None:
    """Raise `ConflictException` unless a process has claimed an experiment and still has it."""
    if process is None:
        raise errors.ConflictException(
            f"this store has not claimed experiment {experiment_id}; call claim() before commit()."
        )
    holder = _holder(_locked(connection, experiment_id))
    if holder is not None and holder.is_same(process):
        return
    now = "nobody runs it" if holder is None else f"process {holder.pid} on {holder.host!r} runs it"
    raise errors.ConflictException(
        f"experiment {experiment_id} is no longer run by process {process.pid}: {now} now; nothing was stored. "
        "End this runner, or claim() the experiment again and read what is stored."
    )


def release(connection: sa.Connection, experiment_id: int, process: RunProcess) -> None:
    """Let others run an experiment that a process has claimed; nothing happens if another one has."""
    holder = _holder(_locked(connection, experiment_id))
    if holder is not None and holder.is_same(process):
        connection.execute(sa.delete(_RUNNERS).where(_RUNNERS.c.id == experiment_id))
