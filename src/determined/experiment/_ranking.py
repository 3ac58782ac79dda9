"""The checkpoints of an experiment by a metric of their validations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from determined import errors
from determined.tracking import (
    CheckpointRecord,
    CheckpointState,
    MetricReport,
    TrackingReader,
)


class Scores:
    """The checkpoints of an experiment by a metric of the validation at the step of each."""

    def __init__(self, validations: Mapping[int, Sequence[MetricReport]], metric: str, smaller_is_better: bool) -> None:
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self._values = {
            (trial_id, report.steps_completed): value
            for trial_id, reports in validations.items()
            for report in reports
            if (value := _number(report.metrics.get(metric))) is not None
        }

    def of(self, checkpoint: CheckpointRecord) -> float | None:
        """Return the metric of a checkpoint; None if there was no validation at its step that has it as a number."""
        return self._values.get((checkpoint.trial_id, checkpoint.steps_completed))

    def ranked(self, checkpoints: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
        """Return those whose files are there, the best first; the newest first of equals and of those without a score.

        What is not a finite number counts as no score.
        """
        present = [one for one in checkpoints if one.state is CheckpointState.COMPLETED]
        return sorted(present, key=lambda one: (self._rank(one), -one.steps_completed))

    def best(self, checkpoints: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
        """Return those with a score, the best first."""
        return [one for one in self.ranked(checkpoints) if math.isfinite(self._rank(one))]

    def _rank(self, checkpoint: CheckpointRecord) -> float:
        score = self.of(checkpoint)
        if score is None or not math.isfinite(score):
            return math.inf
        return score if self.smaller_is_better else -score


def scores(
    records: TrackingReader, experiment_id: int, metric: str | None = None, smaller_is_better: bool | None = None
) -> Scores:
    """Return the scores of an experiment's checkpoints by a metric, or else by the one that it is ranked by.

    Of another metric it must be said whether smaller is better.
    """
    found = records.overview(experiment_id)
    if metric is None or metric == found.metric:
        is_smaller_better = found.smaller_is_better if smaller_is_better is None else smaller_is_better
        return Scores(found.validations, found.metric, is_smaller_better)
    if smaller_is_better is None:
        raise errors.InvalidExperimentException(
            f"experiment {experiment_id} is ranked by {found.metric!r}; nothing tells whether a smaller {metric!r} is "
            "better: pass smaller_is_better=True or False (for `det`, --smaller-is-better or --larger-is-better)."
        )
    return Scores(found.validations, metric, smaller_is_better)


def best_checkpoints(
    records: TrackingReader,
    experiment_id: int,
    count: int | None = None,
    metric: str | None = None,
    smaller_is_better: bool | None = None,
    trial_id: int | None = None,
) -> list[CheckpointRecord]:
    """Return the best checkpoints of an experiment, or of one of its trials, that are there; at most `count`.

    `CheckpointNotFoundException` if there is none that can be compared.
    """
    by = scores(records, experiment_id, metric, smaller_is_better)
    candidates = records.checkpoints(experiment_id, trial_id)
    if found := by.best(candidates)[:count]:
        return found
    owner = f"experiment {experiment_id}" if trial_id is None else f"trial {trial_id}"
    present = len(by.ranked(candidates))
    reason = (
        f"none of its {present} was saved at a validation with a finite {by.metric!r}" if present else "it has none"
    )
    raise errors.CheckpointNotFoundException(
        f"{owner} has no best checkpoint: {reason}; `det experiment list-checkpoints {experiment_id}` shows what there "
        "is."
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
