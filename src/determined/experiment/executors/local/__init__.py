"""Runs as processes of this machine, on its slots."""

from determined.experiment.executors.local._executor import LocalExecutor
from determined.experiment.executors.local._machine import this_machine

__all__ = ["LocalExecutor", "this_machine"]
