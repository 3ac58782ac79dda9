"""Searches to test with, and runs of them made of random events."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from determined.experiment.config import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    Categorical,
    Const,
    Double,
    GridSearcher,
    Int,
    Log,
    RandomSearcher,
    SingleSearcher,
)
from determined.experiment.search import (
    Began,
    Create,
    Event,
    Exited,
    ExitReason,
    Operation,
    Search,
    Shutdown,
    Validated,
)

SPACE: dict[str, Any] = {
    "lr": Log(minval=-4, maxval=-1, count=3),
    "layers": Int(minval=1, maxval=4, count=2),
    "optimizer": {"name": Categorical(vals=["sgd", "adam"]), "momentum": Double(minval=0, maxval=0.9, count=2)},
    "batch_size": Const(val=32),
}

Play = list[tuple[Event, list[Operation]]]


class Act(NamedTuple):
    """Something that happens to one of the trials."""

    pick: int
    late: bool  # it may be a trial that has ended
    reason: ExitReason | None  # None: it validates
    metric: float
    steps: int


STRANGE = [math.nan, math.inf, -math.inf, -0.0]
ENDS = [None] * 12 + [ExitReason.COMPLETED] * 2 + list(ExitReason)

METRICS = st.one_of(st.integers(0, 4).map(float), st.floats(-10, 10), st.sampled_from(STRANGE))
FEW_ACTS = st.lists(
    st.builds(
        Act,
        st.integers(0, 30),
        st.sampled_from([False] * 5 + [True]),
        st.sampled_from(ENDS),
        METRICS,
        st.integers(0, 6),
    ),
    max_size=40,
)


def many_acts(seed: int) -> list[Act]:
    """More than hypothesis would put into a list."""
    chance = random.Random(seed)

    def metric() -> float:
        return chance.choice([float(chance.randrange(5)), chance.uniform(-10, 10), chance.choice(STRANGE)])

    return [
        Act(chance.randrange(31), chance.random() < 0.15, chance.choice(ENDS), metric(), chance.randrange(7))
        for _ in range(chance.randrange(40, 160))
    ]


ACTS = st.one_of(FEW_ACTS, st.integers(0, 2**32).map(many_acts))
SEEDS = st.integers(0, 2**32 - 1)
CONCURRENCY = st.integers(0, 6)
TRIALS = st.integers(1, 20)
BETTER = st.booleans()
DIVISORS = st.sampled_from([2.0, 2.5, 3.0, 4.0])
TIMES = st.integers(1, 20)

SINGLES = st.builds(SingleSearcher, metric=st.just("loss"), smaller_is_better=BETTER)
RANDOMS = st.builds(
    RandomSearcher,
    metric=st.just("loss"),
    smaller_is_better=BETTER,
    max_trials=TRIALS,
    max_concurrent_trials=CONCURRENCY,
)
GRIDS = st.builds(GridSearcher, metric=st.just("loss"), max_concurrent_trials=CONCURRENCY)
HALVINGS = st.builds(
    AsyncHalvingSearcher,
    metric=st.just("loss"),
    smaller_is_better=BETTER,
    time_metric=st.just("batches"),
    num_rungs=st.integers(1, 4),
    max_trials=TRIALS,
    max_time=TIMES,
    divisor=DIVISORS,
    max_concurrent_trials=CONCURRENCY,
)
ADAPTIVES = st.builds(
    AdaptiveAshaSearcher,
    metric=st.just("loss"),
    smaller_is_better=BETTER,
    time_metric=st.just("batches"),
    mode=st.sampled_from(["standard", "conservative", "aggressive"]),
    max_trials=TRIALS,
    max_time=TIMES,
    divisor=DIVISORS,
    max_rungs=st.integers(1, 4),
    max_concurrent_trials=CONCURRENCY,
    bracket_rungs=st.one_of(st.just([]), st.lists(st.integers(1, 3), max_size=3)),
)
SEARCHERS = st.one_of(SINGLES, RANDOMS, GRIDS, HALVINGS, ADAPTIVES)


def play(search: Search, acts: list[Act], between: Callable[[Search], Search] = lambda search: search) -> Play:
    """Let the acts happen to the trials of a search, then let all trials end; return what was said and answered.

    `between` is called after every event and may put another search in the place of the first one.
    """
    played: Play = []
    times: dict[str, float] = {}
    open_trials: list[str] = []

    def tell(event: Event) -> None:
        nonlocal search
        operations = search.handle(event)
        search = between(search)
        played.append((event, operations))
        created = [operation.request_id for operation in operations if isinstance(operation, Create)]
        times.update(dict.fromkeys(created, 0.0))
        open_trials.extend(created)
        if isinstance(event, Exited) and event.request_id in open_trials:
            open_trials.remove(event.request_id)

    tell(Began())
    for act in acts:
        candidates = list(times) if act.late or not open_trials else open_trials
        request_id = candidates[act.pick % len(candidates)]
        if act.reason is None:
            times[request_id] += act.steps
            tell(Validated(request_id, act.metric, times[request_id]))
        else:
            tell(Exited(request_id, act.reason))
    while open_trials:
        tell(Exited(open_trials[0], ExitReason.COMPLETED))
    return played


def created(played: Play) -> list[Create]:
    return [operation for _, operations in played for operation in operations if isinstance(operation, Create)]


def ends(played: Play) -> list[Shutdown]:
    return [operation for _, operations in played for operation in operations if isinstance(operation, Shutdown)]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def begin(searcher: Any, space: Any = SPACE, seed: int = 7) -> tuple[Search, list[str]]:
    """Return a search that has begun, and the request ids of its first trials."""
    search = Search(searcher, space, seed)
    operations = search.handle(Began())
    return search, [operation.request_id for operation in operations if isinstance(operation, Create)]
