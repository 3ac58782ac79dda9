"""The search methods again, in the plainest words: lists, sorts, and everything counted anew each time."""

from __future__ import annotations

import itertools
import math
import uuid
from typing import Any

import numpy as np

from determined.experiment.config import Categorical, Const, Double, Int, Log
from determined.experiment.search import Began, Create, Event, Exited, ExitReason, Operation, Shutdown, Stop, Validated


def drawn(space: dict[str, Any], random: np.random.RandomState) -> dict[str, Any]:
    hparams: dict[str, Any] = {}
    for name, its in sorted(space.items()):
        if isinstance(its, dict):
            hparams[name] = drawn(its, random)
        elif isinstance(its, Const):
            hparams[name] = its.val
        elif isinstance(its, Int):
            hparams[name] = its.minval + int(random.randint(0, its.maxval - its.minval + 1))
        elif isinstance(its, Double):
            hparams[name] = random.uniform(its.minval, its.maxval)
        elif isinstance(its, Log):
            hparams[name] = its.base ** random.uniform(its.minval, its.maxval)
        elif isinstance(its, Categorical):
            hparams[name] = its.vals[random.randint(len(its.vals))]
    return hparams


def axis_of(its: Any) -> list[Any]:
    if isinstance(its, Const):
        return [its.val]
    if isinstance(its, Categorical):
        return list(its.vals)
    low, high = its.minval, its.maxval
    count = min(its.count, high - low + 1) if isinstance(its, Int) else its.count
    values = [low + (high - low) / 2] if count == 1 else [low + i * (high - low) / (count - 1) for i in range(count)]
    if isinstance(its, Int):
        return [math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5) for value in values]
    return [its.base**value for value in values] if isinstance(its, Log) else values


def grid_of(space: dict[str, Any]) -> list[dict[str, Any]]:
    axes = [grid_of(its) if isinstance(its, dict) else axis_of(its) for _, its in sorted(space.items())]
    return [dict(zip(sorted(space), point, strict=True)) for point in itertools.product(*axes)]


class ReferenceTrial:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.stopped = False
        self.reason: ExitReason | None = None  # None until it ends


class Reference:
    """A method's trials, and the end of the search."""

    def __init__(self, searcher: Any, space: Any, seed: int, random: np.random.RandomState | None = None) -> None:
        self.searcher, self.space = searcher, space
        self.random = random or np.random.RandomState(seed)
        self.trials: dict[str, ReferenceTrial] = {}
        self.over = False

    def handle(self, event: Event) -> list[Operation]:
        operations = [Create(*made) if len(made) == 3 else Stop(*made) for made in self.follow(event)]
        reasons = [trial.reason for trial in self.trials.values()]
        if None in reasons or self.over:
            return operations
        self.over = True
        failed = all(reason in (ExitReason.ERROR, ExitReason.INVALID_HP) for reason in reasons)
        return [*operations, Shutdown(failed, all(reason is ExitReason.CANCELED for reason in reasons))]

    def follow(self, event: Event) -> list[tuple[Any, ...]]:
        if isinstance(event, Began):
            return self.begin()
        assert isinstance(event, Validated | Exited)
        trial = self.trials[event.request_id]
        if trial.reason is not None:
            return []
        if isinstance(event, Exited):
            trial.reason = event.reason
            return self.exited(trial)
        return [] if trial.stopped else self.validated(trial, event.metric, event.time)

    def begin(self) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def validated(self, trial: ReferenceTrial, metric: float, time: float | None) -> list[tuple[Any, ...]]:
        return []

    def exited(self, trial: ReferenceTrial) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def next_hparams(self) -> dict[str, Any]:
        return drawn(self.space, self.random)

    def create(self) -> tuple[Any, ...]:
        hparams = self.next_hparams()
        request_id = str(uuid.UUID(bytes=self.random.bytes(16), version=4))
        self.trials[request_id] = ReferenceTrial(request_id)
        return request_id, hparams, int(self.random.randint(0, 2**31))

    def valid(self) -> int:
        return sum(trial.reason is not ExitReason.INVALID_HP for trial in self.trials.values())


class ReferenceSingle(Reference):
    def begin(self) -> list[tuple[Any, ...]]:
        return [self.create()]

    def exited(self, trial: ReferenceTrial) -> list[tuple[Any, ...]]:
        return []


class ReferenceRandom(Reference):
    def begin(self) -> list[tuple[Any, ...]]:
        most = self.searcher.max_trials
        return [self.create() for _ in range(min(most, self.searcher.max_concurrent_trials or most))]

    def exited(self, trial: ReferenceTrial) -> list[tuple[Any, ...]]:
        return [self.create()] if self.valid() < self.searcher.max_trials else []


class ReferenceGrid(Reference):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.points = grid_of(self.space)

    def begin(self) -> list[tuple[Any, ...]]:
        most = len(self.points)
        return [self.create() for _ in range(min(most, self.searcher.max_concurrent_trials or most))]

    def exited(self, trial: ReferenceTrial) -> list[tuple[Any, ...]]:
        return [self.create()] if self.points else []

    def next_hparams(self) -> dict[str, Any]:
        return self.points.pop()


