"""A Slurm cluster, of which this machine is a login node."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import psutil

from determined import _home, errors
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors._base import Device, Handle, Job, Placement
from determined.experiment.executors.local._cluster import LocalCluster
from determined.experiment.executors.slurm._executor import SlurmExecutor
from determined.experiment.executors.slurm._layout import Partition, partition_of
from determined.experiment.executors.slurm._queue import SlurmQueue

# Where several machines can have the same file open: SQLite's log of changes needs memory that all writers share.
_SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "afs", "9p", "panfs", "wekafs", "gfs")


def connect(on: str, slots: int | None) -> SlurmCluster:
    """Return the Slurm whose commands are on PATH."""
    if on != "slurm":
        raise errors.InvalidExperimentException(
            f"on={on!r}: Slurm has no address here; use on='slurm' where its commands work."
        )
    return SlurmCluster()


class SlurmCluster:
    """Runs each run of a trial as a job; the runner is a process of this machine."""

    def check(self, config: ExperimentConfig) -> None:
        """Refuse what cannot run: without Slurm, on more than it has, or with records that would be damaged."""
        if importlib.util.find_spec("submitit") is None:
            raise errors.InvalidExperimentException(
                "on='slurm' needs the package submitit; install it with: pip install 'resolute[slurm]'."
            )
        if missing := [name for name in ("sbatch", "squeue", "scancel", "sinfo") if shutil.which(name) is None]:
            raise errors.InvalidExperimentException(
                f"on='slurm' needs {', '.join(missing)} on PATH; run this on a login node of the cluster."
            )
        _check_records(_home.home().database)
        partition_of(config)

    def start_runner(self, command: Sequence[str], environment: Mapping[str, str], job: Job) -> subprocess.Popen[bytes]:
        """Start a runner on this machine."""
        return LocalCluster().start_runner(command, environment, job)

    @contextlib.contextmanager
    def open(self, job: Job) -> Iterator[tuple[SlurmAllocator, SlurmExecutor]]:
        """Give what submits jobs to the partition that the config names."""
        partition = partition_of(job.config)
        executor = SlurmExecutor(SlurmQueue(partition, job.config))
        try:
            yield SlurmAllocator(partition), executor
        finally:
            executor.close()


class SlurmAllocator:
    """Lets Slurm decide who gets what: a job waits in its queue, and holds nothing here."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    @property
    def capacity(self) -> int:
        return self._partition.capacity

    @property
    def device(self) -> Device:
        return "cuda" if self._partition.has_gpus else "cpu"

    def allowance(self, wanted: int, priority: int | None) -> int:
        return wanted

    def take(self, trial_id: int, slots: int) -> Placement | None:
        """Return as many slots as asked for, or the most below that fit on nodes alike."""
        fitting = (one for one in map(self._partition.layout, range(slots, 0, -1)) if one is not None)
        layout = next(fitting, None)
        return None if layout is None else {"slots": list(range(layout.nodes * layout.slots_per_node))}

    def attach(self, trial_id: int, handle: Handle) -> None:
        """Do nothing: Slurm knows its jobs."""

    def release(self, trial_id: int) -> None:
        """Do nothing: Slurm frees what a job had."""


def _check_records(database: pathlib.Path | object) -> None:
    """Refuse to let several machines write to one SQLite file, which would damage it."""
    if not isinstance(database, pathlib.Path):
        return
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[str(folder)] for folder in database.parents if str(folder) in mounts), "")
    if kind.startswith(_SHARED_FILE_SYSTEMS):
        raise errors.InvalidExperimentException(
            f"The tracking database {str(database)!r} is on {kind}, where several nodes cannot write to one SQLite "
            "file; set DET_DATABASE=postgresql://USER@HOST/NAME. Everything else can stay there."
        )
