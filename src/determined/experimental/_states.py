"""States as the client names them."""

from __future__ import annotations

import enum


class ExperimentState(enum.Enum):
    """Where an experiment stands. COMPLETED, CANCELED and ERROR are ends."""

    ACTIVE = "STATE_ACTIVE"
    PAUSED = "STATE_PAUSED"
    STOPPING_COMPLETED = "STATE_STOPPING_COMPLETED"
    STOPPING_CANCELED = "STATE_STOPPING_CANCELED"
    STOPPING_KILLED = "STATE_STOPPING_KILLED"
    STOPPING_ERROR = "STATE_STOPPING_ERROR"
    COMPLETED = "STATE_COMPLETED"
    CANCELED = "STATE_CANCELED"
    ERROR = "STATE_ERROR"


class TrialState(enum.Enum):
    """Where a trial stands. COMPLETED, CANCELED and ERROR are ends."""

    ACTIVE = "STATE_ACTIVE"
    PAUSED = "STATE_PAUSED"
    STOPPING_COMPLETED = "STATE_STOPPING_COMPLETED"
    STOPPING_CANCELED = "STATE_STOPPING_CANCELED"
    STOPPING_KILLED = "STATE_STOPPING_KILLED"
    STOPPING_ERROR = "STATE_STOPPING_ERROR"
    COMPLETED = "STATE_COMPLETED"
    CANCELED = "STATE_CANCELED"
    ERROR = "STATE_ERROR"


class CheckpointState(enum.Enum):
    """Whether the files of a checkpoint are there."""

    COMPLETED = "STATE_COMPLETED"
    DELETED = "STATE_DELETED"
