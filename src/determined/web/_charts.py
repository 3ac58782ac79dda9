"""Curves for Plotly, of no more points than a screen can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from determined.experiment.curves import arrange, drawable, is_drawn
from determined.tracking import MetricReport, TrialRecord

_TRIALS = 40
"""Of so many trials, the best ones, curves are drawn."""
_POINTS = 1000
_AXES = ("batches", "epochs", "seconds")
_TITLES = {"batches": "batches trained", "epochs": "epochs trained", "seconds": "seconds since the start"}


def of_experiment(
    ranked: Sequence[tuple[int, Sequence[MetricReport]]],
    started: Mapping[int, float],
    judged_by: str,
    query: Mapping[str, str],
) -> dict[str, Any]:
    """Return the validations of trials, which come the best first, with what else can be chosen."""
    names = _metrics([report for _, reports in ranked for report in reports], judged_by)
    metric, axis = _chosen(query.get("metric"), names), _chosen(query.get("axis"), _AXES)
    curves = [
        {"name": f"trial {id}", "trial": id, **_thinned(points)}
        for id, reports in ranked[:_TRIALS]
        if (points := _points(reports, metric, axis, started[id]))
    ]
    left = sum(any(metric in report.metrics for report in reports) for _, reports in ranked[_TRIALS:])
    note = f"the best {_TRIALS} trials; {left} more are not drawn" if left else ""
    panel = {"title": metric, "x": _TITLES[axis], "curves": curves, "note": note}
    return {"panels": [panel] if curves else [], "metrics": names, "metric": metric, "axes": _AXES, "axis": axis}


def over_hyperparameter(
    trials: Sequence[tuple[TrialRecord, Mapping[str, Any]]], names: Sequence[str], metric: str, query: Mapping[str, str]
) -> dict[str, Any]:
    """Return the best score of each trial over one of the hyperparameters that vary."""
    name = _chosen(query.get("hparam"), names)
    found = [
        (_axis_value(hparams[name]), trial.best_validation.value, trial.id)
        for trial, hparams in trials
        if trial.best_validation is not None and name in hparams
    ]
    numbers = [x for x, _, _ in found if isinstance(x, int | float)]
    is_log = len(numbers) == len(found) and bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) >= 100
    points = {"x": [x for x, _, _ in found], "y": [y for _, y, _ in found], "trials": [id for _, _, id in found]}
    scatter = {"title": f"best {metric}", "x": name, "log": is_log, "points": points}
    return {"hparams": list(names), "hparam": name, "scatter": scatter if len(found) > 1 else None}


def of_trial(reports: Sequence[MetricReport], started: float, query: Mapping[str, str]) -> dict[str, Any]:
    """Return all metrics of a trial; training and validation share a panel where their names say so."""
    axis = _chosen(query.get("axis"), _AXES)
    places = {(report.group, report.steps_completed): _place(report, axis, started) for report in reports}
    panels = []
    for title, groups in arrange(reports).items():
        curves = [
            {"name": group, **_thinned([(places[group, step], value) for step, value in curve.items()])}
            for group, curve in groups.items()
        ]
        panels.append({"title": title, "x": _TITLES[axis], "curves": curves, "note": ""})
    return {"panels": panels, "axes": _AXES, "axis": axis}


def _metrics(reports: Sequence[MetricReport], first: str) -> list[str]:
    """Return the metrics that can be drawn, that which the experiment is judged by first."""
    found = {name for report in reports for name, value in report.metrics.items() if is_drawn(name, value)}
    return sorted(found, key=lambda name: (name != first, name)) or [first]


def _points(reports: Sequence[MetricReport], metric: str, axis: str, started: float) -> list[tuple[float, float]]:
    return [
        (_place(report, axis, started), drawable(report.metrics[metric]))
        for report in reports
        if is_drawn(metric, report.metrics.get(metric))
    ]


def _place(report: MetricReport, axis: str, started: float) -> float:
    if axis == "seconds":
        return round(report.time - started, 3)
    epochs = report.metrics.get("epochs") if axis == "epochs" else None
    return epochs if isinstance(epochs, int | float) else report.steps_completed


def _axis_value(value: Any) -> Any:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else str(value)


def _chosen(wanted: str | None, offered: Sequence[str]) -> str:
    if wanted in offered:
        return str(wanted)
    return offered[0] if offered else ""


def _thinned(points: Sequence[tuple[float, float]]) -> dict[str, list[float | None]]:
    """Return coordinates; of many points, the lowest and the highest of each stretch, so that no peak is lost."""
    if len(points) > _POINTS:
        width = math.ceil(2 * len(points) / _POINTS)
        stretches = [points[begin : begin + width] for begin in range(0, len(points), width)]
        points = [point for stretch in stretches for point in _extremes(stretch)]
    return {"x": [x for x, _ in points], "y": [None if math.isnan(y) else y for _, y in points]}


def _extremes(stretch: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    numbers = [point for point in stretch if not math.isnan(point[1])] or stretch[:1]
    low, high = min(numbers, key=lambda point: point[1]), max(numbers, key=lambda point: point[1])
    return sorted({low, high})
