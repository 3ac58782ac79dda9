"""Runs of a trial: which of their reports stand when a later run started from before them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from determined._processes import ProcessIdentity

from ._damage import Damage
from ._messages import RunState
from ._process import RunProcess
from ._rows import Row
from ._turns import RunRecord

_LARGEST_PID = 2**32 - 1
# A run reports these at steps that follow each other, so its first one replaces all from that step on. Other groups
# may begin anywhere: the machine's own metrics do at step 0.
_IN_ORDER = ("training", "validation")

_State = TypeVar("_State", bound=enum.Enum)


def state_of(kind: type[_State], row: Row, column: str = "state") -> _State:
    """Return the state that a row says; `Damage` if there is no such state."""
    value = getattr(row, column)
    try:
        return kind(value)
    except ValueError as error:
        raise row.damage(column, value) from error


def process_of(row: Row) -> RunProcess | None:
    """Return the process that a row names, if it names one."""
    if not 0 <= row.pid <= _LARGEST_PID:
        raise row.damage("pid", row.pid)
    if not row.pid:
        return None
    return RunProcess(
        pid=row.pid,
        started=row.process_started,
        host=row.host,
        identity=_identity_of(row),
        alive_until=row.stored.get("alive_until"),
    )


def _identity_of(row: Row) -> ProcessIdentity | None:
    stored = row.identity
    if stored is None:  # stored by an earlier version, or not on Linux
        return None
    try:
        return ProcessIdentity.from_json(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise row.damage("identity", stored) from error


def columns_of(process: RunProcess | None) -> dict[str, Any]:
    """Return the columns that name a process, or that none is known."""
    if process is None:
        return {"pid": 0, "process_started": 0.0, "host": "", "identity": None}
    return {
        "pid": process.pid,
        "process_started": process.started,
        "host": process.host,
        "identity": None if process.identity is None else process.identity.to_json(),
    }


def columns_of_handle(handle: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns that name the process of a run, or that none is known."""
    return columns_of(None if handle is None else RunProcess.from_json(handle))


def require_complete(trial: Row, runs: Sequence[Row]) -> None:
    """Raise `Damage` unless these, in their order, are all runs of a trial."""
    if [run.run_id for run in runs] != list(range(1, (trial.run_id or 0) + 1)):
        raise Damage(f"trial {trial.id} has {len(runs)} runs on record where {trial.run_id or 0} were stored")


def record_of(run: Row) -> RunRecord:
    """Return a run as it is told to others."""
    return RunRecord(
        trial_id=run.trial_id,
        run_id=run.run_id,
        process=process_of(run),
        source_checkpoint=run.source_checkpoint,
        started_from_step=run.started_from_step,
        reported_steps=run.reported_steps,
        started=run.started,
        ended=run.ended,
        reason=run.reason,
        outcome=None if run.outcome is None else state_of(RunState, run, "outcome"),
        outcome_reason=run.outcome_reason,
    )


def last_step(group: str, steps_completed: int | None, reported_steps: int | None) -> int:
    """Return the last step whose reports stand when training went on from a checkpoint."""
    # The training metrics of its last batches may be in it unreported; then they are reported anew.
    return (reported_steps if group == "training" else steps_completed) or 0


def standing(reports: Sequence[Row], runs: Sequence[Row]) -> list[Row]:
    """Leave out what a later run of the trial has replaced, or will; reports of no run always stand."""
    if len(runs) < 2:
        return list(reports)
    first = _first_steps(reports)
    bounds = {group: _bounds(group, runs, first) for group in {report.stored["group"] for report in reports}}
    return [report for report in reports if _stands(report, bounds[report.stored["group"]])]


def _stands(report: Row, bounds: Mapping[int, float]) -> bool:
    run_id, step = report.stored["run_id"], report.stored["steps_completed"]
    if run_id is None:
        return True
    if run_id not in bounds:
        raise report.damage("run_id", run_id)
    return bool(step <= bounds[run_id])


def _bounds(group: str, runs: Sequence[Row], first: Mapping[tuple[str, int], int]) -> Mapping[int, float]:
    """Return the last step whose reports stand, by the run that they are of."""
    bounds: dict[int, float] = {}
    bound = math.inf
    for run in reversed(runs):
        bounds[run.run_id] = bound
        bound = min(bound, last_step(group, run.started_from_step, run.reported_steps))
        if group in _IN_ORDER and (group, run.run_id) in first:
            bound = min(bound, first[group, run.run_id] - 1)
    return bounds


def _first_steps(reports: Iterable[Row]) -> Mapping[tuple[str, int], int]:
    """Return the first step that a run reported of a group."""
    first: dict[tuple[str, int], int] = {}
    for report in reports:
        key, step = (report.stored["group"], report.stored["run_id"]), report.stored["steps_completed"]
        first[key] = min(first.get(key, step), step)
    return first
