"""The trials of a search, from request to end."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from determined import errors
from determined.experiment.search._draws import Draws
from determined.experiment.search._protocol import Create, ExitReason, Stop, Validated, json_number


@dataclasses.dataclass(slots=True)
class Trial:
    """A trial as its search sees it.

    `best` and `last` are values of the searcher's metric: the best one so far (never NaN) and the latest one; both
    are None before the first validation. `time` is what `time_metric` was at the latest one, if there is such a metric.
    """

    request_id: str
    number: int  # how many trials were created before
    hparams: dict[str, Any]
    best: float | None = None
    last: float | None = None
    time: float | None = None
    stopped: bool = False  # by the search


class Trials:
    """All trials of a search: those that run, and how the others ended.

    `created`, `closed`, `failed`, `canceled` and `invalid` count trials. Those that gave up by InvalidHP are `invalid`,
    and are among the `failed` ones too.
    """

    def __init__(self, draws: Draws, smaller_is_better: bool) -> None:
        self.created = self.closed = self.failed = self.canceled = self.invalid = 0
        self._draws = draws
        self._smaller_is_better = smaller_is_better
        self._open: dict[str, Trial] = {}
        self._stopped = 0

    def __iter__(self) -> Iterator[Trial]:
        """Yield the trials that have not ended, in the order of their creation."""
        return iter(self._open.values())

    def __len__(self) -> int:
        """Return how many trials have not ended."""
        return len(self._open)

    @property
    def running(self) -> int:
        """How many trials have neither ended nor been asked to stop."""
        return len(self._open) - self._stopped

    def create(self, hparams: dict[str, Any]) -> Create:
        """Return the operation that starts another trial, and count it."""
        _check(hparams)
        made = Create(self._draws.request_id(), hparams, self._draws.trial_seed())
        self._open[made.request_id] = Trial(made.request_id, self.created, hparams)
        self.created += 1
        return made

    def stop(self, trial: Trial) -> Stop:
        """Return the operation that ends a trial early."""
        if not trial.stopped:
            trial.stopped = True
            self._stopped += 1
        return Stop(trial.request_id)

    def validated(self, event: Validated) -> Trial | None:
        """Note a validation and return its trial; None if the trial is to stop, or has ended."""
        trial = self._open.get(event.request_id)
        if trial is None or trial.stopped:
            return None
        trial.last, trial.time = event.metric, event.time
        if self._improves(event.metric, trial.best):
            trial.best = event.metric
        return trial

    def close(self, request_id: str, reason: ExitReason) -> Trial | None:
        """Count the end of a trial and return it; None if it had ended before."""
        trial = self._open.pop(request_id, None)
        if trial is None:
            return None
        self._stopped -= trial.stopped
        self.closed += 1
        self.failed += reason in (ExitReason.ERROR, ExitReason.INVALID_HP)
        self.invalid += reason is ExitReason.INVALID_HP
        self.canceled += reason is ExitReason.CANCELED
        return trial

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        counts = [self.created, self.closed, self.failed, self.canceled, self.invalid]
        return {"counts": counts, "open": [_row(trial) for trial in self]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` described."""
        self.created, self.closed, self.failed, self.canceled, self.invalid = state["counts"]
        self._open = {row[0]: _trial(row) for row in state["open"]}
        self._stopped = sum(trial.stopped for trial in self)

    def _improves(self, metric: float, best: float | None) -> bool:
        if math.isnan(metric):
            return False
        return best is None or (metric < best if self._smaller_is_better else metric > best)


def _row(trial: Trial) -> list[Any]:
    numbers = [None if number is None else json_number(number) for number in (trial.best, trial.last, trial.time)]
    return [trial.request_id, trial.number, trial.hparams, *numbers, trial.stopped]


def _trial(row: list[Any]) -> Trial:
    request_id, number, hparams, *numbers, stopped = row
    best, last, time = (None if number is None else float(number) for number in numbers)
    return Trial(request_id, number, hparams, best, last, time, stopped)


def _check(hparams: Any) -> None:
    """Refuse what is not a mapping of hyperparameters; a user's method may suggest anything."""
    try:
        if isinstance(hparams, dict) and json.dumps(hparams):
            return
    except (TypeError, ValueError) as error:
        problem = f"it is not JSON ({error}); use numbers, strings, lists and mappings of Python, such as float(x)"
    else:
        problem = 'it is not a dict; return one such as {"lr": 0.1}, or None for no further trial now'
    raise errors.InvalidExperimentException(f"The search method suggested the hyperparameters {hparams!r}: {problem}.")
