"""The checkpoints of an experiment or a trial in the order that a caller asks for."""

from __future__ import annotations

from determined import experiment
from determined._home import Home
from determined.experimental._checkpoint import Checkpoint
from determined.experimental._orders import CheckpointSortBy, OrderBy, checked, ordered
from determined.tracking import CheckpointRecord, CheckpointState, TrackingReader


def listed(
    home: Home,
    experiment_id: int,
    trial_id: int | None,
    sort_by: CheckpointSortBy | str | None,
    order_by: OrderBy | None,
    max_results: int | None,
) -> list[Checkpoint]:
    """Return the checkpoints whose files are there; see `Experiment.list_checkpoints`."""
    if order_by is not None:
        checked("list_checkpoints", "order_by", order_by, OrderBy)
    if sort_by is not None and not isinstance(sort_by, str):
        checked("list_checkpoints", "sort_by", sort_by, CheckpointSortBy)
    if max_results is not None and max_results < 1:
        raise ValueError(f"list_checkpoints(max_results={max_results}): pass a number of at least 1, or None for all.")
    records = TrackingReader(home.database)
    found = records.checkpoints(experiment_id, trial_id)
    if sort_by is None or sort_by is CheckpointSortBy.SEARCHER_METRIC or isinstance(sort_by, str):
        metric = sort_by if isinstance(sort_by, str) else None
        by_metric = _by_metric(records, experiment_id, found, metric, order_by)
        return [Checkpoint(one, home) for one in by_metric[:max_results]]
    present = [one for one in found if one.state is CheckpointState.COMPLETED]
    field = sort_by.value
    by_field = ordered(present, lambda one: getattr(one, field), order_by or OrderBy.ASC)
    return [Checkpoint(one, home) for one in by_field[:max_results]]


def _by_metric(
    records: TrackingReader,
    experiment_id: int,
    found: list[CheckpointRecord],
    metric: str | None,
    order_by: OrderBy | None,
) -> list[CheckpointRecord]:
    return experiment.scores(
        records, experiment_id, metric, None if order_by is None else order_by is OrderBy.ASC
    ).ranked(found)


def best(
    home: Home,
    experiment_id: int,
    trial_id: int | None,
    count: int,
    sort_by: str | None,
    smaller_is_better: bool | None,
) -> list[Checkpoint]:
    """Return the best checkpoints; see `Experiment.top_n_checkpoints`."""
    records = TrackingReader(home.database)
    found = experiment.best_checkpoints(records, experiment_id, count, sort_by, smaller_is_better, trial_id)
    return [Checkpoint(one, home) for one in found]
