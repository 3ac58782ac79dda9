"""Asynchronous successive halving: trials climb rungs of more and more training, and most are stopped on the way."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from determined.experiment.search._events import ExitReason
from determined.experiment.search._method import SearchMethod
from determined.experiment.search._numbers import pack, unpack
from determined.experiment.search._operations import Operation
from determined.experiment.search._trials import Trial


@dataclasses.dataclass(frozen=True, slots=True)
class BracketPlan:
    """How many trials a bracket has, how many at once, and how far its rungs are apart."""

    rungs: int
    trials: int
    concurrency: int  # 0: as many as it takes for one of them to reach the top
    divisor: float
    max_time: int

    @property
    def units(self) -> list[int]:
        """How much training each rung needs."""
        return [max(math.floor(self.max_time / self.divisor ** (self.rungs - 1 - i)), 1) for i in range(self.rungs)]

    @property
    def initial(self) -> int:
        """How many trials are started at once."""
        wanted = self.concurrency or max(math.floor(self.divisor ** (self.rungs - 1)), 1)
        return min(wanted, self.trials)

    def going_on(self, arrived: int) -> int:
        """Return how many go on from a rung at which so many trials have arrived."""
        return max(math.floor(arrived / self.divisor), 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Rung:
    """One rung of a bracket: how much training it takes, how many trials have arrived, and which are on their way."""

    bracket: int
    number: int
    time: int
    arrived: int
    climbing: tuple[str, ...]
    """Request ids of the trials under way, not told to stop, that have reached all rungs below this one only."""


class Bracket:
    """The rungs of one bracket and the trials on them.

    Metrics are kept so that smaller is better, and ascending within a rung. Which trial a metric belongs to is known of
    trials under way only: nothing can happen to the metrics of the others.
    """

    def __init__(self, plan: BracketPlan, method: SearchMethod) -> None:
        self._plan = plan
        self._units = plan.units
        self._method = method
        self._rungs: list[list[float]] = [[] for _ in self._units]
        self._climbed: dict[str, list[float]] = {}  # the metrics of a trial under way, from rung 0 on
        self._created = self._closed = self._invalid = 0

    def __contains__(self, request_id: str) -> bool:
        """Say whether a trial under way belongs to this bracket."""
        return request_id in self._climbed

    def begin(self) -> Iterator[Operation]:
        """Yield the first trials."""
        for _ in range(self._plan.initial):
            yield self._create()

    def validated(self, trial: Trial, metric: float, time: float) -> Iterator[Operation]:
        """Yield a stop, and another trial, unless the trial is good enough for the rungs it has reached."""
        climbed = self._climbed[trial.request_id]
        while time >= self._units[len(climbed)]:
            rung = self._rungs[len(climbed)]
            place = self._insert(climbed, metric)
            if rung is self._rungs[-1] or place >= self._plan.going_on(len(rung)):
                yield self._method.trials.stop(trial)
                yield from self._create_another()
                return

    def exited(self, trial: Trial, reason: ExitReason) -> Iterator[Operation]:
        """Yield another trial in the place of one that ended, unless it was stopped: then there is one already."""
        climbed = self._climbed.pop(trial.request_id)
        self._closed += 1
        if reason is ExitReason.INVALID_HP:
            self._invalid += 1
            self._remove(climbed)
            yield self._create()
        elif not trial.stopped:
            if reason is ExitReason.ERROR:
                self._insert(climbed, math.inf)
            yield from self._create_another()

    def progress(self) -> float:
        """Return how much of the bracket is done, from 0 to 1; a fifth is set aside for the climb of the last ones."""
        trials = self._plan.trials
        return min(max(len(self._rungs[0]) / (1.2 * trials), (self._closed - self._invalid) / trials), 1.0)

    def rungs(self, number: int) -> list[Rung]:
        """Return the rungs of this bracket, whose number is given."""
        climbing: list[list[str]] = [[] for _ in self._units]
        for trial in self._method.trials:
            if trial.request_id in self and not trial.stopped:
                climbing[len(self._climbed[trial.request_id])].append(trial.request_id)
        return [
            Rung(number, index, time, len(self._rungs[index]), tuple(climbing[index]))
            for index, time in enumerate(self._units)
        ]

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {
            "counts": [self._created, self._closed, self._invalid],
            "rungs": [pack(rung) for rung in self._rungs],
            "climbed": {request_id: pack(metrics) for request_id, metrics in self._climbed.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` described."""
        self._created, self._closed, self._invalid = state["counts"]
        self._rungs = [unpack(rung) for rung in state["rungs"]]
        self._climbed = {request_id: unpack(metrics) for request_id, metrics in state["climbed"].items()}

    def _insert(self, climbed: list[float], metric: float) -> int:
        """Insert a trial's metric at its rung, before equal ones, and return its place."""
        rung = self._rungs[len(climbed)]
        place = bisect.bisect_left(rung, metric)
        rung.insert(place, metric)
        climbed.append(metric)
        return place

    def _remove(self, climbed: list[float]) -> None:
        for rung, metric in zip(self._rungs, climbed, strict=False):
            del rung[bisect.bisect_left(rung, metric)]

    def _create_another(self) -> Iterator[Operation]:
        if self._created - self._invalid < self._plan.trials:
            yield self._create()

    def _create(self) -> Operation:
        made = self._method.trials.create(self._method.sample())
        self._climbed[made.request_id] = []
        self._created += 1
        return made
