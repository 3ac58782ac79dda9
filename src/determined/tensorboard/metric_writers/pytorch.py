"""TorchWriter: the older way to the trial's SummaryWriter."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from determined.tensorboard._current import current
from determined.tensorboard._writer import summary_writer

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TorchWriter"]


class TorchWriter:
    """A SummaryWriter on the running trial's TensorBoard folder, as `writer`.

    Deprecated: `context.get_tensorboard_writer()` gives that SummaryWriter itself.
    """

    writer: SummaryWriter

    def __init__(self) -> None:
        warnings.warn(
            "TorchWriter() is deprecated; use context.get_tensorboard_writer() instead of its `writer`.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.writer = summary_writer(current())

    def add_scalar(self, name: str, value: float | torch.Tensor, step: int) -> None:
        """Write one value of the metric `name` at `step`, usually the batches trained."""
        self.writer.add_scalar(name, value, step)

    def reset(self) -> None:
        """Flush. Writing goes on in the same file; nothing is lost."""
        self.flush()

    def flush(self) -> None:
        """Hand everything written so far to the operating system, for TensorBoard to see."""
        self.writer.flush()
