"""Executors start the runs of trials, store what they write and report how they ended; allocators give them slots."""

from determined.experiment.executors._base import (
    Allocator,
    Cluster,
    Device,
    EndReason,
    Executor,
    Handle,
    Job,
    Placement,
    RankGroup,
    RunExit,
    RunnerProcess,
    RunSpec,
)
from determined.experiment.executors._clusters import connect
from determined.experiment.executors._logs import LogLine, follow_logs, read_logs
from determined.experiment.executors.inline import InlineExecutor
from determined.experiment.executors.local import LocalExecutor, this_machine

__all__ = [
    "Allocator",
    "Cluster",
    "Device",
    "EndReason",
    "Executor",
    "Handle",
    "InlineExecutor",
    "Job",
    "LocalExecutor",
    "LogLine",
    "Placement",
    "RankGroup",
    "RunExit",
    "RunSpec",
    "RunnerProcess",
    "connect",
    "follow_logs",
    "read_logs",
    "this_machine",
]
