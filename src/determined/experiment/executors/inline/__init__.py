"""Runs within this process, for debugging and tests; works on every system."""

from determined.experiment.executors.inline._executor import InlineExecutor

__all__ = ["InlineExecutor"]
