"""Trains batches in parts, to keep their size with fewer ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from determined.pytorch._metrics.window import MetricWindow, averaged_over_ranks, plain_data
from determined.pytorch._optim.gradients import Gradients

TrainBatch = Callable[[Any, int, int], Any]


def in_micro_batches(
    gradients: Gradients, fetch: Callable[[], Any], to_device: Callable[[Any], Any], train_batch: TrainBatch
) -> TrainBatch:
    """Return the function that trains a batch; if in parts, the function fetches those after the first one.

    All parts have the index of the batch. Its metrics are averages over the parts, as over ranks.
    """
    count = gradients.micro_batches
    if count == 1:
        return train_batch

    def train(batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        windows = [MetricWindow() for _ in range(count)]
        try:
            for number, window in enumerate(windows, start=1):
                gradients.ends_batch = number == count
                window.add(train_batch(batch, epoch_idx, batch_idx))
                if number < count:
                    batch = to_device(fetch())
        except BaseException:  # such as ShouldExit: the whole batch is trained again
            gradients.drop_part()
            raise
        (metrics,) = averaged_over_ranks([plain_data(window.take()) for window in windows])
        return dict(metrics)

    return train
