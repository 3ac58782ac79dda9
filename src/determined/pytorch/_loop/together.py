"""What ranks do together for the time of a training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._loop.progress import Clock
from determined.pytorch._optim import free_parameters


@contextlib.contextmanager
def training_together(context: PyTorchTrialContext, clock: Clock) -> Iterator[None]:
    """Average gradients over all ranks inside the block. All ranks must enter it."""

    def steps_now() -> bool:
        return (clock.batch_idx + 1) % context.aggregation_frequency == 0

    aggregates = context.aggregation_frequency > 1
    check = context.backend.start(context.models, steps_now if aggregates else None, context.compressed)
    context.gradients.before_first_step = check
    context.gradients.exchanges = free_parameters.share(context)
    try:
        yield
    finally:
        context.gradients.before_first_step = None
        context.gradients.exchanges = {}
        context.backend.stop()


def seed_rank(context: PyTorchTrialContext) -> None:
    """Give each rank random numbers of its own, once; until here all ranks draw the same, as for splitting data.

    A program that seeds its ranks by itself is left alone. All ranks must call this.
    """
    if context.has_own_random_numbers:
        return
    context.has_own_random_numbers = True
    seeds = context.distributed.allgather(torch.initial_seed())
    if not context.distributed.is_chief and len(set(seeds)) == 1:
        rng.seed_all(rng.derive(context.trial_seed, context.distributed.rank))
