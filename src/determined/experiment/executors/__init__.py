"""Executors: start the runs of trials, store what they write, and tell how they ended."""

from determined.experiment.executors._inline import InlineExecutor
from determined.experiment.executors._local import LocalExecutor
from determined.experiment.executors._logs import LogLine, follow_logs, read_logs
from determined.experiment.executors._base import EndReason, Executor, RunExit, RunSpec, is_class_entrypoint

__all__ = [
    "EndReason",
    "Executor",
    "InlineExecutor",
    "LocalExecutor",
    "LogLine",
    "RunExit",
    "RunSpec",
    "follow_logs",
    "is_class_entrypoint",
    "read_logs",
]
