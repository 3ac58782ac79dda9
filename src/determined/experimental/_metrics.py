"""Metrics in the client."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from determined.tracking import MetricReport, MetricSummary

_SUMMARY_NAMES = {"training": "avg_metrics", "validation": "validation_metrics"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialMetrics:
    """One report of a trial: the metrics of a group after `steps_completed` batches. `end_time` is in UTC."""

    trial_id: int
    steps_completed: int
    end_time: datetime.datetime
    metrics: Mapping[str, Any]
    group: str


def of_reports(trial_id: int, reports: Iterable[MetricReport]) -> list[TrialMetrics]:
    """Return reports of the database as those of the client."""
    return [
        TrialMetrics(
            trial_id=trial_id,
            steps_completed=report.steps_completed,
            end_time=utc_time(report.time),
            metrics=dict(report.metrics),
            group=report.group,
        )
        for report in reports
    ]


def utc_time(seconds: float) -> datetime.datetime:
    """Return a time of the database as a datetime in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def summary_of(summary: Mapping[str, Mapping[str, MetricSummary]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the summary of a trial's metrics by group and name, under the names of Determined."""
    return {
        _SUMMARY_NAMES.get(group, group): {
            name: {"count": one.count, "last": one.latest, "min": one.smallest, "max": one.largest}
            for name, one in metrics.items()
        }
        for group, metrics in summary.items()
    }
