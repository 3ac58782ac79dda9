"""What a run reports to the tracking database. Plain data, cheap to import and to build."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias


class RunState(enum.StrEnum):
    """Where an experiment or a trial stands."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"

    @property
    def is_final(self) -> bool:
        """Whether nothing runs any more and nothing will."""
        return self in (RunState.COMPLETED, RunState.CANCELED, RunState.ERROR)

    @property
    def has_process(self) -> bool:
        """Whether a process is at work in this state."""
        return self is not RunState.PAUSED and not self.is_final


class CheckpointState(enum.StrEnum):
    """Whether a checkpoint's files are still there."""

    COMPLETED = "COMPLETED"
    DELETED = "DELETED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """What is known of a run when it starts: enough to repeat it and to find its process."""

    name: str
    config: Mapping[str, Any] | None
    hparams: Mapping[str, Any]
    seed: int
    entrypoint: str
    torch_version: str | None
    resolute_version: str
    git_commit: str | None
    pid: int
    process_started: float  # psutil's create_time, where the identity is not known
    host: str  # as socket.gethostname() says
    identity: Mapping[str, int | str] | None = None  # `ProcessIdentity.to_json`, on Linux


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricReport:
    """Metrics of one group ("training", "validation" or any name) after a number of batches."""

    group: str
    steps_completed: int
    metrics: Mapping[str, Any]
    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete in storage; `resources` maps each file to its size in bytes."""

    uuid: str
    steps_completed: int
    path: str
    metadata: Mapping[str, Any]
    resources: Mapping[str, int]
    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDeleted:
    """The files of a checkpoint are gone; its record stays."""

    uuid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The run started from this checkpoint, which was saved after `steps_completed` batches.

    The training metrics of the last ones may be in it unreported; then they are reported again.
    """

    checkpoint: str
    steps_completed: int
    reported_steps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The run is in another state from `time` on."""

    state: RunState
    time: float
    reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgressChanged:
    """The run has done this part of its work, from 0 to 1."""

    progress: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatusChanged:
    """The run is busy with this, in words for people."""

    status: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetadataChanged:
    """The metadata of the run, replacing what was there."""

    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeedChanged:
    """The run goes on with another seed than it was described with."""

    seed: int


Message: TypeAlias = (
    MetricReport
    | CheckpointSaved
    | CheckpointDeleted
    | Continued
    | StateChanged
    | ProgressChanged
    | StatusChanged
    | MetadataChanged
    | SeedChanged
)
