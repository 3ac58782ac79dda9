"""Executors: start the runs of trials, store what they write, and tell how they ended."""

from determined.experiment.executors._base import (
    Allocator,
    Device,
    EndReason,
    Executor,
    Handle,
    Placement,
    RunExit,
    RunSpec,
    is_class_entrypoint,
)
from determined.experiment.executors._inline import InlineExecutor
from determined.experiment.executors._local import LocalExecutor
from determined.experiment.executors._logs import LogLine, follow_logs, read_logs

__all__ = [
    "Allocator",
    "Device",
    "EndReason",
    "Executor",
    "Handle",
    "InlineExecutor",
    "LocalExecutor",
    "LogLine",
    "Placement",
    "RunExit",
    "RunSpec",
    "follow_logs",
    "is_class_entrypoint",
    "read_logs",
]
