"""This machine as a cluster of one."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

from determined import _home, errors
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors._base import Job
from determined.experiment.executors.local._allocator import LocalAllocator
from determined.experiment.executors.local._executor import LocalExecutor
from determined.experiment.executors.local._machine import SLOTS_VARIABLE, this_machine
from determined.tracking import Slots


def connect(on: str, slots: int | None) -> LocalCluster:
    """Return this machine, its CPU divided into `slots` slots."""
    if on != "local":
        raise errors.InvalidExperimentException(f"on={on!r}: this machine has no address; use on='local'.")
    return LocalCluster(slots)


class LocalCluster:
    """Runs trials and runners as processes of this machine."""

    def __init__(self, slots: int | None = None) -> None:
        self._slots = slots

    def check(self, config: ExperimentConfig) -> None:
        """Refuse an experiment whose trials need more slots than there are: they would wait for ever."""
        range, slots = config.resources.slot_range, this_machine(self._slots).slots
        if (needed := range.min) > slots:
            name = "slots_per_trial.min" if range.is_elastic else "slots_per_trial"
            raise errors.InvalidExperimentException(
                f"resources.{name}={needed}, but this machine has {slots} slots; write {name}: {slots} or less, or, "
                f"without GPUs, divide the CPU into more slots by --slots {needed} or DET_SLOTS={needed}."
            )

    def start_runner(self, command: Sequence[str], environment: Mapping[str, str], job: Job) -> subprocess.Popen[bytes]:
        """Start a runner as a process that outlives this one and its terminal."""
        chosen = {} if self._slots is None else {SLOTS_VARIABLE: str(self._slots)}
        with open(job.home.runner_log(job.experiment_id), "ab", opener=_home.private_opener) as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, **chosen},
                cwd=job.home.path,
                start_new_session=True,
            )
        # So that it does not stay a zombie as long as this process lives.
        name = f"runner of experiment {job.experiment_id}"
        threading.Thread(target=process.wait, name=name, daemon=True).start()
        return process

    @contextlib.contextmanager
    def open(self, job: Job) -> Iterator[tuple[LocalAllocator, LocalExecutor]]:
        """Give the slots of this machine, which all experiments share, and an executor."""
        with Slots(job.home.database) as slots, LocalExecutor() as executor:
            allocator = LocalAllocator(
                slots, this_machine(self._slots), job.experiment_id, job.config.resources.slot_range
            )
            yield allocator, executor
