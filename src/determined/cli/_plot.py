"""Plots of metrics: one panel for each metric, one curve for each group of reports or each trial."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from determined import errors, tracking
from determined.experiment.curves import Panels, arrange, drawable, is_drawn

from ._output import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawPanel: TypeAlias = "Callable[[Axes, str, dict[str, dict[int, float]]], None]"

_FORMATS = (".png", ".svg", ".pdf")
_MAX_PANELS = 60
_INK, _GRID = "#333333", "#d9d9d9"
# The colours of Okabe and Ito, which colour-blind people can tell apart.
_COLORS = {"training": "#0072b2", "validation": "#d55e00"}
_TRIAL_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
_OTHER_TRIALS = "#bbbbbb"
_OTHER_COLORS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw(reports: Sequence[tracking.MetricReport], title: str, target: pathlib.Path) -> list[str]:
    """Write a plot of all numeric metrics to a file; return the metrics that did not fit."""
    _check_format(target)
    panels = arrange(reports)
    if not panels:
        raise errors.InvalidRequestException(
            "this trial has reported no numbers to plot; `det trial describe ID --metrics` shows its reports."
        )
    return _save(panels, title, target, _draw_panel)


def draw_trials(
    trials: Sequence[tuple[str, Sequence[tracking.MetricReport]]], first: str, title: str, target: pathlib.Path
) -> list[str]:
    """Write a plot of the validations of trials to a file; return the metrics that did not fit.

    Trials come with their names, the best first; the best ones are highlighted. The panel of the metric `first` comes
    first.
    """
    _check_format(target)
    panels: Panels = {}
    for name, reports in trials:
        for report in reports:
            for metric, value in report.metrics.items():
                if is_drawn(metric, value):
                    curve = panels.setdefault(metric, {}).setdefault(name, {})
                    curve[report.steps_completed] = drawable(value)
    if not panels:
        raise errors.InvalidRequestException(
            "the trials of this experiment have reported no validations to plot yet; `det experiment list-trials ID` "
            "shows their progress."
        )
    order = sorted(panels, key=lambda metric: metric != first)
    return _save({metric: panels[metric] for metric in order}, title, target, _draw_trials_panel)


def _check_format(target: pathlib.Path) -> None:
    if target.suffix.lower() not in _FORMATS:
        raise errors.InvalidRequestException(
            f"{str(target)!r} does not end in an image format; use one of {', '.join(_FORMATS)}."
        )


def _save(panels: Panels, title: str, target: pathlib.Path, draw_panel: DrawPanel) -> list[str]:
    names = list(panels)
    figure = _figure({name: panels[name] for name in names[:_MAX_PANELS]}, title, draw_panel)
    figure.savefig(target, dpi=150)
    return names[_MAX_PANELS:]


def _figure(panels: Panels, title: str, draw_panel: DrawPanel) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.DeterminedException(
            "plotting needs matplotlib, which is not installed; run: pip install 'resolute[plot]'"
        ) from error
    columns = min(len(panels), 3 if len(panels) > 4 else 2)
    rows = math.ceil(len(panels) / columns)
    # A figure of its own draws with Agg: no window system, no global state of pyplot.
    figure = Figure(figsize=(max(5.2 * columns, 6.4), 3.4 * rows + 0.6), layout="constrained")
    figure.suptitle(_label(title), fontsize=13, fontweight="bold", color=_INK)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for axis, (name, curves) in zip(axes, panels.items(), strict=False):
        draw_panel(axis, name, curves)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    return figure


def _draw_panel(axis: Axes, name: str, curves: dict[str, dict[int, float]]) -> None:
    others = iter(_OTHER_COLORS * len(curves))
    for group, curve in curves.items():
        color = _COLORS.get(group) or next(others)
        axis.plot(list(curve), list(curve.values()), label=_label(group), color=color, **_style(group, curve))
    _finish_panel(axis, name)


def _draw_trials_panel(axis: Axes, name: str, curves: dict[str, dict[int, float]]) -> None:
    best, others = list(curves.items())[: len(_TRIAL_COLORS)], list(curves.items())[len(_TRIAL_COLORS) :]
    for index, (_, curve) in enumerate(others):
        label = f"{len(others)} more" if index == 0 else None
        axis.plot(list(curve), list(curve.values()), label=label, color=_OTHER_TRIALS, **_style("", curve))
    # Drawn last, so on top, and the best one on top of all.
    for (trial, curve), color in reversed(list(zip(best, _TRIAL_COLORS, strict=False))):
        style = _style("validation", curve)
        axis.plot(list(curve), list(curve.values()), label=_label(trial), color=color, **style)
    _finish_panel(axis, name)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False)


def _finish_panel(axis: Axes, name: str) -> None:
    axis.set_title(_label(name), fontsize=11, color=_INK)
    axis.set_xlabel("batches trained", fontsize=9, color=_INK)
    axis.tick_params(labelsize=8, colors=_INK, labelbottom=True)
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)


def _style(group: str, curve: dict[int, float]) -> dict[str, Any]:
    # Validations are few, each is a measurement of its own; a single point has no line to show.
    has_markers = group == "validation" or len(curve) == 1
    return {"linewidth": 1.6, "marker": "o" if has_markers else "", "markersize": 4}


def _label(text: str) -> str:
    # A dollar sign would start a formula, an underscore in front would hide a curve from the legend.
    escaped = plain(text, limit=60).replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped
