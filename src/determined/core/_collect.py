"""Delete the checkpoints that retention does not keep."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from determined import errors, tracking
from determined.core._checkpoint import CheckpointContext
from determined.core._recorder import Recording
from determined.storage import Candidate, Retention, doomed
from determined.tracking._views import is_comparable

logger = logging.getLogger("determined.core")

_WORST = math.inf


def collect(
    checkpoints: CheckpointContext,
    recording: Recording,
    keep: Retention,
    metric: tuple[str, bool] | None,
    protected: str | None,
) -> list[str]:
    """Delete what need not stay of an experiment's checkpoints, and return the ids."""
    records, stored = tracking.Records(recording.database), checkpoints.store.ids()
    ids = [
        one.uuid for one in superfluous(records, stored, recording.experiment_id, keep, metric) if one.uuid != protected
    ]
    for uuid in ids:
        with contextlib.suppress(errors.CheckpointNotFoundException):  # another trial's run was faster
            checkpoints.delete(uuid)
    return ids


def superfluous(
    records: tracking.Records,
    stored: Collection[str],
    experiment_id: int,
    keep: Retention,
    metric: tuple[str, bool] | None,
) -> list[tracking.CheckpointRecord]:
    """Return those of an experiment's checkpoints that need not stay, of those with `stored` ids.

    Registered ones stay, and those from which some trial was continued or is to start.
    """
    present = [
        one
        for one in records.checkpoints(experiment_id)
        if one.state is tracking.CheckpointState.COMPLETED and one.uuid in stored
    ]
    validations = _validations(records, experiment_id)
    if metric is None and validations and keep.save_experiment_best + keep.save_trial_best:
        logger.warning(
            "All checkpoints are kept: a checkpoint is deleted only where you say by which metric, and in which "
            "direction, others are better. Set metric and smaller_is_better in exp_conf['searcher'], or pass "
            "fit(best_metric='...', smaller_is_better=...)."
        )
        return []
    candidates = [
        Candidate(
            uuid=one.uuid,
            trial_id=one.trial_id,
            steps_completed=one.steps_completed,
            score=_score(validations.get((one.trial_id, one.steps_completed)), metric),
        )
        for one in present
    ]
    needed = records.sources() | records.experiment_sources() | records.registered_checkpoints()
    ids = set(doomed(candidates, keep, needed))
    return [one for one in present if one.uuid in ids]


def _validations(records: tracking.Records, experiment_id: int) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return the metrics of each validation by (trial, step)."""
    return {
        (trial_id, report.steps_completed): report.metrics
        for trial_id, reports in records.metrics_by_trial(experiment_id, "validation").items()
        for report in reports
    }


def _score(validation: Mapping[str, Any] | None, metric: tuple[str, bool] | None) -> float | None:
    """Return the compared metric, smaller being better; what is no finite number is worse than all that are."""
    if validation is None or metric is None:
        return None
    name, smaller_is_better = metric
    value: Any = validation.get(name)
    if not is_comparable(value):
        return _WORST
    return float(value) if smaller_is_better else -float(value)
