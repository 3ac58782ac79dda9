"""The course of the tortured training, as its program and those who interrupt it know it."""

from __future__ import annotations

import dataclasses

DIGEST = "digest "
"""What the line begins with that holds the digests, as JSON."""


@dataclasses.dataclass(frozen=True)
class RunObservations:
    """How long to train, and the periods, in batches. An epoch has twelve."""

    length: int = 61
    reporting: int = 8
    validation: int = 13
    checkpoint: int = 5
    policy: str = "best"

    def ends_a_window(self, batches: int) -> bool:
        """Say whether something is due after so many batches, so that a window of metrics ends there."""
        return any(batches % period == 0 for period in (self.reporting, self.validation, self.checkpoint))


def ending_with_a_checkpoint(epochs: int) -> RunObservations:
    """Return a course at whose end a checkpoint is due and a validation is not: it comes because training ends."""
    assert epochs % 2, "a validation follows every second epoch"
    return RunObservations(length=12 * epochs, validation=24, checkpoint=12, policy="none")
