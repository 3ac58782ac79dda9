"""Runs as processes of this machine, on its slots."""

from determined.experiment.executors.local._allocator import LocalAllocator
from determined.experiment.executors.local._executor import LocalExecutor
from determined.experiment.executors.local._machine import SLOTS_VARIABLE, Machine, this_machine

__all__ = ["SLOTS_VARIABLE", "LocalAllocator", "LocalExecutor", "Machine", "this_machine"]
