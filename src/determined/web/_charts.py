"""Curves for Plotly, of no more points than a screen can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from determined import _text
from determined.experiment.curves import arrange, drawable, is_drawn
from determined.tracking import MetricReport, TrialRecord, is_comparable

_TRIALS = 40
"""The number of trials, the best ones, whose curves are drawn."""
_POINTS = 1000
_MAX_NAME = 200
"""Characters of a name or a value; others could be as long as a program likes."""
_AXES = ("batches", "epochs", "seconds")
_TITLES = {"batches": "batches trained", "epochs": "epochs trained", "seconds": "seconds since the start"}


def of_experiment(
    ranked: Sequence[tuple[int, Sequence[MetricReport]]],
    started: Mapping[int, float],
    ranking_metric: str,
    query: Mapping[str, str],
) -> dict[str, Any]:
    """Return the validations of trials, which come the best first, with what else can be chosen."""
    names = {_short(name): name for name in _metrics([one for _, reports in ranked for one in reports], ranking_metric)}
    shown, axis = _chosen(query.get("metric"), list(names)), _chosen(query.get("axis"), _AXES)
    metric = names[shown]
    curves = [
        {"name": f"trial {id}", "trial": id, **_thinned(points)}
        for id, reports in ranked[:_TRIALS]
        if (points := _points(reports, metric, axis, started[id]))
    ]
    left = sum(any(metric in report.metrics for report in reports) for _, reports in ranked[_TRIALS:])
    note = f"the best {_TRIALS} trials; {left} more are not drawn" if left else ""
    panel = {"title": shown, "x": _TITLES[axis], "curves": curves, "note": note}
    return {"panels": [panel] if curves else [], "metrics": list(names), "metric": shown, "axes": _AXES, "axis": axis}


def over_hyperparameter(
    trials: Sequence[tuple[TrialRecord, Mapping[str, Any]]], names: Sequence[str], metric: str, query: Mapping[str, str]
) -> dict[str, Any]:
    """Return the best score of each trial over one of the hyperparameters that vary."""
    full = {_short(name): name for name in names}
    shown = _chosen(query.get("hparam"), list(full))
    name = full.get(shown, "")
    found = [
        (hparams[name], trial.best_validation.value, trial.id)
        for trial, hparams in trials
        if trial.best_validation is not None and name in hparams
    ]
    places = _places([value for value, _, _ in found])
    points = {"x": places, "y": [y for _, y, _ in found], "trials": [id for _, _, id in found]}
    scatter = {"title": f"best {_short(metric)}", "x": shown, "kind": _kind(places), "points": points}
    return {"hparams": list(full), "hparam": shown, "scatter": scatter if len(found) > 1 else None}


def _places(values: Sequence[Any]) -> list[float] | list[str]:
    """Return values for an axis: all numbers, or else all texts."""
    numbers = [drawable(value) if is_drawn("", value) else math.nan for value in values]
    return [_text.plain(value, _MAX_NAME) for value in values] if any(map(math.isnan, numbers)) else numbers


def _kind(places: Sequence[float] | Sequence[str]) -> str:
    numbers = [place for place in places if not isinstance(place, str)]
    if len(numbers) < len(places):
        return "category"
    return "log" if numbers and min(numbers) > 0 and max(numbers) / 100 >= min(numbers) else "linear"


def of_trial(reports: Sequence[MetricReport], started: float, query: Mapping[str, str]) -> dict[str, Any]:
    """Return all metrics of a trial; training and validation share a panel where their names say so."""
    axis = _chosen(query.get("axis"), _AXES)
    started = min([started, *(report.time for report in reports)])  # of the trials that it continues
    places = {(report.group, report.steps_completed): _place(report, axis, started) for report in reports}
    panels = []
    for title, groups in arrange(reports).items():
        curves = [
            {"name": _short(group), **_thinned([(places[group, step], value) for step, value in curve.items()])}
            for group, curve in groups.items()
        ]
        panels.append({"title": _short(title), "x": _TITLES[axis], "curves": curves, "note": ""})
    return {"panels": panels, "axes": _AXES, "axis": axis}


def _metrics(reports: Sequence[MetricReport], first: str) -> list[str]:
    """Return the metrics that can be drawn, the one that the experiment is ranked by first."""
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
    return float(epochs) if epochs is not None and is_comparable(epochs) else report.steps_completed


def _short(name: str) -> str:
    return _text.bounded(name, _MAX_NAME)


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
