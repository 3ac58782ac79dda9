"""What happens in each training step besides `train_batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._loop.progress import Progress
from determined.pytorch._optim import free_parameters
from determined.pytorch._optim.lr_scheduler import auto_steps
from determined.pytorch._optim.precision import Scaled


@contextlib.contextmanager
def averaging_gradients(context: PyTorchTrialContext, progress: Progress) -> Iterator[None]:
    """Average gradients over all ranks inside the block. All ranks must enter it."""

    def steps_now() -> bool:
        return (progress.batch_idx + 1) % context.aggregation_frequency == 0

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


@contextlib.contextmanager
def steps_after_batch(
    context: PyTorchTrialContext, progress: Progress, *, with_precision: bool
) -> Iterator[list[Callable[[], None]]]:
    """Yield the functions to call after each batch; often none."""
    steps: list[Callable[[], None]] = []
    if with_precision and isinstance(context.precision, Scaled):
        steps.append(context.precision.after_batch)
    steps += auto_steps(context.lr_schedulers, progress, context.aggregation_frequency)
    with context.torch_profiler() if context.torch_profiler else contextlib.nullcontext() as profiler:
        yield steps if profiler is None else [*steps, profiler.step]
