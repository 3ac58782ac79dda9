"""What the messages of a run do to the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, assert_never

import sqlalchemy as sa

from ._data import messages
from ._data.messages import CheckpointSaved, CheckpointState, Continued, Message, MetricReport, StateChanged
from ._data.records import score_of
from ._database import schema as db
from ._database.connections import wait_for_turn
from ._queries import columns_of, update

_VALIDATION = "validation"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialRef:
    """The trial that messages are about."""

    experiment_id: int
    trial_id: int
    is_managed: bool = False  # by a runner, which decides about states
    run_id: int | None = None  # of the run that writes, in a managed experiment
    metric: str | None = None  # the searcher's, if the config names one


@dataclasses.dataclass(slots=True)
class Changes:
    """What a list of messages does to each table, so that each is written once."""

    of: TrialRef
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    saved: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)
    trial: dict[str, Any] = dataclasses.field(default_factory=dict)
    experiment: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    continued: Continued | None = None

    def add(self, message: Message) -> None:
        """Add what one more message does."""
        match message:
            case MetricReport():
                self.metrics.append(self._report(message))
            case CheckpointSaved():
                self.saved.append(self._checkpoint(message))
            case messages.CheckpointDeleted():
                self.deleted.append(message.uuid)
            case StateChanged():
                self._change_state(message)
            case messages.ProgressChanged():
                self.trial["progress"] = self.experiment["progress"] = message.progress
            case Continued():
                self.continued = message
            case messages.StatusChanged() | messages.MetadataChanged() | messages.SeedChanged():
                self.trial.update(columns_of(message))
            case _:
                assert_never(message)

    def _report(self, report: MetricReport) -> dict[str, Any]:
        is_validation = report.group == _VALIDATION
        return {
            "trial_id": self.of.trial_id,
            "group": report.group,
            "steps_completed": report.steps_completed,
            "time": report.time,
            "metrics": report.metrics,
            "run_id": self.of.run_id,
            "experiment_id": self.of.experiment_id if is_validation else None,
            "number": None,
            "score": score_of(report.metrics, self.of.metric) if is_validation else None,
        }

    def _checkpoint(self, message: CheckpointSaved) -> dict[str, Any]:
        size = sum(message.resources.values())
        return {"trial_id": self.of.trial_id, "size": size, "state": CheckpointState.COMPLETED, **columns_of(message)}

    def _change_state(self, message: StateChanged) -> None:
        if self.of.is_managed:
            # The runner decides what the end of a process means for the trial; it can read how that called it.
            self.run.update(outcome=message.state, outcome_reason=message.reason)
            return
        change = {"state": message.state, "ended": message.time if message.state.is_final else None}
        self.experiment.update(change)
        self.trial.update(change, reason=message.reason)

    def apply(self, connection: sa.Connection) -> None:
        """Write all of it."""
        if self.metrics:
            if self.of.is_managed:
                _number_validations(connection, self.of.experiment_id, self.metrics)
            connection.execute(sa.insert(db.metrics), self.metrics)
        if unknown := _unknown(connection, self.saved):
            connection.execute(sa.insert(db.checkpoints), unknown)
        for uuid in self.deleted:
            update(connection, db.checkpoints, {"state": CheckpointState.DELETED}, db.checkpoints.c.uuid == uuid)
        self._apply_start(connection)
        update(connection, db.trials, self.trial, db.trials.c.id == self.of.trial_id)
        if self.of.run_id is not None:
            of_run = db.runs.c.trial_id == self.of.trial_id, db.runs.c.run_id == self.of.run_id
            update(connection, db.runs, self.run, *of_run)
        if not self.of.is_managed:
            update(connection, db.experiments, self.experiment, db.experiments.c.id == self.of.experiment_id)

    def _apply_start(self, connection: sa.Connection) -> None:
        """Add where the run started from: of the run, and of the trial if that is in another trial's checkpoint."""
        start = self.continued
        if start is None:
            return
        self.run |= {
            "source_checkpoint": start.checkpoint,
            "started_from_step": start.steps_completed,
            "reported_steps": start.reported_steps,
        }
        if self.of.run_id is None or not _is_of_trial(connection, start.checkpoint, self.of.trial_id):
            self.trial |= {
                "source_checkpoint": start.checkpoint,
                "source_steps_completed": start.steps_completed,
                "source_reported_steps": start.reported_steps,
            }


def _number_validations(connection: sa.Connection, experiment_id: int, reports: Sequence[dict[str, Any]]) -> None:
    """Number the reports that a runner looks for in the order in which they become visible to it."""
    if validations := [report for report in reports if report["group"] == _VALIDATION]:
        wait_for_turn(connection, "validations", experiment_id)
        last = connection.execute(_LAST_NUMBER, {"experiment": experiment_id}).scalar() or 0
        for number, report in enumerate(validations, last + 1):
            report["number"] = number


_LAST_NUMBER = sa.select(sa.func.max(db.metrics.c.number)).where(
    db.metrics.c.experiment_id == sa.bindparam("experiment"), db.metrics.c.number.is_not(None)
)


def _is_of_trial(connection: sa.Connection, uuid: str, trial_id: int) -> bool:
    checkpoints = db.checkpoints.c
    statement = sa.select(checkpoints.trial_id).where(checkpoints.uuid == uuid)
    return connection.execute(statement).scalar_one_or_none() == trial_id


def _unknown(connection: sa.Connection, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out checkpoints that are on record: another process may have found one before its own run reported it."""
    uuid = db.checkpoints.c.uuid
    return [
        row for row in saved if connection.execute(sa.select(uuid).where(uuid == row["uuid"])).one_or_none() is None
    ]
