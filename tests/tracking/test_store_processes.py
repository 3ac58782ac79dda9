"""Several processes at one experiment: runners, trials, and those that are killed."""

from __future__ import annotations

import itertools
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable

import driving
import pytest
from contenders import WRITES, answers, go, in_processes, started

from determined import tracking

pytestmark = pytest.mark.process

TRIALS = 8


def test_of_runners_that_start_at_once_one_gets_the_experiment(database: pathlib.Path) -> None:
    tracking.ExperimentStore.create(database, driving.describe()).close()
    found = in_processes(3, "claim", database)
    winners = [pid for pid, refusal in found if not refusal]
    assert len(winners) == 1
    refusals = [refusal for _, refusal in found if refusal]
    assert all(f"experiment 1 is run by process {winners[0]} " in refusal for refusal in refusals)
    with tracking.ExperimentStore.open(database, 1) as store:
        store.claim()  # the claim has died with its holder


@pytest.mark.thorough
def test_runners_that_take_over_from_each_other_store_each_event_once(database: pathlib.Path) -> None:
    tracking.ExperimentStore.create(database, driving.describe()).close()
    found = in_processes(3, "append", database)
    with tracking.ExperimentStore.open(database, 1) as store:
        events = store.events()
    stored = {number: f"of {runner}" for runner, numbers in enumerate(found) for number in numbers}
    assert sum(map(len, found)) == len(stored), "no number was given to two"
    assert {event.number: event.request_id for event in events} == stored


def test_no_slot_is_given_to_two_trials(database: pathlib.Path) -> None:
    tracking.ExperimentStore.create(database, driving.describe()).close()
    found = [slots for slots in in_processes(4, "take", database) if slots is not None]
    taken = list(itertools.chain.from_iterable(found))
    assert len(found) == 3, "all but one odd slot are in use"
    assert len(set(taken)) == 6
    assert set(taken) <= set(range(7))


# Killed in the middle

RUNNER = """
import sys
sys.path.insert(0, sys.argv[1])
import driving
from determined import tracking

with tracking.ExperimentStore.open(sys.argv[2], 1) as store:
    store.claim()
    done = len(store.trials())
    while True:
        done += 1
        store.commit(tracking.Changeset(
            events=[driving.event(2 * done - 1), driving.event(2 * done)],
            snapshot=tracking.Snapshot(number=2 * done, state={"done": done, "filling": "x" * 20_000}),
            new_trials=[driving.new_trial(f"request {done}")],
            trial_changes=[tracking.TrialChange(trial_id=done - 1, run_id=1)] if done > 1 else [],
            experiment_change=tracking.ExperimentChange(progress=done / 1000, wanted_slots=done),
        ))
        print(done, flush=True)
"""


def kill_after(database: pathlib.Path, turns: int, delay: float) -> int:
    """Kill a runner some time after so many turns that it says are stored; returns how many it said in all."""
    command = [sys.executable, "-c", RUNNER, str(pathlib.Path(__file__).parent), str(database)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = [int(process.stdout.readline()) for _ in range(turns)]
            with pytest.raises(subprocess.TimeoutExpired):  # it is somewhere within a turn then
                process.wait(delay)
        finally:
            process.kill()
        said += map(int, process.stdout.read().split())
    return said[-1]


@pytest.mark.usefixtures("on_a_file")
def test_of_a_turn_in_which_the_runner_is_killed_all_or_nothing_is_stored(database: pathlib.Path) -> None:
    tracking.ExperimentStore.create(database, driving.describe()).close()
    moments = random.Random(5)
    for _ in range(5):
        said = kill_after(database, turns=moments.randrange(1, 4), delay=moments.uniform(0.0001, 0.01))
        with tracking.ExperimentStore.open(database, 1) as store:
            trials, events, snapshot = store.trials(), store.events(), store.snapshot()
        done = len(trials)
        assert said <= done <= said + 1, "what it said is stored, and at most the turn that it could not tell of"
        assert [event.number for event in events] == list(range(1, 2 * done + 1))
        assert snapshot is not None
        assert (snapshot.number, snapshot.state["done"]) == (2 * done, done)
        assert [trial.run_id for trial in trials] == [1] * (done - 1) + [0]
        assert tracking.TrackingReader(database).experiment(1).progress == done / 1000


# Many at once


@pytest.mark.thorough
def test_eight_trials_a_runner_and_a_page_do_not_disturb_each_other(database: pathlib.Path) -> None:
    with driving.claimed(database) as store:
        ids = driving.add_trials(store, TRIALS)
        store.release()
    with (
        started(TRIALS, "train", database) as trials,
        started(1, "run", database, TRIALS) as runner,
        started(1, "watch", database, TRIALS) as page,
    ):
        go([*runner, *page, *trials])
        acknowledged = answers(trials)
        assert min(answers([*runner, *page])) > 0
    reader = tracking.TrackingReader(database)
    assert [len(reader.metrics(id)) for id in ids] == acknowledged
    with tracking.ExperimentStore.open(database, 1) as store:
        decided = [(event.payload["trial"], event.payload["step"]) for event in store.events()]
        assert decided == [(one.trial_id, one.steps_completed) for one in store.validations()]
    assert len(decided) == len(set(decided)) == TRIALS * WRITES


@pytest.mark.usefixtures("on_a_file")
def test_a_log_that_is_in_use_is_not_read_again(database: pathlib.Path, store: tracking.ExperimentStore) -> None:
    """Reading it takes long, and who has it open has read it."""
    driving.add_trials(store, 3)
    log = pathlib.Path(f"{database}-wal")
    whole = log.read_bytes()
    log.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    with tracking.ExperimentStore.open(database, 1) as other:
        assert len(other.trials()) == 3
    log.write_bytes(whole)


# Pids that belong to others now


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("gone", [driving.ended_process, driving.reused_pid])
def test_a_process_with_the_pid_of_one_on_record_is_not_signalled(
    gone: Callable[[], tracking.RunProcess], database: pathlib.Path
) -> None:
    caught: list[int] = []
    before = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in SIGNALS}
    try:
        with tracking.ExperimentStore.create(database, driving.describe()) as store, tracking.Slots(database) as slots:
            store.claim(gone())
            slots.take(1, 1, 1, 1, gone())
            tracking.Catalog(database).change_experiment(1, archived=True)
            store.claim()
            assert slots.take(1, 2, 1, 1) == [0]
            assert slots.demands()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught == []
