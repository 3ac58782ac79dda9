"""What reading the tracking database gives: frozen records, and the arithmetic on their metrics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .changesets import Desired, RunRecord, TrialRequest
from .messages import CheckpointState, MetricReport, RunState
from .process import RunProcess

_LOSS_NAMES = ("validation_loss", "val_loss", "loss")


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
    """The best value of the metric that a trial is ranked by, and the step of its report."""

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
    processes: tuple[RunProcess, ...]  # that should be running: of the trial of a local one, else the runner
    is_local: bool  # the run of a script, with one trial; others are managed by a runner
    description: str | None
    labels: tuple[str, ...]
    project: str | None
    workspace: str | None
    notes: str | None
    is_archived: bool
    desired: Desired | None  # what people want of it, if it is managed
    priority: int | None
    max_slots: int | None
    cluster: str | None  # where it runs, if not on the machine of its runner
    runner: RunProcess | None  # which has claimed it; it may be gone

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
    process: RunProcess | None  # of its latest run; None before the first
    source_checkpoint: str | None
    source_steps_completed: int | None
    source_reported_steps: int | None
    metadata: Mapping[str, Any]
    started: float
    ended: float | None
    steps_completed: int
    best_validation: BestValidation | None
    summary: Mapping[str, Mapping[str, MetricSummary]]
    request_id: str | None  # how the search calls it; None in a local experiment
    run_id: int  # of its latest run in a managed experiment; 0 before the first
    restarts: int  # after failures
    requested: TrialRequest | None  # what people want of it
    runner: RunProcess | None  # of its experiment

    @property
    def pid(self) -> int | None:
        """The id of the process it was started in."""
        return None if self.process is None else self.process.pid

    @property
    def host(self) -> str | None:
        """The machine it was started on."""
        return None if self.process is None else self.process.host

    @property
    def is_lost(self) -> bool:
        """Whether it counts as running while its process on this host is gone, and so is its runner if it had one."""
        if not self.state.has_process or (self.process is not None and not self.process.is_gone):
            return False
        return self.request_id is None or (self.runner is not None and self.runner.is_gone)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overview:
    """An experiment and what belongs to it, of one point in time: what all who show an experiment share.

    Validations are by trial, in the order of their steps.
    """

    experiment: ExperimentRecord
    trials: Sequence[TrialRecord]
    validations: Mapping[int, Sequence[MetricReport]]
    checkpoints: Sequence[CheckpointRecord]

    @property
    def metric(self) -> str:
        """The validation metric that trials are ranked by: the searcher's; without one, that named as a loss."""
        if (searched := searcher_metric(self.experiment.config)) is not None:
            return searched[0]
        found = (trial.best_validation for trial in self.trials if trial.best_validation is not None)
        return next((best.metric for best in found), _LOSS_NAMES[0])

    @property
    def smaller_is_better(self) -> bool:
        """Whether the best value of the metric is the smallest."""
        return (searcher_metric(self.experiment.config) or (None, True))[1]

    @functools.cached_property
    def ranked(self) -> Sequence[TrialRecord]:
        """The trials, the best first, the oldest of equals; those without a finite metric last."""
        sign = 1 if self.smaller_is_better else -1

        def rank(trial: TrialRecord) -> float:
            return math.inf if trial.best_validation is None else sign * trial.best_validation.value

        return sorted(self.trials, key=rank)

    @property
    def best(self) -> TrialRecord | None:
        """The trial with the best validation; None if there is none with a finite metric."""
        return next((trial for trial in self.ranked if trial.best_validation is not None), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialOverview:
    """A trial and what belongs to it, of one point in time; the history includes the trials that it continues."""

    trial: TrialRecord
    experiment: ExperimentRecord
    runs: Sequence[RunRecord]
    checkpoints: Sequence[CheckpointRecord]
    history: Sequence[MetricReport]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A model of the registry: checkpoints that are versions of one thing. Times are seconds since 1970."""

    id: int
    name: str
    description: str | None
    labels: tuple[str, ...]
    metadata: Mapping[str, Any]
    notes: str | None
    is_archived: bool
    version_count: int
    created: float
    updated: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersionRecord:
    """A version of a model; `checkpoint` is the id of the checkpoint that it is."""

    model_id: int
    model: str
    number: int
    checkpoint: str
    name: str | None
    comment: str | None
    notes: str | None
    labels: tuple[str, ...]
    metadata: Mapping[str, Any]
    created: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong with what is stored, and what to do about it; both are sentences."""

    what: str
    remedy: str


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
    numbers = [float(value) for _, value in series if is_number(value)]
    return MetricSummary(
        count=len(series),
        latest=latest,
        latest_step=step,
        smallest=min(numbers, default=None),
        largest=max(numbers, default=None),
    )


def searcher_metric(config: Mapping[str, Any] | None) -> tuple[str, bool] | None:
    """Return (metric, smaller_is_better) of a config's searcher, or None if it names no metric."""
    searcher = (config or {}).get("searcher")
    if isinstance(searcher, Mapping) and isinstance(metric := searcher.get("metric"), str) and metric:
        return metric, bool(searcher.get("smaller_is_better", True))
    return None


def ranking_metric(metrics: Mapping[str, Any], searched: str | None) -> str | None:
    """Return the metric that a validation is ranked by: the searcher's, or else the first that is named as a loss.

    Others are not taken: nothing tells whether their best value is the smallest or the largest.
    """
    return searched if searched is not None else next((name for name in _LOSS_NAMES if name in metrics), None)


def score_of(metrics: Mapping[str, Any], searched: str | None) -> float | None:
    """Return the value of the metric that a validation is ranked by; None if it is not a finite number."""
    value: Any = metrics.get(ranking_metric(metrics, searched) or "")
    return value if is_comparable(value) else None
