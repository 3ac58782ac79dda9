"""Submit jobs to Slurm and ask for their states. Every call may wait for Slurm's controller."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from determined.experiment.config import ExperimentConfig
from determined.experiment.executors._base import RunSpec
from determined.experiment.executors.slurm._job import run_job
from determined.experiment.executors.slurm._layout import Partition

WARNING_S = 120
"""Seconds before its time limit at which Slurm warns a job."""
_TIMEOUT_S = 60.0
# Of the controller when it is away or busy, or when a user has as many jobs as may be.
_LATER = re.compile(
    r"contact slurm controller|socket timed out|not responding|temporarily|connection|try again|timed out"
    r"|unexpected message|zero bytes|(qos|assoc)?max\w*submit|too many jobs",
    re.IGNORECASE,
)


class QueueUnavailable(Exception):
    """Slurm does not answer now; the same may work later."""


class QueueRefused(Exception):
    """Slurm does not accept this, now or later."""


class JobQueue(Protocol):
    """What an executor needs of a batch system. Every call may raise `QueueUnavailable`."""

    def submit(self, spec: RunSpec) -> str:
        """Submit the job of a run, and return its id; raises `QueueRefused` if it cannot run."""

    def find(self, spec: RunSpec) -> str | None:
        """Return the id of the job of a run that may have been submitted."""

    def states(self, jobs: Collection[str]) -> Mapping[str, str]:
        """Return the states of jobs as Slurm calls them; those that are no longer known are missing."""

    def cancel_waiting(self, jobs: Collection[str]) -> None:
        """Cancel those of the jobs that have not begun."""

    def kill(self, jobs: Collection[str]) -> None:
        """End all processes of jobs at once."""


class SlurmQueue:
    """The Slurm whose commands are on PATH."""

    def __init__(self, partition: Partition, config: ExperimentConfig) -> None:
        self._partition = partition
        self._section = config.slurm

    def submit(self, spec: RunSpec) -> str:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        # Python in the place of the shell that Slurm starts, so that Slurm's signals reach it.
        python = f"exec {shlex.quote(sys.executable)}"
        executor = submitit.SlurmExecutor(spec.files.job_files, python=python)
        executor.update_parameters(**self._parameters(spec))
        try:
            job = executor.submit(run_job, str(spec.folder))
        except (FailedJobError, FailedSubmissionError) as error:
            raise _explained(str(error)) from error
        return str(job.job_id)

    def find(self, spec: RunSpec) -> str | None:
        listed = _ask("squeue", "--me", "--states=all", f"--name={_name(spec)}", "--noheader", "--format=%i").split()
        return listed[0] if listed else None

    def states(self, jobs: Collection[str]) -> Mapping[str, str]:
        try:
            listed = _ask("squeue", "--states=all", f"--jobs={','.join(jobs)}", "--noheader", "--format=%i %T")
        except QueueRefused as error:
            if "invalid job id" in str(error).lower():  # the only one
                return {}
            raise QueueUnavailable(str(error)) from error
        pairs = (line.split() for line in listed.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def cancel_waiting(self, jobs: Collection[str]) -> None:
        self._cancel("--state=PENDING", *jobs)

    def kill(self, jobs: Collection[str]) -> None:
        self._cancel("--full", "--signal=KILL", *jobs)

    def _cancel(self, *arguments: str) -> None:
        with contextlib.suppress(QueueRefused):  # as when they have ended meanwhile: their states will tell
            _ask("scancel", "--quiet", *arguments)

    def _parameters(self, spec: RunSpec) -> dict[str, Any]:
        """Return the parameters of a job as submitit calls them."""
        section, layout = self._section, self._partition.layout(spec.ranks)
        assert layout is not None  # the allocator asks for what fits
        given = dict(map(_option, section.sbatch_args))
        kind = f"{section.gpu_type}:" if section.gpu_type else ""
        own: dict[str, Any] = {
            "job_name": _name(spec),
            "nodes": layout.nodes,
            "ntasks_per_node": 1,
            "use_srun": False,
            "time": None,  # that of the partition, unless sbatch_args has one
            "wckey": None,
        }
        if self._partition.has_gpus and not {"gpus", "gpus-per-node", "gres"} & given.keys():
            own["gpus_per_node"] = f"{kind}{layout.slots_per_node}"
        elif not self._partition.has_gpus and "cpus-per-task" not in given:
            own["cpus_per_task"] = layout.slots_per_node
        return {**own, "additional_parameters": {"signal": f"B:USR1@{WARNING_S}", **given}}


def _option(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.removeprefix("--").partition("=")
    return name, value if equals else True


def _name(spec: RunSpec) -> str:
    """Return the name of a run's job, which no other run of this user has."""
    folder = zlib.crc32(str(spec.folder.absolute()).encode())
    return f"det-{spec.experiment_id}.{spec.trial_id}.{spec.run_id}-{folder:08x}"


def _ask(*command: str) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QueueUnavailable(str(error)) from error
    if ended.returncode:
        raise _explained(ended.stderr)
    return ended.stdout


def _explained(message: str) -> Exception:
    said = " ".join(message.split())
    return QueueUnavailable(said) if _LATER.search(said) else QueueRefused(said)
