"""What people want of a driven experiment."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from determined import errors

from . import _runs, _schema, _writing
from ._damage import Damage
from ._messages import RunState
from ._rows import EXPERIMENT, TRIAL, Row
from ._turns import KEEP, Control, Desired, Keep, TrialRequest

_EXPERIMENTS, _TRIALS = _schema.experiments.c, _schema.trials.c
_ENDS = (Desired.CANCELED, Desired.KILLED)
# Made once, since runners ask often.
_OF_EXPERIMENT = EXPERIMENT.select().where(_EXPERIMENTS.id == sa.bindparam("experiment"))
# Not in order: SQLite would rather look through all trials than sort a few.
_WISHED = TRIAL.select().where(_TRIALS.experiment_id == sa.bindparam("experiment"), _TRIALS.wish.is_not(None))


def control(connection: sa.Connection, experiment_id: int) -> Control:
    """Return what is wanted of an experiment."""
    which = {"experiment": experiment_id}
    experiment = _one(experiment_id, [EXPERIMENT.read(row) for row in connection.execute(_OF_EXPERIMENT, which)])
    trials = [TRIAL.read(row) for row in connection.execute(_WISHED, which)]
    return Control(
        desired=_desired(experiment),
        state=_runs.state_of(RunState, experiment),
        progress=experiment.progress,
        started=experiment.started,
        max_slots=experiment.max_slots,
        priority=experiment.priority,
        wishes={
            trial.id: _runs.state_of(TrialRequest, trial, "wish")
            for trial in sorted(trials, key=lambda row: int(row.id))
        },
    )


def _one(experiment_id: int, rows: list[Row]) -> Row:
    if len(rows) != 1:
        raise Damage(f"it has {len(rows)} experiments with the id {experiment_id}")
    return rows[0]


def _desired(experiment: Row) -> Desired:
    return _runs.state_of(Desired, experiment, "desired")


def ask(
    connection: sa.Connection,
    experiment_id: int,
    desired: Desired | None,
    limits: Mapping[str, int | Keep | None],
    wishes: Mapping[int, TrialRequest],
) -> None:
    """Store what is wanted of an experiment and of its trials; `limits` are columns of the experiment."""
    rows = _writing.locked(connection, EXPERIMENT, _EXPERIMENTS.id == experiment_id)
    experiment = _one(experiment_id, rows)
    if desired is not None:
        _require_possible(experiment, desired)
    _require_room_for_one(experiment, limits.get("max_slots"))
    changes: dict[str, object] = {name: value for name, value in limits.items() if value is not KEEP}
    if desired is not None:
        changes["desired"] = desired.value
    if changes:
        _writing.change(connection, EXPERIMENT, experiment, changes)
    for trial_id, wish in sorted(wishes.items()):
        _wish(connection, experiment_id, trial_id, wish)


def _require_possible(experiment: Row, desired: Desired) -> None:
    state, before = _runs.state_of(RunState, experiment), _desired(experiment)
    if state.is_final:
        raise errors.TrackingException(
            f"experiment {experiment.id} cannot become {desired.value}: it has ended ({state.value}); "
            f"`det experiment continue {experiment.id}` begins it anew."
        )
    if before in _ENDS and desired not in (before, Desired.KILLED):
        raise errors.TrackingException(
            f"experiment {experiment.id} cannot become {desired.value}: it is to end as {before.value}; wait for that "
            f"by `det experiment wait {experiment.id}`."
        )


def _require_room_for_one(experiment: Row, max_slots: int | Keep | None) -> None:
    """Refuse a limit with which no trial could ever start."""
    needed = ((experiment.config or {}).get("resources") or {}).get("slots_per_trial") or 1
    if isinstance(max_slots, int) and max_slots < needed:
        raise errors.TrackingException(
            f"max_slots={max_slots}: each trial of experiment {experiment.id} needs slots_per_trial={needed} slots; "
            f"pass at least {needed}, None for no limit, or stop all trials by `det experiment pause {experiment.id}`."
        )


def _wish(connection: sa.Connection, experiment_id: int, trial_id: int, wish: TrialRequest) -> None:
    rows = _writing.locked(connection, TRIAL, _TRIALS.id == trial_id, _TRIALS.experiment_id == experiment_id)
    if not rows:
        raise errors.TrackingException(
            f"there is no trial {trial_id} in experiment {experiment_id}; "
            f"`det experiment describe {experiment_id}` shows its trials."
        )
    if (state := _runs.state_of(RunState, rows[0])).is_final:
        raise errors.TrackingException(f"trial {trial_id} cannot {wish.value.lower()}: it has ended ({state.value}).")
    _writing.change(connection, TRIAL, rows[0], {"wish": wish.value})
