"""The real runner over trials that only pretend to train, by a clock that only pretends to tick."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import math
import os
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from determined._home import Home
from determined.experiment import SearchReplay
from determined.experiment import config as configs
from determined.experiment.executors import EndReason, Handle, Placement, RunExit, RunSpec
from determined.experiment.runner._run_specs import CheckpointFinder, RunSpecs
from determined.experiment.runner._state import Rules
from determined.experiment.runner.driver import POLL_S, Driver
from determined.tracking import (
    ExperimentDescription,
    ExperimentStore,
    MetricReport,
    RunState,
    TrialWriter,
)

Pretend = Callable[[Mapping[str, Any], int], Iterator[tuple[float, Mapping[str, float]]]]
"""From hyperparameters and a seed to validations: the time at which each comes after the start, and its metrics."""


class SimulatedExecutor:
    """Runs trials that are generators of validations. Time passes only while somebody waits."""

    def __init__(self, experiment_id: int, database: pathlib.Path, pretend: Pretend) -> None:
        self.now = 0.0
        self.trained: dict[int, float] = {}
        self.most_at_once = 0
        self.stops: list[tuple[float, int]] = []
        self.lingering = 0.0
        """Seconds that runs of an earlier runner take to stop."""
        self._experiment_id = experiment_id
        self._database = database
        self._pretend = pretend
        self._recorder: TrialWriter | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._specs: dict[int, RunSpec] = {}
        self._over: list[RunExit] = []

    def start(self, spec: RunSpec) -> None:
        assert spec.trial_id not in self._specs
        self._specs[spec.trial_id] = spec
        self.most_at_once = max(self.most_at_once, len(self._specs))
        seed = int(spec.environment["DET_TRIAL_SEED"])
        steps = self._pretend(json.loads(spec.environment["DET_HPARAMS"]), seed)
        self._next(spec, steps, self.now)

    def _next(self, spec: RunSpec, steps: Iterator[tuple[float, Mapping[str, float]]], began: float) -> None:
        try:
            offset, metrics = next(steps)
        except StopIteration:
            self._end(spec, EndReason.COMPLETED)
            return
        except RuntimeError as error:
            self._end(spec, EndReason.FAILED, str(error))
            return
        except ValueError as error:
            self._end(spec, EndReason.INVALID_HP, str(error))
            return

        def validate() -> None:
            if self._specs.get(spec.trial_id) is spec:
                self.trained[spec.trial_id] = offset
                self._report(spec, metrics)
                self._next(spec, steps, began)

        self._at(began + offset, validate)

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), action))

    def _report(self, spec: RunSpec, metrics: Mapping[str, float]) -> None:
        if self._recorder is None:
            self._recorder = TrialWriter.attach(self._database, self._experiment_id, spec.trial_id, spec.run_id)
        # One connection for all trials, since there are thousands in one process here.
        of = dataclasses.replace(self._recorder._of, trial_id=spec.trial_id, run_id=spec.run_id)
        recorder = TrialWriter(self._recorder._engine, of)
        step = int(metrics.get("batches", 0))
        recorder.write([MetricReport(group="validation", steps_completed=step, metrics=metrics, time=self.now)])

    def _end(self, spec: RunSpec, reason: EndReason, message: str = "", *, runner_gone: bool = False) -> None:
        if self._specs.get(spec.trial_id) is spec:
            del self._specs[spec.trial_id]
            self._over.append(RunExit.of(spec, reason, message, runner_gone=runner_gone))

    def stop(self, trial_id: int) -> None:
        self.stops.append((self.now, trial_id))
        if (spec := self._specs.get(trial_id)) is not None:
            self._end(spec, EndReason.STOPPED)

    def kill(self, trial_id: int) -> None:
        if (spec := self._specs.get(trial_id)) is not None:
            self._end(spec, EndReason.KILLED)

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        until = self.now + (POLL_S if timeout_s is None else timeout_s)
        if timeout_s and not self._over and self._events:
            until = max(until, min(self._events[0][0], self.now + 1e9))  # nothing happens before: do not wait for it
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, until if timeout_s else self.now)
        over, self._over = self._over, []
        return over

    def adopt(self, spec: RunSpec, handle: Handle | None) -> None:
        self._specs[spec.trial_id] = spec
        if self.lingering:
            self._at(self.now + self.lingering, lambda: self._end(spec, EndReason.STOPPED, runner_gone=True))
        else:
            self._end(spec, EndReason.KILLED)

    def handle(self, trial_id: int) -> Handle | None:
        return None

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


@dataclasses.dataclass
class OwnSlots:
    """Slots that belong to one experiment alone."""

    capacity: int
    unit: int = 1
    allowed: int | None = None

    def __post_init__(self) -> None:
        self.held: dict[int, list[int]] = {}

    @property
    def device(self) -> Literal["cpu"]:
        return "cpu"

    def allowance(self, wanted: int, priority: int | None) -> int:
        return min(wanted, self.capacity if self.allowed is None else self.allowed)

    def take(self, trial_id: int, slots: int) -> Placement | None:
        taken = {slot for slots in self.held.values() for slot in slots}
        free = [slot for slot in range(self.capacity) if slot not in taken][:slots]
        if len(free) < min(slots, self.unit):
            return None
        self.held[trial_id] = free
        return {"slots": free}

    def attach(self, trial_id: int, handle: Handle) -> None:
        """Do nothing: slots are free when they are released."""

    def release(self, trial_id: int) -> None:
        self.held.pop(trial_id, None)


@dataclasses.dataclass
class Simulation:
    """An experiment that is simulated, step by step or to its end."""

    experiment_id: int
    home: Home
    config: configs.ExperimentConfig
    store: ExperimentStore
    executor: SimulatedExecutor
    slots: OwnSlots

    def driver(self) -> Driver:
        return Driver(
            rules=Rules.of(self.config, self.slots.capacity),
            store=self.store,
            search=SearchReplay(self.config, self.store, self.home.path),
            allocator=self.slots,
            executor=self.executor,
            specs=RunSpecs(self.experiment_id, self.config, self.home, self.slots.device),
            finder=CheckpointFinder(self.experiment_id, self.home),
        )

    def run(self) -> RunState:
        return self.driver().run()


def simulated(folder: pathlib.Path, config: Mapping[str, Any], pretend: Pretend, slots: int = 8) -> Simulation:
    """Return an experiment that has not begun."""
    home = Home(folder, os.environ.get("DET_DATABASE"))
    parsed = configs.from_map({"entrypoint": "python3 train.py", "reproducibility": {"experiment_seed": 1}, **config})
    store = ExperimentStore.create(home.database, ExperimentDescription(name="simulated", config=parsed.to_dict()))
    store.claim()
    executor = SimulatedExecutor(store.experiment_id, home.database, pretend)
    own = OwnSlots(slots, parsed.resources.slot_range.min)
    return Simulation(store.experiment_id, home, parsed, store, executor, own)


ASHA = {"name": "async_halving", "metric": "loss", "time_metric": "batches", "max_concurrent_trials": 16}


def learning(hparams: Mapping[str, Any], seed: int, units: int = 64) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Yield validations of a model that is best at a learning rate of 0.01, and better with time."""
    noise = random.Random(seed)
    distance = abs(math.log10(hparams["lr"]) + 2)
    for unit in range(1, units + 1):
        if unit in (1, 2, 4, 8, 16, 32, 64) or unit == units:
            loss = distance + 1.0 / unit + noise.gauss(0, 0.02)
            yield float(unit), {"loss": loss, "batches": unit}


