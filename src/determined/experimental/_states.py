"""States as the client names them."""

from __future__ import annotations

import enum


class ExperimentState(enum.Enum):
    """Where an experiment stands. COMPLETED, CANCELED and ERROR are ends.

    RUNNING is another name of ACTIVE. UNSPECIFIED and what follows it are states on a cluster, for programs that
    compare with them; no experiment here is ever in one.
    """

    ACTIVE = "STATE_ACTIVE"
    RUNNING = ACTIVE
    PAUSED = "STATE_PAUSED"
    STOPPING_COMPLETED = "STATE_STOPPING_COMPLETED"
    STOPPING_CANCELED = "STATE_STOPPING_CANCELED"
    STOPPING_KILLED = "STATE_STOPPING_KILLED"
    STOPPING_ERROR = "STATE_STOPPING_ERROR"
    COMPLETED = "STATE_COMPLETED"
    CANCELED = "STATE_CANCELED"
    ERROR = "STATE_ERROR"
    UNSPECIFIED = "STATE_UNSPECIFIED"
    QUEUED = "STATE_QUEUED"
    PULLING = "STATE_PULLING"
    STARTING = "STATE_STARTING"
    DELETING = "STATE_DELETING"
    DELETE_FAILED = "STATE_DELETE_FAILED"
    DELETED = "STATE_DELETED"


class TrialState(enum.Enum):
    """Where a trial stands; the names mean what those of `ExperimentState` do."""

    ACTIVE = "STATE_ACTIVE"
    RUNNING = ACTIVE
    PAUSED = "STATE_PAUSED"
    STOPPING_COMPLETED = "STATE_STOPPING_COMPLETED"
    STOPPING_CANCELED = "STATE_STOPPING_CANCELED"
    STOPPING_KILLED = "STATE_STOPPING_KILLED"
    STOPPING_ERROR = "STATE_STOPPING_ERROR"
    COMPLETED = "STATE_COMPLETED"
    CANCELED = "STATE_CANCELED"
    ERROR = "STATE_ERROR"
    UNSPECIFIED = "STATE_UNSPECIFIED"
    QUEUED = "STATE_QUEUED"
    PULLING = "STATE_PULLING"
    STARTING = "STATE_STARTING"


class CheckpointState(enum.Enum):
    """Whether the files of a checkpoint are there."""

    COMPLETED = "STATE_COMPLETED"
    DELETED = "STATE_DELETED"
