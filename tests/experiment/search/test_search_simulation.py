"""Ten thousand trials of made-up objectives: the search finds the best region, at the price that theory names."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from determined.experiment.config import AsyncHalvingSearcher, Categorical, Double, Log, Space
from determined.experiment.search import Began, Create, Exited, ExitReason, Operation, Search, Shutdown, Stop, Validated

TRIALS, WORKERS, DIVISOR, RUNGS, LONGEST = 10_000, 64, 4, 5, 256
UNITS = [LONGEST // DIVISOR ** (RUNGS - 1 - rung) for rung in range(RUNGS)]
SEARCHER = AsyncHalvingSearcher(
    metric="loss",
    num_rungs=RUNGS,
    max_trials=TRIALS,
    time_metric="batches",
    max_time=LONGEST,
    divisor=float(DIVISOR),
    max_concurrent_trials=WORKERS,
)
SPACE: Space = {
    "lr": Log(minval=-5, maxval=0),
    "dropout": Double(minval=0, maxval=1),
    "activation": Categorical(vals=["relu", "tanh", "none"]),
}


Objective = Callable[[Create, int], float]


def loss(hparams: dict[str, Any], time: float) -> float:
    """Best at lr 0.01, dropout 0.2 and relu; falls as training goes on, the slower the smaller the lr."""
    exponent = math.log10(hparams["lr"])
    end = (exponent + 2) ** 2 + 4 * (hparams["dropout"] - 0.2) ** 2 + (hparams["activation"] != "relu")
    return end + math.exp(-exponent / 4) / (1 + time)


def learning(trial: Create, time: int) -> float:
    return loss(trial.hparams, time)


def noise(trial: Create, time: int) -> float:
    """Every metric independent of all others: the worst that can be searched, and what theory can be exact about."""
    return zlib.crc32(f"{trial.request_id} {time}".encode())


class Simulation:
    """Workers that train what the search asks for, validating at every power of two, on a clock of their own."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.search = Search(SEARCHER, SPACE, 7)
        self.trials: dict[str, Create] = {}
        self.trained: dict[str, int] = {}
        self.ended: Shutdown | None = None
        self.now = 0.0
        self.due: list[tuple[float, int, str]] = []
        self.follow(self.search.handle(Began()))
        while self.due:
            self.step()

    def follow(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Create):
                self.trials[operation.request_id] = operation
                self.trained[operation.request_id] = 0
                self.train(operation.request_id, 1)
            elif isinstance(operation, Shutdown):
                self.ended = operation

    def train(self, request_id: str, time: int) -> None:
        # Trials are of different speed, so that they overtake one another.
        speed = 0.5 + self.trials[request_id].hparams["dropout"]
        heapq.heappush(self.due, (self.now + (time - self.trained[request_id]) / speed, time, request_id))

    def step(self) -> None:
        self.now, time, request_id = heapq.heappop(self.due)
        self.trained[request_id] = time
        metric = self.objective(self.trials[request_id], time)
        operations = self.search.handle(Validated(request_id, metric, time))
        if Stop(request_id) in operations:
            operations += self.search.handle(Exited(request_id, ExitReason.COMPLETED))
        else:
            self.train(request_id, 2 * time)
        self.follow(operations)

    @property
    def arrived(self) -> list[int]:
        """How many trials reached each rung."""
        return [sum(time >= unit for time in self.trained.values()) for unit in UNITS]


@pytest.fixture(scope="module")
def learned() -> Simulation:
    return Simulation(learning)


@pytest.fixture(scope="module")
def guessed() -> Simulation:
    return Simulation(noise)


@pytest.fixture(params=["learned", "guessed"])
def simulated(request: pytest.FixtureRequest) -> Simulation:
    found: Simulation = request.getfixturevalue(request.param)
    return found


def test_every_trial_ran_and_the_search_ended(simulated: Simulation) -> None:
    assert len(simulated.trained) == TRIALS
    assert simulated.ended == Shutdown()


def test_trials_end_at_rungs_only(simulated: Simulation) -> None:
    assert set(simulated.trained.values()) == set(UNITS)


def test_state_of_so_many_trials_is_small(simulated: Simulation) -> None:
    assert len(json.dumps(simulated.search.state())) < 200_000


def test_chance_decides_how_many_go_on_where_metrics_are_independent(guessed: Simulation) -> None:
    # The n-th to arrive is equally likely to be of any rank, so it goes on with this probability.
    for arrived, went_on in itertools.pairwise(guessed.arrived):
        chances = [max(n // DIVISOR, 1) / n for n in range(1, arrived + 1)]
        deviation = math.sqrt(sum(chance * (1 - chance) for chance in chances))
        assert abs(went_on - sum(chances)) < 4 * deviation


def test_budget_is_shared_evenly_by_the_rungs_where_metrics_are_independent(guessed: Simulation) -> None:
    # The first rung costs one unit a trial; each later one three quarters of that, since trials come with a quarter.
    expected = TRIALS * (1 + (RUNGS - 1) * (DIVISOR - 1) / DIVISOR)
    assert sum(guessed.trained.values()) == pytest.approx(expected, rel=0.1)


def test_early_arrivals_cost_a_little_more_where_metrics_say_something(learned: Simulation) -> None:
    # Those that arrive while a rung is nearly empty go on too easily: some square root of all (Li et al., 2020).
    for arrived, went_on in itertools.pairwise(learned.arrived):
        assert arrived / DIVISOR - math.sqrt(arrived) < went_on < arrived / DIVISOR + 4 * math.sqrt(arrived)
    assert sum(learned.trained.values()) < 0.03 * TRIALS * LONGEST


def finished(simulation: Simulation) -> list[dict[str, Any]]:
    return [simulation.trials[name].hparams for name, time in simulation.trained.items() if time == LONGEST]


def test_best_region_is_found(learned: Simulation) -> None:
    best = min(finished(learned), key=lambda hparams: loss(hparams, LONGEST))
    assert best["activation"] == "relu"
    assert abs(math.log10(best["lr"]) + 2) < 0.15
    assert abs(best["dropout"] - 0.2) < 0.1


def test_best_trial_is_among_the_best_of_all(learned: Simulation) -> None:
    ends = sorted(loss(trial.hparams, LONGEST) for trial in learned.trials.values())
    assert min(loss(hparams, LONGEST) for hparams in finished(learned)) <= ends[TRIALS // 1000]
