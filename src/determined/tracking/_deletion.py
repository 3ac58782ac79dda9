"""Deleting an experiment with all its rows, unless somebody is at work on it."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from determined import errors

from . import _runs, _schema, _tallies
from ._messages import RunState
from ._process import RunProcess
from ._reading import Reader
from ._rows import TRIAL, Row

_TRIALS = _schema.trials


def require_idle(connection: sa.Connection, experiment: Row, done: str, *, force: bool = False) -> None:
    """Raise `TrackingException` if a process is at work on an experiment, or may be on another host."""
    for process in _processes(connection, experiment):
        if process.is_gone:
            continue
        if process.is_here:
            raise errors.TrackingException(
                f"experiment {experiment.id} cannot be {done}: process {process.pid} is at work on it; end it first by "
                f"`det experiment kill {experiment.id}`, or wait for it."
            )
        if not force:
            raise errors.TrackingException(
                f"experiment {experiment.id} cannot be {done}: process {process.pid} on {process.host!r} may be at "
                "work on it, which cannot be asked from here; end it there, or if it is gone for certain, add --force "
                "(in Python force=True)."
            )


def _processes(connection: sa.Connection, experiment: Row) -> Iterator[RunProcess]:
    """Yield the processes that should be at work on an experiment."""
    driven = [] if experiment.is_local else [experiment.id]
    runners = [_runs.process_of(row) for row in Reader(connection).runners(driven).values()]
    yield from (process for process in runners if process is not None)
    final = [state.value for state in RunState if not state.has_process]
    query = TRIAL.select().where(_TRIALS.c.experiment_id == experiment.id, _TRIALS.c.state.not_in(final))
    for row in connection.execute(query):
        if (process := _runs.process_of(TRIAL.read(row))) is not None:
            yield process


def delete(connection: sa.Connection, experiment_id: int) -> None:
    """Remove an experiment and what belongs to it, and count it no more."""
    of_experiment = _TRIALS.c.experiment_id == experiment_id
    ids = list(connection.execute(sa.select(_TRIALS.c.id).where(of_experiment)).scalars())
    require_unregistered(connection, experiment_id)
    trial_ids = sa.select(_TRIALS.c.id).where(of_experiment)
    for table in (_schema.metrics, _schema.checkpoints, _schema.runs):
        connection.execute(sa.delete(table).where(table.c.trial_id.in_(trial_ids)))
    for table in (_schema.leases, _schema.events, _TRIALS):
        connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id))
    for table in (_schema.snapshots, _schema.runners, _schema.experiments):
        connection.execute(sa.delete(table).where(table.c.id == experiment_id))
    _tallies.forget(connection, (_tallies.METRICS, _tallies.CHECKPOINTS, _tallies.DELETED), ids)
    of_experiments = (_tallies.TRIALS, _tallies.EVENTS, _tallies.VALIDATIONS, _tallies.RUNNERS)
    _tallies.forget(connection, of_experiments, [experiment_id])
    _tallies.add(connection, _tallies.EXPERIMENTS, 0, -1)


def require_unregistered(connection: sa.Connection, experiment_id: int) -> None:
    """Raise `TrackingException` if a checkpoint of an experiment is a version of a model."""
    checkpoints, versions, models = _schema.checkpoints, _schema.versions, _schema.models
    query = (
        sa.select(models.c.name, versions.c.number)
        .join(versions, versions.c.model_id == models.c.id)
        .join(checkpoints, checkpoints.c.uuid == versions.c.checkpoint)
        .join(_TRIALS, _TRIALS.c.id == checkpoints.c.trial_id)
        .where(_TRIALS.c.experiment_id == experiment_id)
    )
    if found := connection.execute(query.limit(1)).first():
        raise errors.TrackingException(
            f"experiment {experiment_id} cannot be deleted: one of its checkpoints is version {found.number} of model "
            f"{found.name!r}; delete that version first: client.get_model({found.name!r}).get_version({found.number})"
            ".delete() in Python, with `from determined.experimental import client`."
        )
