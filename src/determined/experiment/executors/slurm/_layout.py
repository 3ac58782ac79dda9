"""How the slots of a trial spread over the nodes of a Slurm cluster."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from determined import errors

_TIMEOUT_S = 60.0
_GPUS = re.compile(r"gpu(?::([^:,()]+))?:(\d+)")


class Layout(NamedTuple):
    """What a trial gets of a cluster."""

    nodes: int
    slots_per_node: int
    has_gpus: bool
    capacity: int
    """The slots of all nodes."""


class _Nodes(NamedTuple):
    """Nodes that are alike."""

    number: int
    cpus: int
    gpus: int


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the layout of the trials of an experiment; a slot is a GPU, or a CPU where the nodes have no GPUs."""
    section, slots = config["slurm"], int(config["resources"]["slots_per_trial"])
    nodes = _nodes(section["sbatch_args"], section["gpu_type"])
    has_gpus = any(node.gpus for node in nodes)
    if section["gpu_type"] is not None and not has_gpus:
        raise errors.InvalidExperimentException(
            f"slurm.gpu_type={section['gpu_type']!r}: no node of the partition has such GPUs; `sinfo -o %G` lists them."
        )
    sizes = [node.gpus if has_gpus else node.cpus for node in nodes]
    capacity = sum(node.number * size for node, size in zip(nodes, sizes, strict=True))
    largest = max(sizes, default=0)
    per_node = _slots_per_node(slots, section["slots_per_node"], largest)
    if slots > capacity or per_node > largest:
        raise errors.InvalidExperimentException(
            f"resources.slots_per_trial={slots} with {per_node} on a node: the nodes of the partition have "
            f"{capacity} {'GPUs' if has_gpus else 'CPUs'}, at most {largest} on one; ask for fewer, or choose another "
            "partition by slurm.sbatch_args: [--partition=NAME]."
        )
    return Layout(slots // per_node, per_node, has_gpus, capacity)


def _slots_per_node(slots: int, wanted: int | None, largest: int) -> int:
    if wanted is None:
        fitting = [size for size in range(1, min(slots, largest) + 1) if slots % size == 0]
        return max(fitting, default=1)
    if slots > wanted and slots % wanted:
        raise errors.InvalidExperimentException(
            f"slurm.slots_per_node={wanted} does not divide resources.slots_per_trial={slots}; all nodes of a trial "
            "have the same number of slots."
        )
    return min(slots, wanted)


def _nodes(sbatch_args: Sequence[str], gpu_type: str | None) -> list[_Nodes]:
    """Return the nodes of the partition that jobs go to."""
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
    return [_Nodes(int(count), int(cpus.rstrip("+")), _gpus(gres, gpu_type)) for _, count, cpus, gres in rows]


def _gpus(gres: str, gpu_type: str | None) -> int:
    """Return the GPUs of a node in what Slurm writes as `gpu:a100:8(S:0-1)`."""
    return sum(int(count) for kind, count in _GPUS.findall(gres) if gpu_type in (None, kind))
