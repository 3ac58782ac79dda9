"""States in the client."""

from __future__ import annotations

import enum


class ExperimentState(enum.Enum):
    """The state of an experiment. COMPLETED, CANCELED and ERROR are final.

    RUNNING is another name of ACTIVE. UNSPECIFIED and those after it are states of a cluster, for programs that compare
    with them; no experiment here has one of them.
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
    """The state of a trial; the names are those of `ExperimentState`."""

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
    """Whether the files of a checkpoint exist."""

    COMPLETED = "STATE_COMPLETED"
    DELETED = "STATE_DELETED"
