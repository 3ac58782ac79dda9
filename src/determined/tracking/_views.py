"""What reading the tracking database gives: frozen records, and the arithmetic on their metrics."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._messages import CheckpointState, MetricReport, RunState

_LOSS_NAMES = ("validation_loss", "val_loss", "loss")
# Boot time, on which creation times rest, is known to within a second or so.
_START_TOLERANCE = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """The process that a trial was started in."""

    pid: int
    started: float
    host: str

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this host and has ended; False for other hosts, which cannot be asked."""
        if self.host != socket.gethostname():
            return False
        import psutil

        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > _START_TOLERANCE:
                return True
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """The latest value of a metric, whatever it is, and the range of its numbers."""

    count: int
    latest: Any
    latest_step: int
    smallest: float | None
    largest: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BestValidation:
    """The best value of the metric that a trial is judged by, and the step of its report."""

    metric: str
    value: float
    steps_completed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRecord:
    """An experiment as recorded. Times are seconds since 1970."""

    id: int
    name: str
    config: Mapping[str, Any] | None
    state: RunState
    progress: float | None
    started: float
    ended: float | None
    trial_count: int
    checkpoint_count: int
    processes: tuple[RunProcess, ...]  # of the trials that should be running

    @property
    def is_lost(self) -> bool:
        """Whether it counts as running while all its processes on this host are gone."""
        if not self.state.has_process or not self.processes:
            return False
        return all(process.is_gone for process in self.processes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial as recorded, with a summary of its metrics by group and name. Times are seconds since 1970."""

    id: int
    experiment_id: int
    state: RunState
    reason: str | None
    status: str | None
    progress: float | None
    hparams: Mapping[str, Any]
    seed: int
    entrypoint: str
    torch_version: str | None
    resolute_version: str
    git_commit: str | None
    process: RunProcess
    source_checkpoint: str | None
    source_steps_completed: int | None
    source_reported_steps: int | None
    metadata: Mapping[str, Any]
    started: float
    ended: float | None
    steps_completed: int
    best_validation: BestValidation | None
    summary: Mapping[str, Mapping[str, MetricSummary]]

    @property
    def pid(self) -> int:
        """The id of the process it was started in."""
        return self.process.pid

    @property
    def host(self) -> str:
        """The machine it was started on."""
        return self.process.host

    @property
    def is_lost(self) -> bool:
        """Whether it counts as running while its process on this host is gone."""
        return self.state.has_process and self.process.is_gone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint as recorded; `resources` maps its files to bytes, `size` is their sum."""

    uuid: str
    experiment_id: int
    trial_id: int
    steps_completed: int
    path: str
    metadata: Mapping[str, Any]
    resources: Mapping[str, int]
    size: int
    state: CheckpointState
    time: float


def is_number(value: Any) -> bool:
    """Return whether a metric is a number that can be compared: no bool, no NaN, none beyond a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def is_comparable(value: Any) -> bool:
    """Return whether a metric can be the best: a number, and a finite one."""
    return is_number(value) and math.isfinite(value)


def best_value(values: Iterable[Any], smaller_is_better: bool) -> float | None:
    """Return the best of the numbers among the values, or None if there are none."""
    numbers = [float(value) for value in values if is_number(value)]
    if not numbers:
        return None
    return min(numbers) if smaller_is_better else max(numbers)


def summarize(reports: Sequence[MetricReport]) -> dict[str, dict[str, MetricSummary]]:
    """Return the summary of every metric by group and name; reports come in the order of their steps."""
    history: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            series = history.setdefault(report.group, {}).setdefault(name, [])
            series.append((report.steps_completed, value))
    return {group: {name: _summary(series) for name, series in metrics.items()} for group, metrics in history.items()}


def _summary(series: Sequence[tuple[int, Any]]) -> MetricSummary:
    step, latest = series[-1]
    values = [value for _, value in series]
    return MetricSummary(
        count=len(series),
        latest=latest,
        latest_step=step,
        smallest=best_value(values, smaller_is_better=True),
        largest=best_value(values, smaller_is_better=False),
    )


def find_best(reports: Sequence[MetricReport], config: Mapping[str, Any] | None) -> BestValidation | None:
    """Return the best validation by the config's searcher metric, else by a metric named as a loss.

    Other metrics are not taken: nothing tells whether their best value is the smallest or the largest.
    """
    validations = [report for report in reports if report.group == "validation"]
    metric, smaller_is_better = _judged_by(validations, config)
    scored = [report for report in validations if is_comparable(report.metrics.get(metric))]
    if not scored:
        return None
    sign = 1 if smaller_is_better else -1
    best = min(scored, key=lambda report: sign * report.metrics[metric])
    return BestValidation(metric=metric, value=float(best.metrics[metric]), steps_completed=best.steps_completed)


def _judged_by(validations: Sequence[MetricReport], config: Mapping[str, Any] | None) -> tuple[str, bool]:
    searcher = (config or {}).get("searcher")
    if isinstance(searcher, Mapping) and isinstance(searcher.get("metric"), str):
        return searcher["metric"], bool(searcher.get("smaller_is_better", True))
    names = {name for report in validations for name in report.metrics}
    return next((name for name in _LOSS_NAMES if name in names), _LOSS_NAMES[0]), True
