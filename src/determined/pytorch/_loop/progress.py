"""The only clock: how far training has come."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """Which epoch a batch belongs to. An epoch is one pass over the data, by all ranks together.

    Each rank counts its own batches; while it trains one, each of the others does too.
    """

    length: int | None
    """Batches of the data loader in one pass; None if the data has no length."""
    ranks: int = 1
    since: int = 0
    """Batches trained when this number of ranks started."""
    passed: int = 0
    """Batches of the data loader that all ranks together had trained on by then."""

    def of(self, batch_idx: int) -> int:
        """Return the index of the epoch in which a batch begins; -1 for the time before the first batch."""
        if batch_idx < 0:
            return -1
        return self._used(batch_idx) // self.length if self.length else 0

    def end_of(self, epochs: int) -> int:
        """Return the number of batches after which this many epochs are complete."""
        assert self.length is not None
        return self.since - (self.passed - epochs * self.length) // self.ranks

    @property
    def rank_length(self) -> int | None:
        """Batches that each rank trains in an epoch; None if the data has no length."""
        return None if self.length is None else -(-self.length // self.ranks)

    def done(self, batches: int) -> float:
        """Return the epochs that a number of batches makes, with fractions."""
        return self._used(batches) / self.length if self.length else 0.0

    def _used(self, batches: int) -> int:
        return self.passed + (batches - self.since) * self.ranks


@dataclasses.dataclass(slots=True)
class Progress:
    """Batches trained, and when the last validation and checkpoint were.

    This is the only counter. Epochs, indices, periods, data position and the step numbers of metrics derive from it.
    The current batch is the one in training; between batches, the one trained last.
    """

    batches_trained: int = 0
    last_val: int | None = None
    last_ckpt: int | None = None
    epochs: Epochs = Epochs(length=None)
    """Which epoch a batch belongs to; set once the data is at its position."""
    _between: int = dataclasses.field(default=1, repr=False)  # 0 while a batch is in training

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Make the next batch the current one; inside the block, each batch follows the one before."""
        self._between = 0
        try:
            yield
        finally:
            self._between = 1

    @property
    def epochs_trained(self) -> int:
        """Epochs that are complete."""
        return self.epochs.of(self.batches_trained)

    @property
    def batch_idx(self) -> int:
        """Index of the current batch, counted from the start of training; -1 before the first batch."""
        return self.batches_trained - self._between

    @property
    def epoch_idx(self) -> int:
        """Index of the epoch of the current batch."""
        return self.epochs.of(self.batch_idx)

    @property
    def is_epoch_start(self) -> bool:
        """Whether the current batch is the first of its epoch."""
        return self.epoch_idx != self.epochs.of(self.batch_idx - 1)

    @property
    def is_epoch_end(self) -> bool:
        """Whether the current batch is the last of its epoch."""
        return self.epoch_idx != self.epochs.of(self.batch_idx + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts that `state_dict` returned; a missing count keeps its value."""
        for name in _COUNTS:
            setattr(self, name, state.get(name, getattr(self, name)))


_COUNTS = ("batches_trained", "last_val", "last_ckpt")
