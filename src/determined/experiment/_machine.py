"""The slots of this machine: its GPUs, or parts of its CPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess

from determined import errors

SLOTS_VARIABLE = "DET_SLOTS"
"""Environment variable: how many slots a machine without GPUs has."""

_ASKING = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What trials can share on this machine."""

    slots: int
    gpus: tuple[int, ...] = ()
    """The GPU of each slot; empty where slots are parts of the CPU."""
    cores: int = 1

    @property
    def threads(self) -> int:
        """Compute threads of a process with one slot, so that all slots together use every core once."""
        return max(1, self.cores // max(self.slots, 1))

    def gpus_of(self, slots: list[int]) -> list[int]:
        """Return the GPUs that go with slots."""
        return [self.gpus[slot] for slot in slots] if self.gpus else []


def this_machine(slots: int | None = None) -> Machine:
    """Return what this machine has; `slots`, or else DET_SLOTS, says into how many parts its CPU is divided."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if gpus := _visible_gpus():
        return Machine(len(gpus), tuple(gpus), cores)
    return Machine(slots or _configured_slots() or max(1, cores // 2), (), cores)


def _configured_slots() -> int | None:
    text = os.environ.get(SLOTS_VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise errors.InvalidExperimentException(f"{SLOTS_VARIABLE}={text!r}: set it to a number of at least 1.")
    return int(text)


def _visible_gpus() -> list[int]:
    """Return the numbers of the GPUs that this process may use, without the memory that torch would take."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(part) for part in visible.split(",") if part.strip().isdigit()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_ASKING, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return list(range(found))
