"""The real runner, search and record, with trials and a clock that are simulated."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pathlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from determined import errors, storage
from determined.tracking import (
    CheckpointSaved,
    Desired,
    ExperimentStore,
    RunState,
    TrackingReader,
    TrialRequest,
    TrialWriter,
)
from disks import SmallDisk, small_disk
from simulation import ASHA, Simulation, assert_search_is_sound, learning, lr, simulated

FOUR_TRIALS = {"hyperparameters": lr(), "searcher": {"name": "random", "metric": "loss", "max_trials": 4}}


def states(simulation: Simulation) -> Counter[RunState]:
    return Counter(trial.state for trial in simulation.store.trials())


@pytest.mark.thorough
def test_two_thousand_trials_find_the_optimum_within_the_budget_of_theory(tmp_path: pathlib.Path) -> None:
    assert_search_is_sound(tmp_path, 2_000)  # `make torture` has ten thousand


@pytest.mark.parametrize("slots", [1, 3])
def test_trials_never_hold_more_slots_than_there_are(tmp_path: pathlib.Path, slots: int) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 12}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, learning, slots=slots)
    assert simulation.run() is RunState.COMPLETED
    assert simulation.executor.most_at_once == slots
    assert not simulation.slots.held


def test_stops_are_delivered_when_the_search_decides(tmp_path: pathlib.Path) -> None:
    searcher = {**ASHA, "num_rungs": 3, "max_trials": 20, "max_time": 16, "divisor": 4}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, learning)
    simulation.run()
    short = [trial for trial, units in simulation.executor.trained.items() if units < 16]
    assert len(short) >= 10
    assert {trial for _, trial in simulation.executor.stops} >= set(short)


def failing(times: int) -> Any:
    left = Counter[int]()

    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield 1.0, {"loss": 1.0, "batches": 1}
        left[seed] += 1
        if left[seed] <= times:
            raise RuntimeError("out of memory")

    return pretend


@pytest.mark.parametrize(("failures", "state"), [(2, RunState.COMPLETED), (3, RunState.ERROR)])
def test_a_trial_is_restarted_as_often_as_allowed(tmp_path: pathlib.Path, failures: int, state: RunState) -> None:
    config = {"searcher": {"name": "single", "metric": "loss"}, "max_restarts": 2}
    simulation = simulated(tmp_path, config, failing(failures))
    assert simulation.run() is state
    (trial,) = simulation.store.trials()
    assert (trial.state, trial.restarts, trial.run_id) == (state, 2, 3)
    assert (trial.reason is None) == (state is RunState.COMPLETED)


def test_an_experiment_fails_only_if_all_its_trials_do(tmp_path: pathlib.Path) -> None:
    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield 1.0, {"loss": hparams["lr"], "batches": 1}
        if hparams["lr"] > 0.01:
            raise RuntimeError("it exploded")

    config = {
        "hyperparameters": lr(),
        "searcher": {"name": "random", "metric": "loss", "max_trials": 10},
        "max_restarts": 0,
    }
    simulation = simulated(tmp_path, config, pretend)
    assert simulation.run() is RunState.COMPLETED
    assert states(simulation)[RunState.ERROR] + states(simulation)[RunState.COMPLETED] == 10


def test_invalid_hyperparameters_are_replaced(tmp_path: pathlib.Path) -> None:
    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        if hparams["lr"] > 0.01:
            raise ValueError("too fast")
        yield 1.0, {"loss": hparams["lr"], "batches": 1}

    searcher = {"name": "random", "metric": "loss", "max_trials": 10}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, pretend)
    assert simulation.run() is RunState.COMPLETED
    assert states(simulation)[RunState.COMPLETED] == 10
    invalid = [trial for trial in simulation.store.trials() if trial.state is RunState.ERROR]
    assert invalid
    assert all(trial.run_id == 1 and "too fast" in (trial.reason or "") for trial in invalid)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trials", [8, 10])  # the 100th ends with others, or as the last one of its turn
def test_a_program_that_takes_no_hyperparameters_at_all_ends_the_experiment(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, trials: int
) -> None:
    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield from ()
        raise ValueError("never")

    searcher = {"name": "random", "metric": "loss", "max_trials": trials}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, pretend, slots=8)
    assert simulation.run() is RunState.ERROR
    assert "100 trials in a row" in caplog.text
    assert set(states(simulation)) == {RunState.ERROR}
    assert not simulation.slots.held
    for trial in simulation.store.trials():
        assert all(run.ended is not None for run in simulation.store.runs(trial.id))


def test_a_missing_time_metric_ends_the_experiment_with_its_name(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield 1.0, {"loss": 1.0}
        yield 100.0, {"loss": 1.0}

    searcher = {**ASHA, "num_rungs": 2, "max_trials": 4, "max_time": 16, "time_metric": "years"}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, pretend)
    assert simulation.run() is RunState.ERROR
    assert "years" in caplog.text
    assert states(simulation) == {RunState.ERROR: 4}


@pytest.mark.timeout(60)
def test_a_missing_time_metric_ends_the_experiment_also_if_its_trial_ends_at_once(tmp_path: pathlib.Path) -> None:
    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield 1.0, {"loss": 1.0}

    searcher = {**ASHA, "num_rungs": 2, "max_trials": 4, "max_time": 16, "time_metric": "years"}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, pretend, slots=2)
    assert simulation.run() is RunState.ERROR
    assert states(simulation) == {RunState.COMPLETED: 2, RunState.ERROR: 2}
    assert not simulation.slots.held


class Interrupted(Exception):
    """Stands for the death of the runner."""


def dying(simulation: Simulation, turns: int) -> None:
    """Let the runner take so many turns, and vanish with all runs."""
    left = itertools.count(turns, -1)
    dying_when(simulation, lambda: next(left) == 0)


def dying_when(simulation: Simulation, is_time: Callable[[], bool]) -> None:
    """Let the runner take turns until something is true, and vanish with all runs."""
    driver, executor = simulation.driver(), simulation.executor
    wait = executor.poll

    def ended(timeout: float | None) -> Any:
        if is_time():
            raise Interrupted
        return wait(timeout)

    executor.poll = ended  # type: ignore[method-assign]
    try:
        driver.run()
    except Interrupted:
        executor._specs.clear()
        executor._events.clear()
        executor._over.clear()
        simulation.slots.held.clear()
    finally:
        executor.poll = wait  # type: ignore[method-assign]


def outcome(simulation: Simulation) -> Any:
    trials = simulation.store.trials()
    records = TrackingReader(simulation.home.database)
    last = {trial.id: records.metrics(trial.id, "validation")[-1].metrics for trial in trials}
    return [(trial.request_id, trial.hparams, trial.seed, trial.state, last[trial.id]) for trial in trials]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_runner_that_dies_again_and_again_leaves_the_same_experiment(tmp_path: pathlib.Path, seed: int) -> None:
    searcher = {**ASHA, "num_rungs": 3, "max_trials": 12, "max_time": 16, "max_concurrent_trials": 1}
    config = {"hyperparameters": lr(), "searcher": searcher}
    whole = simulated(tmp_path / "whole", config, learning)
    assert whole.run() is RunState.COMPLETED
    broken = simulated(tmp_path / "broken", config, learning)
    chance = random.Random(seed)
    for _ in range(80):
        dying(broken, chance.randrange(6))
    assert broken.run() is RunState.COMPLETED
    assert outcome(broken) == outcome(whole)
    assert all(trial.restarts == 0 for trial in broken.store.trials())


@pytest.mark.timeout(60)
def test_an_experiment_that_cannot_go_on_ends_also_if_its_runner_dies_before(tmp_path: pathlib.Path) -> None:
    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield from ()
        raise ValueError("never")

    searcher = {"name": "random", "metric": "loss", "max_trials": 8}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, pretend, slots=8)
    dying_when(simulation, lambda: simulation.store.control().state is RunState.STOPPING_ERROR)
    assert simulation.store.control().state is RunState.STOPPING_ERROR
    trials = len(simulation.store.trials())
    assert simulation.run() is RunState.ERROR
    assert states(simulation) == {RunState.ERROR: trials}


def test_a_new_runner_goes_on_while_runs_of_the_last_one_still_stop(tmp_path: pathlib.Path) -> None:
    simulation = simulated(tmp_path, FOUR_TRIALS, learning, slots=2)
    dying(simulation, 4)
    simulation.executor.lingering = 1000.0
    with ExperimentStore.open(simulation.home.database, simulation.experiment_id) as people:
        asked(simulation, 5.0, lambda: people.ask(requests={1: TrialRequest.KILL}))
        assert simulation.run() is RunState.COMPLETED
    assert states(simulation) == {RunState.COMPLETED: 3, RunState.CANCELED: 1}
    trials = {trial.id: trial for trial in simulation.store.trials()}
    assert (trials[1].run_id, trials[2].run_id, trials[2].restarts) == (1, 2, 0)
    assert simulation.store.runs(3)[0].started < simulation.store.runs(2)[1].started


@pytest.mark.timeout(60)
def test_trials_go_on_while_the_checkpoint_of_another_one_is_checked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_are_done, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(storage.Manifest, "verify", lambda *_: waited.append(others_are_done.wait(10)))
    failed = set[int]()

    def pretend(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield 1.0, {"loss": 1.0, "batches": 1}
        if not failed:
            failed.add(seed)
            (trial,) = (trial for trial in simulation.store.trials() if trial.seed == seed)
            save(simulation, trial.id, steps=7)
            raise RuntimeError("out of memory")
        if seed not in failed:
            yield 2.0, {"loss": 1.0, "batches": 2}
            others_are_done.set()

    simulation = simulated(tmp_path, FOUR_TRIALS, pretend, slots=2)
    assert simulation.run() is RunState.COMPLETED
    assert waited == [True]
    runs = [run for trial in simulation.store.trials() for run in simulation.store.runs(trial.id)]
    assert [run.started_from_step for run in runs if run.run_id == 2] == [7]


def save(simulation: Simulation, trial_id: int, steps: int) -> None:
    """Put a checkpoint of a trial on record."""
    folder = simulation.home.checkpoints / f"of-trial-{trial_id}"
    folder.mkdir(parents=True)
    storage.Manifest.of(folder, {}).write(folder)
    saved = CheckpointSaved(
        uuid=folder.name, steps_completed=steps, path=str(folder), metadata={}, resources={}, time=1.0
    )
    with TrialWriter.attach(simulation.home.database, simulation.experiment_id, trial_id, 1) as recorder:
        recorder.write([saved])


def asked(simulation: Simulation, after: float, ask: Any) -> None:
    """Let people ask for something at a moment of the simulated time."""
    simulation.executor._at(after, ask)


def test_a_paused_experiment_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 6}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, learning, slots=2)
    asked(simulation, 5.0, lambda: simulation.store.ask(desired=Desired.PAUSED))
    assert simulation.run() is RunState.PAUSED
    assert set(states(simulation)) == {RunState.PAUSED}
    assert not simulation.slots.held
    simulation.store.ask(desired=Desired.ACTIVE)
    assert simulation.run() is RunState.COMPLETED
    assert states(simulation) == {RunState.COMPLETED: 6}


@pytest.mark.parametrize("desired", [Desired.CANCELED, Desired.KILLED])
def test_a_canceled_experiment_creates_no_more_trials(tmp_path: pathlib.Path, desired: Desired) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 100, "max_concurrent_trials": 3}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, learning, slots=2)
    asked(simulation, 5.0, lambda: simulation.store.ask(desired=desired))
    assert simulation.run() is RunState.CANCELED
    assert states(simulation) == {RunState.CANCELED: 3}


def test_one_trial_can_be_killed(tmp_path: pathlib.Path) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 4}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, learning, slots=2)
    asked(simulation, 5.0, lambda: simulation.store.ask(requests={1: TrialRequest.KILL}))
    assert simulation.run() is RunState.COMPLETED
    assert states(simulation) == {RunState.COMPLETED: 3, RunState.CANCELED: 1}


def test_trials_make_room_when_others_need_it_and_go_on_later(tmp_path: pathlib.Path) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 4}
    simulation = simulated(tmp_path, {"hyperparameters": lr(), "searcher": searcher}, learning, slots=4)

    def share(slots: int | None) -> None:
        simulation.slots.allowed = slots
        driver.allowance_at = 0.0

    driver = simulation.driver()
    asked(simulation, 5.0, lambda: share(1))
    asked(simulation, 20.0, lambda: share(None))
    assert driver.run() is RunState.COMPLETED
    assert [trial.run_id for trial in simulation.store.trials()] == [1, 2, 2, 2]
    assert all(trial.restarts == 0 for trial in simulation.store.trials())


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "20m") as made:
        yield made


@contextlib.contextmanager
def after_a_warning(said: str, act: Callable[[], None]) -> Iterator[None]:
    """Do something on another thread when a log of experiments says something."""
    heard = threading.Event()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if said in record.getMessage():
                heard.set()

    def wait() -> None:
        assert heard.wait(60)
        act()

    ear, thread = Ear(), threading.Thread(target=wait)
    logger = logging.getLogger("determined.tracking")
    logger.addHandler(ear)
    thread.start()
    yield
    thread.join()
    logger.removeHandler(ear)


def test_a_runner_waits_for_room_on_a_full_disk(disk: SmallDisk) -> None:
    simulation = simulated(disk.folder, FOUR_TRIALS, learning)
    disk.fill()
    with after_a_warning("Waiting for the", disk.empty):
        assert simulation.run() is RunState.COMPLETED
    assert states(simulation) == {RunState.COMPLETED: 4}
    simulation.executor.close()
    simulation.store.close()


def test_a_runner_that_is_asked_to_leave_does_not_wait_for_room(disk: SmallDisk) -> None:
    simulation = simulated(disk.folder, FOUR_TRIALS, learning)
    driver = simulation.driver()
    disk.fill()
    with (
        after_a_warning("Waiting for the tracking database", driver.leave),
        pytest.raises(errors.TrackingException, match="full"),
    ):
        driver.run()
    simulation.store.close()


def test_a_runner_whose_database_is_deleted_says_so_and_ends(tmp_path: pathlib.Path) -> None:
    def deleting(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
        yield 1.0, {"loss": 1.0, "batches": 1}
        (tmp_path / "tracking.db").unlink(missing_ok=True)
        yield 2.0, {"loss": 1.0, "batches": 2}

    simulation = simulated(tmp_path, FOUR_TRIALS, deleting)
    with pytest.raises(errors.TrackingException, match=r"tracking\.db' was deleted, moved or replaced.*put it back"):
        simulation.run()
    assert not (tmp_path / "tracking.db").exists()
    simulation.executor.close()
    simulation.store.close()
