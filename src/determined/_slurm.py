"""The place of a process among those that Slurm's `srun` started, in the environment variables of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping


def translate_slurm(environment: MutableMapping[str, str]) -> None:
    """Add the variables of torchrun to the environment of a process that `srun` started as one of several.

    Variables that are set already stay, such as an address that a batch script has chosen. A batch script itself is
    one process, whatever the number of tasks of its job.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if "RANK" in environment or tasks < 2 or "SLURM_PROCID" not in environment:
        return
    if environment.setdefault("WORLD_SIZE", str(tasks)) != str(tasks):
        return  # set for something else
    node = int(environment.get("SLURM_NODEID") or 0)
    per_node = _tasks_per_node(environment, tasks)
    found = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID") or "0",
        "LOCAL_WORLD_SIZE": str(per_node[node] if node < len(per_node) else 1),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(per_node)),
        "MASTER_ADDR": _first_host(environment),
        "MASTER_PORT": str(_port(environment)),
    }
    for name, value in found.items():
        environment.setdefault(name, value)


def tasks_per_node(written: str) -> list[int]:
    """Return the counts that Slurm writes as `2(x3),1`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", written):
        counts += [int(count)] * int(times or 1)
    return counts


def _tasks_per_node(environment: Mapping[str, str], tasks: int) -> list[int]:
    """Return the number of processes on each machine of the step; an even split where Slurm does not tell."""
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(counts) == tasks:
        return counts
    nodes = min(int(environment.get("SLURM_STEP_NUM_NODES") or 1), tasks)
    return [tasks // nodes + (node < tasks % nodes) for node in range(nodes)]


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the first of the hosts that Slurm writes as `gpu[07-09,12],login1`."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else hosts


def _port(environment: Mapping[str, str]) -> int:
    """Return a port of this step, other than those of neighbouring jobs, below the ephemeral ports."""
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 20_000 + (job * 16 + step) % 12_000
