"""What of a run's state each rank has for itself, and how it gets into a checkpoint and out of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from determined.core.metrics import BatchColumns
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._metrics.reducers import to_cpu
from determined.pytorch._metrics.window import MetricWindow, averaged_over_ranks

if TYPE_CHECKING:
    from determined.pytorch._backends.fsdp_state import ShardWriter

logger = logging.getLogger("determined.pytorch")

PARTS = ("data", "window", "reducers")
"""Entries of the loop's state that every rank has for itself."""


_LARGEST_COUNT = 2**53


def check(loop: Mapping[str, Any]) -> None:
    """Raise for the state of a loop that is not one: counts that are none, parts that are missing."""
    progress = loop["progress"]
    _check_count("batches_trained", progress["batches_trained"])
    _check_count("epochs_trained", progress.get("epochs_trained", 0))  # some of Determined's count batches alone
    for name in ("last_val", "last_ckpt"):
        _check_count(name, progress[name] or 0)
    _check_count("seed", loop.get("seed", 0))
    _check_map("circumstances", loop.get("circumstances", {}))
    for part in (loop, *loop.get("others", [])):
        window = _check_map("window", part.get("window", {}))
        _check_count("count", window.get("count", 0))
        data = _check_map("data", part.get("data", {}))
        for name, value in data.items():
            if name != "loader":  # what a data set of the user's tells of itself
                _check_count(name, value, least=1 if name in ("ranks", "group") else 0)


def _check_count(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST_COUNT:
        raise ValueError(f"{name}={value!r} is no count")


def _check_map(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} is no map")
    return value


def gather(
    context: PyTorchTrialContext, parts: Mapping[str, Any], shards: ShardWriter | None
) -> list[dict[str, Any]] | None:
    """Return the state that each rank has for itself, on the chief; None elsewhere. All ranks must call this."""
    gradients: Any = checkpoint_format.gradients(context)
    if shards is not None:  # all that the chief had to hold for the others would be too much
        gradients = shards.take_own(gradients, ".gradients")
    own = {"rng": rng.get_state(), "gradients": gradients, **parts}
    return context.distributed.gather(own if context.distributed.size == 1 else to_cpu(own))


def put_into(state: dict[str, Any], loop: dict[str, Any], per_rank: Sequence[dict[str, Any]]) -> None:
    """Put what `gather` returned into a checkpoint: the chief's where a process that trains alone has its own."""
    state["rng_state"] = [one.pop("rng") for one in per_rank]
    chief, *others = per_rank
    if gradients := chief.pop("gradients"):
        state["gradients"] = gradients
    loop |= {**chief, "ranks": len(per_rank)}
    if others:
        loop["others"] = others


def share_of(context: PyTorchTrialContext, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a checkpoint, also of one that another number of ranks saved."""
    loop, ranks = state["loop"], context.distributed
    chief = {name: loop[name] for name in PARTS if name in loop} | {"gradients": state.get("gradients", {})}
    per_rank: list[dict[str, Any]] = [chief, *loop.get("others", [])]
    if len(per_rank) == ranks.size:
        own = per_rank[ranks.rank]
        return own | {"gradients": context.backend.codec.attach(own["gradients"])}
    gradients = context.backend.codec.attach([one["gradients"] for one in per_rank])
    return _merged(per_rank, gradients, context)


def _merged(
    per_rank: Sequence[dict[str, Any]], gradients: Sequence[Mapping[str, Tensor]], context: PyTorchTrialContext
) -> dict[str, Any]:
    """Return what each of another number of ranks goes on with: the average where there is one."""
    if context.distributed.is_chief:
        logger.warning(
            "The checkpoint was saved by %d processes, and %d go on: the data continues where it was, but sums over "
            "ranks and random numbers are others than in a run without a break.",
            len(per_rank),
            context.distributed.size,
        )
    merged = {name: value for name, value in per_rank[0].items() if name != "reducers"}
    if all("window" in one for one in per_rank):
        merged["window"] = _averaged_window([one["window"] for one in per_rank])
    shared = set(gradients[0]).intersection(*gradients[1:])
    merged["gradients"] = {name: _mean([one[name] for one in gradients]) for name in sorted(shared)}
    return merged


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    # One that ranks share is the same for all of them.
    return tensors[0] if all(one is tensors[0] for one in tensors) else torch.stack(list(tensors)).mean(0)


def _averaged_window(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    windows = [MetricWindow() for _ in states]
    for window, state in zip(windows, states, strict=True):
        window.load_state_dict(state)
    merged: BatchColumns = averaged_over_ranks([window.take() for window in windows])
    result = MetricWindow()
    for batch in merged:
        result.add(dict(batch))
    return result.state_dict()