def lr(low: float = -5.0, high: float = 1.0) -> dict[str, Any]:
    return {"lr": {"type": "log", "minval": low, "maxval": high}}


def assert_search_is_sound(folder: pathlib.Path, trials: int) -> None:
    """Let so many trials run by ASHA: the optimum is found, within the budget that the theory says."""
    searcher = {**ASHA, "num_rungs": 4, "max_trials": trials, "max_time": 64, "max_concurrent_trials": 256}
    simulation = simulated(folder, {"hyperparameters": lr(), "searcher": searcher}, learning, slots=256)
    assert simulation.run() is RunState.COMPLETED
    simulation.executor.close()
    assert all(trial.state is RunState.COMPLETED for trial in simulation.store.trials())
    assert len(simulation.store.trials()) == trials
    best = simulation.store.best()
    assert best is not None
    (winner,) = (trial for trial in simulation.store.trials() if trial.id == best.trial_id)
    assert abs(math.log10(winner.hparams["lr"]) + 2) < 0.1
    # A quarter of the trials goes on from each rung to the next: all of them train 1 unit, a quarter 3 more, and so on.
    theory = trials * (1 + 3 / 4 + 12 / 16 + 48 / 64)
    assert 0.95 * theory < sum(simulation.executor.trained.values()) < 1.25 * theory
    assert simulation.executor.most_at_once == 256
