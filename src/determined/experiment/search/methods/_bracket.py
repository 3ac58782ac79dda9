"""Asynchronous successive halving: trials climb rungs of more and more training, and most are stopped on the way."""

from __future__ import annotations

import base64
import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from determined.experiment.search._method import PreviewRow, Rung, SearchMethod
from determined.experiment.search._protocol import ExitReason, Operation
from determined.experiment.search._trials import Trial


@dataclasses.dataclass(frozen=True, slots=True)
class BracketPlan:
    """How many trials a bracket has, how many at once, and how far its rungs are apart."""

    rungs: int
    trials: int
    concurrency: int  # 0: enough that one of them reaches the top
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
        """Return how many trials go on from a rung at which `arrived` trials have arrived."""
        return max(math.floor(arrived / self.divisor), 1)

    def preview(self, bracket: int) -> Iterator[PreviewRow]:
        """Yield how many trials reach each rung if none fails; `bracket` is the number of this bracket."""
        arrive = self.trials
        for rung, time in enumerate(self.units):
            go_on = self.going_on(arrive) if rung < self.rungs - 1 else 0
            yield PreviewRow(bracket, rung, arrive, go_on, arrive - go_on, time)
            arrive = go_on


class Bracket:
    """The rungs of one bracket and the trials on them.

    Metrics are stored so that smaller is better, in ascending order within a rung. The trial of a metric is known only
    while it runs: nothing can happen to the metrics of the others.
    """

    def __init__(self, plan: BracketPlan, method: SearchMethod) -> None:
        self._plan = plan
        self._units = plan.units
        self._method = method
        self._rungs: list[list[float]] = [[] for _ in self._units]
        self._climbed: dict[str, list[float]] = {}  # the metrics of a running trial, from rung 0 on
        self._created = self._closed = self._invalid = 0

    def __contains__(self, request_id: str) -> bool:
        """Return whether a running trial belongs to this bracket."""
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
            rank = self._insert(climbed, metric)
            if rung is self._rungs[-1] or rank >= self._plan.going_on(len(rung)):
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
        """Return the finished fraction of the bracket, from 0 to 1; the last sixth is the climb of the last trials."""
        trials = self._plan.trials
        return min(max(len(self._rungs[0]) / (1.2 * trials), (self._closed - self._invalid) / trials), 1.0)

    def rungs(self, number: int) -> list[Rung]:
        """Return the rungs of this bracket; `number` is that of the bracket."""
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
            "rungs": [_pack(rung) for rung in self._rungs],
            "climbed": {request_id: _pack(metrics) for request_id, metrics in self._climbed.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` described."""
        self._created, self._closed, self._invalid = state["counts"]
        self._rungs = [_unpack(rung) for rung in state["rungs"]]
        self._climbed = {request_id: _unpack(metrics) for request_id, metrics in state["climbed"].items()}

    def _insert(self, climbed: list[float], metric: float) -> int:
        """Insert a trial's metric at its rung, before equal ones, and return its index."""
        rung = self._rungs[len(climbed)]
        index = bisect.bisect_left(rung, metric)
        rung.insert(index, metric)
        climbed.append(metric)
        return index

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


def _pack(numbers: Sequence[float]) -> str:
    """Return many numbers as one short string; `_unpack` reads it back, bit for bit."""
    return base64.b64encode(np.asarray(numbers, "<f8").tobytes()).decode()


def _unpack(packed: str) -> list[float]:
    numbers: list[float] = np.frombuffer(base64.b64decode(packed), "<f8").tolist()
    return numbers
