"""Runs as jobs of a Slurm cluster whose nodes share the home folder."""

from determined.experiment.executors.slurm._executor import SlurmExecutor
from determined.experiment.executors.slurm._job import run_job
from determined.experiment.executors.slurm._queue import JobQueue, QueueRefused, QueueUnavailable

__all__ = ["JobQueue", "QueueRefused", "QueueUnavailable", "SlurmExecutor", "run_job"]
