"""Metrics as curves, for the plots of the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from determined import tracking

# Metric name -> group of reports -> step -> value.
Panels: TypeAlias = dict[str, dict[str, dict[int, float]]]

_SKIPPED = ("batches", "epochs")  # they only repeat the x axis
_PREFIXES = ("validation_", "val_")


def arrange(reports: Sequence[tracking.MetricReport]) -> Panels:
    """Return the curves by panel; `val_loss` of a validation shares the panel of the training's `loss`."""
    validated = {name for report in reports if report.group == "validation" for name in report.metrics}
    panels: Panels = {}
    for report in reports:
        for name, value in report.metrics.items():
            if is_drawn(name, value):
                panel = _paired(name, validated) if report.group == "validation" else name
                curve = panels.setdefault(panel, {}).setdefault(report.group, {})
                curve[report.steps_completed] = drawable(value)
    return panels


def is_drawn(name: str, value: object) -> bool:
    """Return whether a metric is a number other than those of the x axis."""
    return name not in _SKIPPED and not isinstance(value, bool) and isinstance(value, int | float)


def drawable(value: float) -> float:
    """Return a number as a float; NaN if it is not finite as one."""
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        return math.nan


def _paired(name: str, validated: set[str]) -> str:
    for prefix in _PREFIXES:
        bare = name.removeprefix(prefix)
        if bare and bare != name and bare not in validated:
            return bare
    return name
