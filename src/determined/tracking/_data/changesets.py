"""What a runner stores and reads of a managed experiment. Plain data, cheap to import."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from .messages import RunState
from .process import RunProcess


class Keep(enum.Enum):
    """What stands for a value that stays as it is, where None is a value of its own."""

    KEEP = "KEEP"


KEEP = Keep.KEEP
"""What is passed for a value that stays as it is."""


def given(**values: Any) -> dict[str, Any]:
    """Return the values that do not stay as they are."""
    return {name: value for name, value in values.items() if value is not KEEP}


class Desired(enum.StrEnum):
    """What people want an experiment to do."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    CANCELED = "CANCELED"
    KILLED = "KILLED"


class TrialRequest(enum.StrEnum):
    """What people want to become of one trial: stop with a checkpoint, or end at once."""

    STOP = "STOP"
    KILL = "KILL"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentDescription:
    """What is known of a managed experiment when it is created."""

    name: str
    config: Mapping[str, Any]
    description: str | None = None
    labels: Sequence[str] = ()
    project: str | None = None
    workspace: str | None = None
    priority: int | None = None
    max_slots: int | None = None
    desired: Desired = Desired.ACTIVE
    cluster: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchEvent:
    """One event of the search, with what was done about it; the numbers of an experiment are 1, 2, 3, ..."""

    number: int
    kind: str
    request_id: str | None
    payload: Mapping[str, Any]
    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the search after the event with this number; 0 is before the first."""

    number: int
    state: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewTrial:
    """A trial that the search asks for; it is not running yet."""

    request_id: str
    hparams: Mapping[str, Any]
    seed: int
    entrypoint: str
    state: RunState = RunState.ACTIVE
    torch_version: str | None = None
    git_commit: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialChange:
    """What becomes of a trial; None is left as it is.

    `run_id` begins a run and must be the trial's last one plus 1, the first being 1. `started_from_step` is of the
    checkpoint that the run is given to start from: what earlier runs reported after it is superseded, unless the run
    itself says by `Continued` that it started elsewhere. `handle` is what the executor of the run finds it by, any JSON
    mapping; one as `RunProcess.to_json` returns it, as of runs on this machine, also names the process of the run.
    `ended` is of the trial; a final state without one ends it now. `run_ended` and `run_reason` are of its latest run.
    """

    trial_id: int
    state: RunState | None = None
    reason: str | None = None
    run_id: int | None = None
    started_from_step: int = 0
    restarts: int | None = None
    handle: Mapping[str, Any] | None = None
    ended: float | None = None
    run_ended: float | None = None
    run_reason: str | None = None
    clears_request: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentChange:
    """What becomes of the experiment; None is left as it is.

    A final state without `ended` ends it now; any other state undoes an end. `wanted_slots` is what `Slots.demands`
    shows to the others. `desired` overrides what people asked for, as when an ended experiment is continued, which may
    change its `config` too; the metric that its search goes by stays.
    """

    state: RunState | None = None
    progress: float | None = None
    ended: float | None = None
    wanted_slots: int | None = None
    desired: Desired | None = None
    config: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changeset:
    """What a runner does at once: all of it is stored, or nothing."""

    events: Sequence[SearchEvent] = ()
    snapshot: Snapshot | None = None
    new_trials: Sequence[NewTrial] = ()
    trial_changes: Sequence[TrialChange] = ()
    experiment_change: ExperimentChange | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What people want of a managed experiment, with requests by trial id, and its state."""

    desired: Desired
    state: RunState
    progress: float | None
    started: float
    max_slots: int | None
    priority: int | None
    requests: Mapping[int, TrialRequest]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A validation report of a trial; an experiment's have the ids 1, 2, 3, ... in the order of their storing."""

    id: int
    trial_id: int
    run_id: int | None
    steps_completed: int
    metrics: Mapping[str, Any]
    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialEntry:
    """A trial as its runner needs to know it: without its metrics."""

    id: int
    request_id: str
    state: RunState
    reason: str | None
    status: str | None
    run_id: int  # of its latest run; 0 before the first
    restarts: int
    process: RunProcess | None  # of its latest run, if that is known
    hparams: Mapping[str, Any]
    seed: int
    progress: float | None
    requested: TrialRequest | None  # what people want of it
    started: float
    ended: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of a trial: a new one begins with each restart and each time that the trial goes on after a pause.

    `outcome` and `outcome_reason` are how its own process said that it ended, which a killed one cannot; `reason` is
    what the runner made of it.
    """

    trial_id: int
    run_id: int
    process: RunProcess | None
    source_checkpoint: str | None  # if the run said from which it started
    started_from_step: int
    reported_steps: int
    started: float
    ended: float | None
    reason: str | None
    outcome: RunState | None
    outcome_reason: str | None
    handle: Mapping[str, Any] | None  # what the executor of the run finds it by, once that is known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A slot of a host that is in use; `process` holds it for the trial."""

    slot: int
    experiment_id: int
    trial_id: int
    process: RunProcess
    since: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the living runner of an experiment wants of the slots of a host and what it holds; `since` it runs.

    `unit` is how many slots one of its trials needs at least; elastic ones can use more.
    """

    experiment_id: int
    unit: int
    priority: int | None
    wanted: int
    slots: Sequence[int]
    """The numbers of those that it holds."""
    max_slots: int | None
    since: float
    is_elastic: bool = False

    @property
    def held(self) -> int:
        """How many slots it holds."""
        return len(self.slots)
