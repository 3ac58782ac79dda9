"""What a runner knows, what it is given and what it asks for. Plain data."""

from __future__ import annotations

import dataclasses
import enum
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from determined.experiment.config import ExperimentConfig, SlotRange
from determined.experiment.executors import Handle, Placement, RunExit
from determined.experiment.runner._outcome import StopReason
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.search import Create
from determined.tracking import CheckpointRecord, Control, RunState, Validation


@dataclasses.dataclass(slots=True, kw_only=True)
class OpenTrial:
    """A trial that has not ended: it runs, or waits for slots."""

    id: int
    request_id: str
    hparams: Mapping[str, Any]
    seed: int
    run_id: int = 0
    """The number of its latest run; 0 before the first."""
    restarts: int = 0
    stop_reason: StopReason | None = None
    """Why it was asked to stop; None if it was not."""
    is_running: bool = False
    is_adopted: bool = False
    """Whether an earlier runner started its run."""
    handle: Handle | None = None
    """What identifies its run for the executor; None until the executor tells."""
    placement: Placement | None = None
    """Where its run is; None while it waits."""
    slots: int = 1
    """How many slots its run has, or may take when it starts."""
    checkpoint: CheckpointRecord | None = None
    """What its next run starts from."""
    is_checked: bool = True
    """Whether `checkpoint` is the newest one that is intact."""
    is_being_checked: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it could start."""
        return not self.is_running and self.stop_reason is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that a runner decides by."""

    entrypoint: str
    max_restarts: int
    fatal_patterns: frozenset[str]
    """Patterns of the output after which a trial is not restarted."""
    slots: SlotRange
    """The slots of a trial."""
    capacity: int
    """The slots that there are."""

    @classmethod
    def of(cls, config: ExperimentConfig, capacity: int) -> Self:
        """Return the rules of a config."""
        entrypoint, policies = config.entrypoint, config.log_policies
        return cls(
            entrypoint=entrypoint if isinstance(entrypoint, str) else shlex.join(entrypoint or []),
            max_restarts=config.max_restarts,
            fatal_patterns=frozenset(one.pattern for one in policies if one.pattern and one.action == "cancel_retries"),
            slots=config.resources.slot_range,
            capacity=capacity,
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class RunnerState:
    """Everything that a runner remembers from one step to the next. `restore` makes it from the record."""

    rules: Rules
    search: SearchReplay
    control: Control
    """What people want of the experiment."""
    trials: dict[int, OpenTrial] = dataclasses.field(default_factory=dict)
    """The open trials by id, the oldest first."""
    final_states: dict[int, RunState] = dataclasses.field(default_factory=dict)
    """The states of the trials that have ended, by id."""
    created: list[Create] = dataclasses.field(default_factory=list)
    """Trials of the last changeset, whose ids come with the next inputs."""
    stop_reason: StopReason | None = None
    """Why all trials are asked to stop; None while the experiment goes on."""
    outcome: RunState | None = None
    """The state in which the runner leaves the experiment; None while it goes on."""
    has_begun: bool = False
    invalid_in_a_row: int = 0
    """Trials that ended because of invalid hyperparameters, since the last one that did not."""
    wanted_slots: int = -1
    progress: float = -1.0

    @property
    def is_ending(self) -> bool:
        """Whether all trials end for good."""
        return self.stop_reason is not None and self.stop_reason.is_for_good

    def running(self) -> list[OpenTrial]:
        """Return the trials that run, the oldest first."""
        return [trial for trial in self.trials.values() if trial.is_running]

    def waiting(self) -> list[OpenTrial]:
        """Return the trials that could start, the oldest first; none while all trials are asked to stop."""
        return [trial for trial in self.trials.values() if trial.is_waiting] if self.stop_reason is None else []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What has happened since the last step. What is by trial is by the id of the trial."""

    time: float
    created: Sequence[int] = ()
    """The ids of the trials that the last changeset created, in their order."""
    exits: Sequence[RunExit] = ()
    validations: Sequence[Validation] = ()
    """Those after the last one that the search knows, and all of the runs in `exits`."""
    control: Control | None = None
    """None if it is what it was."""
    asked_to_leave: bool = False
    """Whether this process should end."""
    handles: Mapping[int, Handle] = dataclasses.field(default_factory=dict)
    placements: Mapping[int, Placement | None] = dataclasses.field(default_factory=dict)
    """What came of each `TAKE`: None if there were not enough slots."""
    checkpoints: Mapping[int, CheckpointRecord | None] = dataclasses.field(default_factory=dict)
    """What came of each `FIND_CHECKPOINT`: None if there is none that is intact."""
    allowance: int | None = None
    """How many slots the experiment may hold, if it wants `state.wanted_slots`; None if that was not asked."""
    fractions: Mapping[str, float] | None = None
    """How much of each open trial is done, by request id; None if that was not asked."""


class Action(enum.Enum):
    """What a runner can ask for."""

    ADOPT = "take over a run that an earlier runner started"
    FIND_CHECKPOINT = "find the newest intact checkpoint of a trial"
    TAKE = "take slots for a trial"
    ATTACH = "let the run of a trial hold its slots"
    RELEASE = "release the slots of a trial"
    START = "start the run of a trial at its placement, from its checkpoint"
    STOP = "ask a run to save and end"
    KILL = "end a run at once"


class Command(NamedTuple):
    """Something to do about a trial, after the changes have been stored."""

    action: Action
    trial_id: int
