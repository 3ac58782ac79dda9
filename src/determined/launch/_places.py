"""How many processes to start here, and how the machines of one training find each other."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

from determined._info import ClusterInfo
from determined._slurm import translate_slurm
from determined.launch._command import MODULE, UsageError
from determined.launch._supervisor import say

_FIRST_PORT = 20_000
_PORTS = 12_000  # below those that systems hand out by themselves


def processes_here(info: ClusterInfo | None) -> int:
    """Return how many processes to start if nobody says: one a slot of a managed run, else one a GPU, else one."""
    if info is not None:
        return max(len(info.slot_ids), 1)
    import torch

    if gpus := torch.cuda.device_count():
        return gpus
    say(f"no GPU here, so 1 process starts. For more: python -m {MODULE} --nproc-per-node 4 -- ...")
    return 1


def machines(info: ClusterInfo | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return torchrun's options for a training on several machines that a runner or `srun` describes; else none."""
    if info is not None:
        return _of_runner(info)
    return _of_slurm(environment)


def _of_runner(info: ClusterInfo) -> dict[str, Any]:
    if len(info.container_addrs) < 2:
        return {}
    return {
        "nnodes": str(len(info.container_addrs)),
        "node_rank": info.container_rank,
        "master_addr": info.container_addrs[0],
        # Trainings that share a machine need ports of their own.
        "master_port": _FIRST_PORT + zlib.crc32(info.allocation_id.encode()) % _PORTS,
    }


def _of_slurm(environment: Mapping[str, str]) -> dict[str, Any]:
    # A batch script may have set the size for the ranks that are to be started here.
    variables = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    translate_slurm(variables)
    if "RANK" in environment or "RANK" not in variables:
        return {}
    if variables["WORLD_SIZE"] != variables["GROUP_WORLD_SIZE"]:
        raise UsageError(
            f"srun started {variables['WORLD_SIZE']} of these on {variables['GROUP_WORLD_SIZE']} machine(s), but one "
            "starts all processes of its machine: use srun --ntasks-per-node=1, or let srun start the script itself."
        )
    return {
        "nnodes": variables["GROUP_WORLD_SIZE"],
        "node_rank": int(variables["GROUP_RANK"]),
        "master_addr": variables["MASTER_ADDR"],
        "master_port": int(variables["MASTER_PORT"]),
    }


def threads_for(processes: int) -> int:
    """Return how many threads each of so many processes may compute with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)
