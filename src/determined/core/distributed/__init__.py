"""Ranks of one training: who they are, how they exchange objects, and how they notice that one is gone."""

from determined.core.distributed._context import (
    DEFAULT_TIMEOUT_S,
    TIMEOUT_VARIABLE,
    DistributedContext,
    timeout_seconds,
)
from determined.core.distributed._health import HealthMonitor
from determined.core.distributed._store import listen

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "TIMEOUT_VARIABLE",
    "DistributedContext",
    "HealthMonitor",
    "listen",
    "timeout_seconds",
]
