"""The slots of this machine: its GPUs, or parts of its CPU."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from determined import errors

SLOTS_VARIABLE = "DET_SLOTS"
"""Environment variable: how many slots a machine without GPUs has."""

_LIST_TIMEOUT_S = 20.0
_LISTED_GPU = re.compile(r"GPU (\d+):.*\(UUID: (GPU-[^)]+)\)")
_LISTED_PART = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_FIRST_PART = 1000
"""The number of the first part of a GPU (MIG), so that it is not that of a GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What trials can share on this machine."""

    slots: int
    gpus: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The GPUs as CUDA_VISIBLE_DEVICES calls them, by number; empty where slots are parts of the CPU."""
    cores: int = 1

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the slots: a GPU has the same number for all processes, whichever of the GPUs they see."""
        return list(self.gpus) or range(self.slots)

    @property
    def threads(self) -> int:
        """Compute threads of a process with one slot, so that all slots together use every core once."""
        return max(1, self.cores // max(self.slots, 1))

    def placement(self, slots: list[int]) -> dict[str, Any]:
        """Return what the processes of a run on these slots may use."""
        return {"slots": slots, "gpus": [self.gpus[slot] for slot in slots if self.gpus], "threads": self.threads}


def this_machine(slots: int | None = None) -> Machine:
    """Return what this machine has; `slots`, or else DET_SLOTS, says into how many parts its CPU is divided."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if gpus := _visible_gpus():
        return Machine(len(gpus), gpus, cores)
    return Machine(slots or _configured_slots() or max(1, cores // 2), {}, cores)


def _configured_slots() -> int | None:
    text = os.environ.get(SLOTS_VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise errors.InvalidExperimentException(f"{SLOTS_VARIABLE}={text!r}: set it to a number of at least 1.")
    return int(text)


def _visible_gpus() -> dict[int, str]:
    """Return the GPUs that this process may use, without the memory that torch would take."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {number: str(number) for number in _listed_gpus().values() if number < _FIRST_PART}
    found: dict[int, str] = {}
    listed = _listed_gpus() if "GPU-" in visible or "MIG-" in visible else {}
    for part in map(str.strip, visible.split(",")):
        if part.isascii() and part.isdigit():
            found.setdefault(int(part), part)
        elif part.startswith(("GPU-", "MIG-")):
            found.setdefault(_number_of(part, listed), part)
        else:
            break  # as for CUDA, "-1" and the like hide all that follow
    return found


def _number_of(uuid: str, listed: Mapping[str, int]) -> int:
    """Return the number of a GPU or of a part of one, by its UUID or the beginning of it, as CUDA accepts it."""
    numbers = [number for whole, number in listed.items() if whole.startswith(uuid)]
    if len(numbers) != 1:
        raise errors.InvalidExperimentException(
            f"CUDA_VISIBLE_DEVICES={uuid!r}: {len(numbers)} GPUs have this UUID; set it to numbers or UUIDs that "
            "`nvidia-smi -L` lists."
        )
    return numbers[0]


def _listed_gpus() -> dict[str, int]:
    """Return the numbers of all GPUs of the machine, and of the parts into which they are divided, by UUID."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    gpus = {match[2]: int(match[1]) for line in lines if (match := _LISTED_GPU.match(line))}
    parts = [match[1] for line in lines if (match := _LISTED_PART.match(line))]
    return gpus | {uuid: number for number, uuid in enumerate(parts, start=_FIRST_PART)}
