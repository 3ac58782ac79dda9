"""Trials in the client."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator
from typing import Any

from determined import errors, experiment
from determined._home import Home
from determined.experimental import _listing, _metrics
from determined.experimental._checkpoint import Checkpoint
from determined.experimental._orders import CheckpointSortBy, OrderBy
from determined.experimental._states import TrialState
from determined.tracking import TrackingReader, TrialRecord


class Trial:
    """One training run with one set of hyperparameters. A snapshot of the database; `reload` updates it."""

    def __init__(self, record: TrialRecord, home: Home) -> None:
        self._record = record
        self._home = home

    @property
    def id(self) -> int:
        """Its id."""
        return self._record.id

    @property
    def experiment_id(self) -> int:
        """The id of its experiment."""
        return self._record.experiment_id

    @property
    def hparams(self) -> dict[str, Any]:
        """Its hyperparameters."""
        return dict(self._record.hparams)

    @property
    def state(self) -> TrialState:
        """Its state."""
        return TrialState[self._record.state.name]

    @property
    def reason(self) -> str | None:
        """Why it is in its state, such as the exception that ended it."""
        return self._record.reason

    @property
    def seed(self) -> int:
        """The seed of its random numbers."""
        return self._record.seed

    @property
    def restarts(self) -> int:
        """How many times it was restarted after a failure."""
        return self._record.restarts

    @property
    def steps_completed(self) -> int:
        """The number of batches of its latest report."""
        return self._record.steps_completed

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that it set with `core_context.train.set_metadata`."""
        return dict(self._record.metadata)

    @property
    def summary_metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """count, last, min and max of each metric, below "avg_metrics" (of training) and "validation_metrics"."""
        return _metrics.summary_of(self._record.summary)

    def reload(self) -> Trial:
        """Read it from the database again, and return it."""
        self._record = TrackingReader(self._home.database).trial(self.id)
        return self

    def kill(self) -> None:
        """Ask its runner to kill it; its experiment continues."""
        experiment.control.kill_trial(self.id, self._home)

    def iter_logs(
        self,
        follow: bool = False,
        *,
        head: int | None = None,
        tail: int | None = None,
        rank_ids: Collection[int] | None = None,
        stdtypes: Collection[str] | None = None,
        timestamp_after: datetime.datetime | None = None,
        timestamp_before: datetime.datetime | None = None,
    ) -> Iterator[str]:
        """Yield the lines of its output, of all runs and ranks by time, each with its line break.

        `head` and `tail` limit the number of lines, `rank_ids` selects ranks, and `stdtypes` selects "stdout" or
        "stderr". With `follow`, new lines follow until the trial ends or pauses. The run of a script has no logs.
        """
        if head is not None and (tail is not None or follow):
            raise ValueError("iter_logs(head=...) excludes tail=... and follow=True; leave one of them out.")
        if follow and timestamp_before is not None:
            raise ValueError("iter_logs(timestamp_before=...) excludes follow=True; leave one of them out.")
        return self._lines(follow, head, tail, rank_ids, stdtypes, timestamp_after, timestamp_before)

    logs = iter_logs  # the older name

    def _lines(
        self,
        follow: bool,
        head: int | None,
        tail: int | None,
        ranks: Collection[int] | None,
        streams: Collection[str] | None,
        after: datetime.datetime | None,
        before: datetime.datetime | None,
    ) -> Iterator[str]:
        folder = self._home.trial(self.experiment_id, self.id)
        logs = experiment.executors
        since, until = (None if one is None else one.timestamp() for one in (after, before))
        if follow:
            lines = logs.follow_logs(folder, self._is_over, ranks=ranks, streams=streams, since=since, tail=tail)
        else:
            lines = logs.read_logs(folder, ranks=ranks, streams=streams, since=since, until=until, head=head, tail=tail)
        return (f"{line.text}\n" for line in lines)

    def _is_over(self) -> bool:
        record = self.reload()._record
        return record.is_lost or not record.state.has_process

    def iter_metrics(self, group: str | None = None) -> Iterator[_metrics.TrialMetrics]:
        """Yield its reports so far by step, of one group ("training", "validation", ...) or of all."""
        yield from _metrics.of_reports(self.id, TrackingReader(self._home.database).metrics(self.id, group))

    def stream_metrics(self, group: str) -> Iterator[_metrics.TrialMetrics]:
        """Same as `iter_metrics`, the newer name."""
        return self.iter_metrics(group)

    def stream_training_metrics(self) -> Iterator[_metrics.TrialMetrics]:
        """Same as `iter_metrics("training")`, the newer form."""
        return self.iter_metrics("training")

    def stream_validation_metrics(self) -> Iterator[_metrics.TrialMetrics]:
        """Same as `iter_metrics("validation")`, the newer form."""
        return self.iter_metrics("validation")

    def list_checkpoints(
        self,
        sort_by: CheckpointSortBy | str | None = None,
        order_by: OrderBy | None = None,
        max_results: int | None = None,
    ) -> list[Checkpoint]:
        """Return its existing checkpoints. Arguments as in `Experiment.list_checkpoints`."""
        return _listing.listed(self._home, self.experiment_id, self.id, sort_by, order_by, max_results)

    get_checkpoints = list_checkpoints

    def top_checkpoint(self, sort_by: str | None = None, smaller_is_better: bool | None = None) -> Checkpoint:
        """Return its best checkpoint by the searcher's metric, or by another metric and direction."""
        return _listing.best(self._home, self.experiment_id, self.id, 1, sort_by, smaller_is_better)[0]

    def select_checkpoint(
        self,
        latest: bool = False,
        best: bool = False,
        uuid: str | None = None,
        sort_by: str | None = None,
        smaller_is_better: bool | None = None,
    ) -> Checkpoint:
        """Return its latest checkpoint, its best one, or the one with an id; pass one of the three arguments."""
        if sum((latest, best, uuid is not None)) != 1:
            raise ValueError(
                f"select_checkpoint(latest={latest}, best={best}, uuid={uuid!r}): pass exactly one of the three."
            )
        if best:
            return self.top_checkpoint(sort_by, smaller_is_better)
        if uuid is not None:
            return self._own(uuid)
        found = self.list_checkpoints(CheckpointSortBy.BATCH_NUMBER, OrderBy.DESC, 1)
        if not found:
            raise errors.CheckpointNotFoundException(f"trial {self.id} has no existing checkpoint.")
        return found[0]

    def _own(self, uuid: str) -> Checkpoint:
        found = Checkpoint(TrackingReader(self._home.database).checkpoint(uuid), self._home)
        if found.trial_id != self.id:
            raise errors.CheckpointNotFoundException(
                f"checkpoint {found.uuid} belongs to trial {found.trial_id}, not to trial {self.id}; "
                f"use get_trial({found.trial_id})."
            )
        return found

    def __repr__(self) -> str:
        return f"Trial(id={self.id}, experiment_id={self.experiment_id}, state={self.state.name})"
