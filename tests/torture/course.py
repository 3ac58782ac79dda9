"""The course of the tortured training, as its program and those who interrupt it know it."""

from __future__ import annotations

LENGTH = 61
"""Batches of a whole run, unless told otherwise: five epochs of twelve, and one batch."""

REPORTING, VALIDATION, CHECKPOINT = 8, 13, 5
"""Periods in batches."""

DIGEST = "digest "
"""What the line begins with that holds the digests, as JSON."""


def ends_a_window(batches: int) -> bool:
    """Say whether something is due after so many batches, so that a window of metrics ends there."""
    return any(batches % period == 0 for period in (REPORTING, VALIDATION, CHECKPOINT))
