"""What people want of a managed experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from determined import errors

from ._data.changesets import Control, Desired, TrialRequest
from ._database import schema as db
from ._queries import fill

_EXPERIMENTS, _TRIALS = db.experiments.c, db.trials.c
_FINAL_REQUESTS = (Desired.CANCELED, Desired.KILLED)
# Made once, since runners ask often.
_OF_EXPERIMENT = sa.select(
    *(_EXPERIMENTS[name] for name in ("desired", "state", "progress", "started", "max_slots", "priority"))
).where(_EXPERIMENTS.id == sa.bindparam("experiment"))
# Not in order: SQLite would rather look through all trials than sort a few.
_REQUESTED = sa.select(_TRIALS.id, _TRIALS.requested).where(
    _TRIALS.experiment_id == sa.bindparam("experiment"), _TRIALS.requested.is_not(None)
)


def control(connection: sa.Connection, experiment_id: int) -> Control:
    """Return what is wanted of an experiment."""
    which = {"experiment": experiment_id}
    experiment = connection.execute(_OF_EXPERIMENT, which).one()
    requested = connection.execute(_REQUESTED, which)
    return fill(
        Control, experiment, requests={row.id: row.requested for row in sorted(requested, key=lambda row: int(row.id))}
    )


def ask(
    connection: sa.Connection,
    experiment_id: int,
    desired: Desired | None,
    limits: Mapping[str, int | None],
    requests: Mapping[int, TrialRequest],
) -> None:
    """Store what is wanted of an experiment and of its trials; `limits` are columns of the experiment."""
    query = sa.select(db.experiments).where(_EXPERIMENTS.id == experiment_id).with_for_update(key_share=True)
    experiment = connection.execute(query).one()
    if desired is not None:
        _require_possible(experiment, desired)
    _require_room_for_one(experiment, limits.get("max_slots"))
    changes = {**limits, **({} if desired is None else {"desired": desired})}
    if changes:
        connection.execute(sa.update(db.experiments).where(_EXPERIMENTS.id == experiment_id).values(changes))
    for trial_id, request in sorted(requests.items()):
        _request(connection, experiment_id, trial_id, request)


def _require_possible(experiment: sa.Row[Any], desired: Desired) -> None:
    if experiment.state.is_final:
        raise errors.ConflictException(
            f"experiment {experiment.id} cannot become {desired.value}: it has ended ({experiment.state.value}); "
            f"`det experiment continue {experiment.id}` continues it."
        )
    before = experiment.desired
    if before in _FINAL_REQUESTS and desired not in (before, Desired.KILLED):
        raise errors.ConflictException(
            f"experiment {experiment.id} cannot become {desired.value}: it is to end as {before.value}; wait for that "
            f"by `det experiment wait {experiment.id}`."
        )


def _require_room_for_one(experiment: sa.Row[Any], max_slots: int | None) -> None:
    """Refuse a limit with which no trial could ever start."""
    needed = ((experiment.config or {}).get("resources") or {}).get("slots_per_trial") or 1
    if max_slots is not None and max_slots < needed:
        raise errors.InvalidRequestException(
            f"max_slots={max_slots}: each trial of experiment {experiment.id} needs slots_per_trial={needed} slots; "
            f"pass at least {needed}, None for no limit, or stop all trials by `det experiment pause {experiment.id}`."
        )


def _request(connection: sa.Connection, experiment_id: int, trial_id: int, request: TrialRequest) -> None:
    query = sa.select(_TRIALS.state).where(_TRIALS.id == trial_id, _TRIALS.experiment_id == experiment_id)
    state = connection.execute(query.with_for_update(key_share=True)).scalar_one_or_none()
    if state is None:
        raise errors.NotOnRecordException(
            f"there is no trial {trial_id} in experiment {experiment_id}; "
            f"`det experiment describe {experiment_id}` shows its trials."
        )
    if state.is_final:
        raise errors.ConflictException(
            f"trial {trial_id} cannot {request.value.lower()}: it has ended ({state.value})."
        )
    connection.execute(sa.update(db.trials).where(_TRIALS.id == trial_id).values(requested=request))
