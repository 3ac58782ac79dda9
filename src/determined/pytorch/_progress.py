"""The only clock: how far training has come."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(slots=True)
class Progress:
    """Batches and epochs trained, and when the last validation and checkpoint were.

    Nothing else counts. Indices, periods, data position and the step numbers of metrics derive from it.
    """

    batches_trained: int = 0
    epochs_trained: int = 0
    last_val: int | None = None
    last_ckpt: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as plain values."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counts that `state_dict` gave."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])


class Clock:
    """What the running loop tells the trial about where it is."""

    def __init__(self, progress: Progress, epoch_length: int | None) -> None:
        self._progress = progress
        self._epoch_length = epoch_length
        self.initial_batch = progress.batches_trained
        """Batches that were trained before this run began."""

    @property
    def batch_idx(self) -> int:
        """Index of the batch in training, counted from the start of training."""
        return self._progress.batches_trained

    @property
    def epoch_idx(self) -> int:
        """Index of the epoch in training."""
        return self._progress.epochs_trained

    @property
    def is_epoch_start(self) -> bool:
        """Whether the batch in training is the first of its epoch."""
        return self.epoch_of(self.batch_idx) != self.epoch_of(self.batch_idx - 1)

    @property
    def is_epoch_end(self) -> bool:
        """Whether the batch in training is the last of its epoch."""
        return self.epoch_of(self.batch_idx) != self.epoch_of(self.batch_idx + 1)

    @property
    def has_epochs(self) -> bool:
        """Whether the training data has a length, so that there are epochs."""
        return self._epoch_length is not None

    def epoch_of(self, batch_idx: int) -> int:
        """Return the index of the epoch that a batch belongs to; -1 for the time before the first batch."""
        if batch_idx < 0:
            return -1
        return batch_idx // self._epoch_length if self._epoch_length else 0
