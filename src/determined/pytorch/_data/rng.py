"""Random numbers: seeds derived from seeds, and the state of every generator of a process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def derive(seed: int, *keys: int) -> int:
    """Return a seed of 63 bits that depends on all arguments; neighbouring keys give unrelated seeds."""
    words = np.random.SeedSequence([seed, *keys]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_state() -> dict[str, Any]:
    """Return the state of this process's generators, in types that `torch.load(weights_only=True)` reads."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words = np.asarray(keys).astype(np.int64)
    state = {
        "cpu_rng_state": torch.get_rng_state(),
        "np_rng_state": (name, torch.from_numpy(words), position, has_gauss, cached),
        "random_rng_state": random.getstate(),
    }
    if torch.cuda.is_available():
        # The states are in host memory: reading them does not initialize GPUs that this process does not use.
        per_gpu = dict(enumerate(torch.cuda.get_rng_state_all()))
        state["gpu_rng_state"] = per_gpu.pop(torch.cuda.current_device())
        if per_gpu:
            state["other_gpu_rng_states"] = per_gpu
    return state


def set_state(state: dict[str, Any]) -> None:
    """Put this process's generators into a state from `get_state`, or one that Determined saved."""
    torch.set_rng_state(state["cpu_rng_state"])
    name, keys, position, has_gauss, cached = state["np_rng_state"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = state["random_rng_state"]
    random.setstate((version, tuple(words), gauss))
    if "gpu_rng_state" in state and torch.cuda.is_available():
        # The state of the current GPU, whatever its index now; other GPUs are identified by their index.
        torch.cuda.set_rng_state(state["gpu_rng_state"])
        for number, other in state.get("other_gpu_rng_states", {}).items():
            if number < torch.cuda.device_count() and number != torch.cuda.current_device():
                torch.cuda.set_rng_state(other, number)


@contextlib.contextmanager
def set_aside(when: bool = True) -> Iterator[None]:
    """Restore the generators after the block, whatever is drawn inside it; does nothing unless `when`."""
    before = get_state() if when else None
    try:
        yield
    finally:
        if before is not None:
            set_state(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU inside the block and restore them after it."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
