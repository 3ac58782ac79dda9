"""Executors start the runs of trials, store what they write and report how they ended; allocators give them slots."""

from determined.experiment.executors._base import (
    Allocator,
    Device,
    EndReason,
    Executor,
    Handle,
    Placement,
    RankGroup,
    RunExit,
    RunSpec,
)
from determined.experiment.executors._logs import LogLine, follow_logs, read_logs
from determined.experiment.executors.inline import InlineExecutor
from determined.experiment.executors.local import SLOTS_VARIABLE, LocalAllocator, LocalExecutor, Machine, this_machine

__all__ = [
    "SLOTS_VARIABLE",
    "Allocator",
    "Device",
    "EndReason",
    "Executor",
    "Handle",
    "InlineExecutor",
    "LocalAllocator",
    "LocalExecutor",
    "LogLine",
    "Machine",
    "Placement",
    "RankGroup",
    "RunExit",
    "RunSpec",
    "follow_logs",
    "read_logs",
    "this_machine",
]