class ReferenceHalving(Reference):
    """One bracket; `rungs[i]` holds (metric, request id) of the trials that reached rung i."""

    def __init__(self, *arguments: Any, plan: dict[str, Any] | None = None) -> None:
        super().__init__(*arguments)
        its = self.searcher
        self.max_trials = plan["trials"] if plan else its.max_trials
        self.concurrent = plan["concurrent"] if plan else its.max_concurrent_trials
        number = plan["rungs"] if plan else its.num_rungs
        self.units = [max(math.floor(its.max_time / its.divisor ** (number - 1 - i)), 1) for i in range(number)]
        self.rungs: list[list[tuple[float, str]]] = [[] for _ in range(number)]

    def begin(self) -> list[tuple[Any, ...]]:
        if self.concurrent:
            initial = min(self.concurrent, self.max_trials)
        else:
            initial = min(max(1, math.floor(self.searcher.divisor ** (len(self.units) - 1))), self.max_trials)
        return [self.create() for _ in range(initial)]

    def rung_of(self, trial: ReferenceTrial) -> int:
        return sum(trial.request_id in [request_id for _, request_id in rung] for rung in self.rungs)

    def insert(self, trial: ReferenceTrial, metric: float) -> tuple[int, int, int]:
        """Return (rung, place, how many are there now)."""
        number = self.rung_of(trial)
        entries = [(metric, trial.request_id), *self.rungs[number]]  # the new one before its equals: sorting is stable
        self.rungs[number] = sorted(entries, key=lambda entry: entry[0])
        return number, self.rungs[number].index(entries[0]), len(entries)

    def validated(self, trial: ReferenceTrial, metric: float, time: float | None) -> list[tuple[Any, ...]]:
        m = metric if self.searcher.smaller_is_better else -metric
        m = math.inf if math.isnan(m) else m
        assert time is not None
        while time >= self.units[self.rung_of(trial)]:
            rung, place, n = self.insert(trial, m)
            if rung == len(self.rungs) - 1 or place >= max(math.floor(n / self.searcher.divisor), 1):
                trial.stopped = True
                return [(trial.request_id,), *self.create_within_budget()]
        return []

    def exited(self, trial: ReferenceTrial) -> list[tuple[Any, ...]]:
        if trial.reason is ExitReason.INVALID_HP:
            self.rungs = [[entry for entry in rung if entry[1] != trial.request_id] for rung in self.rungs]
            return [self.create()]
        if trial.stopped:
            return []
        if trial.reason is ExitReason.ERROR:
            self.insert(trial, math.inf)
        return self.create_within_budget()

    def create_within_budget(self) -> list[tuple[Any, ...]]:
        return [self.create()] if self.valid() < self.max_trials else []


class ReferenceAdaptive(Reference):
    def __init__(self, searcher: Any, space: Any, seed: int) -> None:
        super().__init__(searcher, space, seed)
        plans = adaptive_plans(searcher)
        self.brackets = [ReferenceHalving(searcher, space, seed, self.random, plan=plan) for plan in plans]

    def follow(self, event: Event) -> list[tuple[Any, ...]]:
        if isinstance(event, Began):
            made = [bracket.follow(event) for bracket in self.brackets]
        else:
            assert isinstance(event, Validated | Exited)
            made = [bracket.follow(event) for bracket in self.brackets if event.request_id in bracket.trials]
        for bracket in self.brackets:
            self.trials.update(bracket.trials)
        return [operation for operations in made for operation in operations]


def adaptive_plans(searcher: Any) -> list[dict[str, Any]]:
    d = searcher.divisor
    top = min(
        searcher.max_rungs,
        math.floor(math.log(searcher.max_time) / math.log(d)) + 1,
        math.floor(math.log(searcher.max_trials) / math.log(d)) + 1,
    )
    modes = {"conservative": range(1, top + 1), "standard": range((top - 1) // 2 + 1, top + 1), "aggressive": [top]}
    rungs = sorted(searcher.bracket_rungs or modes[searcher.mode])[::-1]
    weights = [d ** (b - 1) / b for b in rungs]
    trials = [max(math.floor(searcher.max_trials * weight / sum(weights)), 1) for weight in weights]
    if sum(trials) < searcher.max_trials:
        trials[0] += searcher.max_trials - sum(trials)
    if searcher.max_concurrent_trials == 0:
        concurrent = [max(trials[-1], math.floor(d)) for _ in rungs]
    else:
        concurrent = [0 for _ in rungs]
        for place in range(max(searcher.max_concurrent_trials, len(rungs))):
            concurrent[place % len(rungs)] += 1
    return [{"rungs": r, "trials": t, "concurrent": c} for r, t, c in zip(rungs, trials, concurrent, strict=True)]


REFERENCES = {
    "single": ReferenceSingle,
    "random": ReferenceRandom,
    "grid": ReferenceGrid,
    "async_halving": ReferenceHalving,
    "adaptive_asha": ReferenceAdaptive,
}
