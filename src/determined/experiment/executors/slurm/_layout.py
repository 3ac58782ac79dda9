"""How the slots of a trial spread over the nodes of a Slurm partition."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from determined import errors
from determined.experiment.config import ExperimentConfig

_TIMEOUT_S = 60.0
_GPUS = re.compile(r"gpu(?::([^:,()]+))?:(\d+)")


class Layout(NamedTuple):
    """The nodes that a trial gets."""

    nodes: int
    slots_per_node: int


class Partition(NamedTuple):
    """The nodes that jobs go to. A slot is a GPU, or a CPU where no node has GPUs."""

    sizes: Sequence[int]
    """The slots of each node."""
    has_gpus: bool
    slots_per_node: int | None
    """What the config asks for."""

    @property
    def capacity(self) -> int:
        """The slots of all nodes."""
        return sum(self.sizes)

    def layout(self, slots: int) -> Layout | None:
        """Return the fewest nodes for that many slots, the same number on each; None if there are not enough."""
        wanted = range(slots, 0, -1) if self.slots_per_node is None else [min(self.slots_per_node, slots)]
        fitting = (Layout(slots // size, size) for size in wanted if slots % size == 0)
        return next((one for one in fitting if self._nodes_with(one.slots_per_node) >= one.nodes), None)

    def _nodes_with(self, slots: int) -> int:
        return sum(size >= slots for size in self.sizes)


def partition_of(config: ExperimentConfig) -> Partition:
    """Return the partition that the trials of an experiment run in; refuses one that is too small for them."""
    section, slots = config.slurm, config.resources.slot_range.min
    found = _partition(section.sbatch_args, section.gpu_type, section.slots_per_node)
    what = "GPUs" if found.has_gpus else "CPUs"
    if section.gpu_type is not None and not found.has_gpus:
        raise errors.InvalidExperimentException(
            f"slurm.gpu_type={section.gpu_type!r}: no node of the partition has such GPUs; `sinfo -o %G` lists them."
        )
    if found.layout(slots) is None:
        each = "" if section.slots_per_node is None else f" with slurm.slots_per_node={section.slots_per_node}"
        raise errors.InvalidExperimentException(
            f"resources.slots_per_trial={slots}{each} does not fit: all nodes of a trial have the same number of "
            f"slots, and the partition has nodes with {', '.join(map(str, sorted(found.sizes)))} {what}. Ask for other "
            "numbers, or choose another partition by slurm.sbatch_args: [--partition=NAME]."
        )
    return found


def _partition(sbatch_args: Sequence[str], gpu_type: str | None, slots_per_node: int | None) -> Partition:
    chosen = [option for option in sbatch_args if option.startswith("--partition=")][-1:]
    command = ["sinfo", "--noheader", "--format=%P|%D|%c|%G", *chosen]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.InvalidExperimentException(f"Slurm cannot be asked for its nodes: {error}.") from error
    if listed.returncode:
        raise errors.InvalidExperimentException(
            f"Slurm cannot be asked for its nodes: {listed.stderr.strip()}; `{' '.join(command)}` must work here."
        )
    rows = [line.split("|") for line in listed.stdout.splitlines()]
    rows = [row for row in rows if chosen or row[0].endswith("*")]
    if not rows:
        raise errors.InvalidExperimentException(
            f"Slurm has no {chosen[0].lstrip('-') if chosen else 'default partition'}; name one that `sinfo` lists in "
            "slurm.sbatch_args: [--partition=NAME]."
        )
    gpus = [_gpus(gres, gpu_type) for *_, gres in rows]
    of_rows = gpus if any(gpus) else [int(cpus.rstrip("+")) for _, _, cpus, _ in rows]
    sizes = [size for (_, count, *_), size in zip(rows, of_rows, strict=True) for _ in range(int(count)) if size]
    return Partition(sizes, any(gpus), slots_per_node)


def _gpus(gres: str, gpu_type: str | None) -> int:
    """Return the GPUs of a node in what Slurm writes as `gpu:a100:8(S:0-1)`."""
    return sum(int(count) for kind, count in _GPUS.findall(gres) if gpu_type in (None, kind))
