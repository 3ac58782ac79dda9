"""Who runs an experiment: at most one living process."""

from __future__ import annotations

import time

import sqlalchemy as sa

from determined import errors

from . import _database, _runs, _schema, _tallies, _writing
from ._process import CLAIMED_FOR_S, RunProcess
from ._reading import Reader
from ._rows import RUNNER, Row

_RUNNERS = _schema.runners


def claim(connection: sa.Connection, experiment_id: int, process: RunProcess, *, force: bool) -> None:
    """Make a process the runner of an experiment, unless another one is or may be."""
    _database.wait_for_turn(connection, "claims", experiment_id)
    # Not even looked at if there is no question who gets it, so that a damaged one can be replaced.
    if not force:
        _require_free(experiment_id, _holder(locked(connection, experiment_id)), process)
    now = time.time()
    columns = {**_runs.columns_of(process), "wanted_slots": 0, "since": now, "alive_until": now + CLAIMED_FOR_S}
    _writing.put(connection, RUNNER, {"id": experiment_id, **columns})
    _tallies.replace(connection, _tallies.RUNNERS, experiment_id, 1)


def renew(connection: sa.Connection, experiment_id: int, process: RunProcess) -> None:
    """Prolong the claim of a process on an experiment; `TrackingException` if it has none any more."""
    row = require(connection, experiment_id, process)
    _writing.change(connection, RUNNER, row, {"alive_until": time.time() + CLAIMED_FOR_S})


def _require_free(experiment_id: int, holder: RunProcess | None, process: RunProcess) -> None:
    if holder is None or holder.is_gone or holder.is_same(process):
        return
    if holder.is_here:
        raise errors.TrackingException(
            f"experiment {experiment_id} is run by process {holder.pid} on this machine, so process {process.pid} "
            f"cannot run it, too; pause it first by `det experiment pause {experiment_id}`, or end that process."
        )
    raise errors.TrackingException(
        f"experiment {experiment_id} is run by process {holder.pid} on {holder.host!r}, which cannot be asked from "
        f"here whether it still runs; pause it there. If it is gone, wait two minutes until its claim has expired, or "
        f"take over at once by `det experiment activate {experiment_id} --force` (in Python claim(force=True))."
    )


def locked(connection: sa.Connection, experiment_id: int) -> Row | None:
    """Return the claim on an experiment, which nobody else can change meanwhile."""
    for row in _writing.locked(connection, RUNNER, _RUNNERS.c.id == experiment_id):
        if row.is_sealed:
            return row
    # That there is none, or one without a checksum, must be as it was stored.
    return Reader(connection).runners([experiment_id]).get(experiment_id)


def _holder(row: Row | None) -> RunProcess | None:
    return None if row is None else _runs.process_of(row)


def require(connection: sa.Connection, experiment_id: int, process: RunProcess | None) -> Row:
    """Return the claim of a process on an experiment; `TrackingException` if it has none (any more)."""
    if process is None:
        raise errors.TrackingException(
            f"this ledger has not claimed experiment {experiment_id}; call claim() before commit()."
        )
    row = locked(connection, experiment_id)
    holder = _holder(row)
    if row is not None and holder is not None and holder.is_same(process):
        return row
    now = "nobody runs it" if holder is None else f"process {holder.pid} on {holder.host!r} runs it"
    raise errors.TrackingException(
        f"experiment {experiment_id} is no longer run by process {process.pid}: {now} now; nothing was stored. "
        "End this runner, or claim() the experiment anew and read what is stored."
    )


def release(connection: sa.Connection, experiment_id: int, process: RunProcess) -> None:
    """Let others run an experiment that a process has claimed, and nothing if another one has."""
    row = locked(connection, experiment_id)
    holder = _holder(row)
    if holder is not None and holder.is_same(process):
        connection.execute(sa.delete(_RUNNERS).where(_RUNNERS.c.id == experiment_id))
        _tallies.replace(connection, _tallies.RUNNERS, experiment_id, 0)
