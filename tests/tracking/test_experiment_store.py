"""The store of a managed experiment: what its runner stores and reads."""

from __future__ import annotations

import concurrent.futures
import pathlib
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import driving
import pytest
from driving import add_trials, event, new_trial, report

from determined import errors, tracking
from determined.tracking import Changeset, Desired, RunState

# Making and opening


def test_a_new_experiment_is_active_and_has_no_trials(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    experiment = reader.experiment(store.experiment_id)
    assert (experiment.name, experiment.config, experiment.is_local) == ("search", driving.CONFIG, False)
    assert (experiment.state, experiment.progress, experiment.trial_count) == (RunState.ACTIVE, 0.0, 0)
    assert store.trials() == []
    assert store.events() == []
    assert store.snapshot() is None


def test_an_experiment_is_created_with_its_details(database: pathlib.Path, reader: tracking.TrackingReader) -> None:
    details = {"description": "why", "labels": ["a", "b"], "project": "p", "workspace": "w", "priority": 5}
    with tracking.ExperimentStore.create(
        database, driving.describe(**details, max_slots=3, desired=Desired.PAUSED)
    ) as store:
        experiment = reader.experiment(store.experiment_id)
    assert (experiment.description, experiment.labels) == ("why", ("a", "b"))
    assert (experiment.project, experiment.workspace) == ("p", "w")
    assert (experiment.priority, experiment.max_slots) == (5, 3)
    assert (experiment.desired, experiment.state) == (Desired.PAUSED, RunState.PAUSED)


def test_opening_an_experiment_gives_what_is_stored(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    store.commit(Changeset(events=[event(1)], new_trials=[new_trial("a")]))
    with tracking.ExperimentStore.open(database, store.experiment_id) as other:
        assert other.events() == [event(1)]
        assert [trial.request_id for trial in other.trials()] == ["a"]


@pytest.mark.parametrize(
    ("id", "said"), [(99, "no experiment 99.*det experiment list"), (1, "run of a script.*det experiment create")]
)
def test_only_driven_experiments_on_record_have_a_ledger(
    id: int, said: str, writer: tracking.TrialWriter, database: pathlib.Path
) -> None:
    with pytest.raises(errors.TrackingException, match=said):
        tracking.ExperimentStore.open(database, id)


@pytest.mark.usefixtures("on_a_file")
def test_opening_does_not_create_a_database(database: pathlib.Path) -> None:
    with pytest.raises(errors.TrackingException, match=r"tracking\.db"):
        tracking.ExperimentStore.open(database, 1)
    assert not database.exists()


# Claiming


def test_a_claimed_experiment_names_its_runner(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    here = tracking.RunProcess.current()
    assert store.runner() == here
    assert reader.experiment(1).runner == here


def test_a_second_runner_is_refused_by_the_pid_of_the_first(
    database: pathlib.Path, living: tracking.RunProcess
) -> None:
    first = tracking.ExperimentStore.create(database, driving.describe())
    first.claim(living)
    with (
        tracking.ExperimentStore.open(database, 1) as second,
        pytest.raises(errors.TrackingException, match=rf"experiment 1 is run by process {living.pid} .*pause"),
    ):
        second.claim()
    assert first.runner() == living
    first.close()


@pytest.mark.parametrize("gone", [driving.ended_process, driving.reused_pid])
def test_a_runner_that_is_gone_is_replaced(gone: Callable[[], tracking.RunProcess], database: pathlib.Path) -> None:
    with tracking.ExperimentStore.create(database, driving.describe()) as store:
        store.claim(gone())
        store.claim()
        assert store.runner() == tracking.RunProcess.current()


def test_a_runner_elsewhere_is_replaced_by_force_only(database: pathlib.Path) -> None:
    with tracking.ExperimentStore.create(database, driving.describe()) as store:
        store.claim(driving.elsewhere())
        with pytest.raises(errors.TrackingException, match=r"process 4242 on 'elsewhere'.*force=True"):
            store.claim()
        store.claim(force=True)
        assert store.runner() == tracking.RunProcess.current()


def test_claiming_twice_is_fine(store: tracking.ExperimentStore) -> None:
    store.claim()
    store.commit(Changeset(events=[event(1)]))


def test_a_released_experiment_can_be_claimed_by_others(
    store: tracking.ExperimentStore, database: pathlib.Path, living: tracking.RunProcess
) -> None:
    store.release()
    assert store.runner() is None
    with tracking.ExperimentStore.open(database, 1) as other:
        other.claim(living)
        store.release()
        assert other.runner() == living, "the release of one who runs it no more does not concern the others"


def test_without_a_claim_nothing_is_stored(database: pathlib.Path) -> None:
    with tracking.ExperimentStore.create(database, driving.describe()) as store:
        with pytest.raises(errors.TrackingException, match=r"has not claimed experiment 1; call claim\(\)"):
            store.commit(Changeset(events=[event(1)]))
        assert store.events() == []


def test_a_runner_that_was_replaced_cannot_store_any_more(
    store: tracking.ExperimentStore, database: pathlib.Path, living: tracking.RunProcess
) -> None:
    with tracking.ExperimentStore.open(database, 1) as other:
        other.claim(living, force=True)
    with pytest.raises(errors.TrackingException, match=rf"no longer run by process \d+: process {living.pid} on"):
        store.commit(Changeset(events=[event(1)], new_trials=[new_trial("a")]))
    assert (store.events(), store.trials()) == ([], [])


def test_an_experiment_is_lost_when_its_runner_is_gone(
    store: tracking.ExperimentStore, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    add_trials(store)
    assert not reader.experiment(1).is_lost
    assert not reader.trial(1).is_lost
    store.claim(driving.ended_process(), force=True)
    assert reader.experiment(1).is_lost
    assert reader.trial(1).is_lost


def test_a_trial_whose_process_lives_is_not_lost_with_its_runner(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader, living: tracking.RunProcess
) -> None:
    add_trials(store)
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=1, handle=living.to_json())]))
    store.claim(driving.ended_process(), force=True)
    assert not reader.trial(1).is_lost


# Turns


def test_all_of_a_turn_is_stored(store: tracking.ExperimentStore, reader: tracking.TrackingReader) -> None:
    first = store.commit(Changeset(new_trials=[new_trial("a")]))
    process = tracking.RunProcess.current()
    second = store.commit(
        Changeset(
            events=[event(1, "a", metric=0.5), event(2, "b")],
            snapshot=tracking.Snapshot(number=2, state={"rungs": [1, 2]}),
            new_trials=[new_trial("b", hparams={"lr": 0.2}, seed=9, state=RunState.PAUSED), new_trial("c")],
            trial_changes=[tracking.TrialChange(trial_id=first[0], run_id=1, restarts=2, handle=process.to_json())],
            experiment_change=tracking.ExperimentChange(progress=0.25, wanted_slots=4),
        )
    )
    assert (first, second) == ([1], [2, 3])
    assert store.events() == [event(1, "a", metric=0.5), event(2, "b")]
    assert store.snapshot() == tracking.Snapshot(number=2, state={"rungs": [1, 2]})
    one, two, _ = store.trials()
    assert (one.run_id, one.restarts, one.process, one.state) == (1, 2, process, RunState.ACTIVE)
    assert (two.request_id, two.hparams, two.seed, two.state) == ("b", {"lr": 0.2}, 9, RunState.PAUSED)
    assert (two.run_id, two.restarts, two.process) == (0, 0, None)
    assert reader.experiment(1).progress == 0.25


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (Changeset(events=[event(3)]), r"events \[3\].*do not follow"),
        (Changeset(events=[event(1)]), r"events \[1\].*do not follow"),
        (Changeset(events=[event(2), event(4)]), r"events \[2, 4\].*do not follow"),
        (Changeset(new_trials=[new_trial("a")]), "cannot be used"),
        (
            Changeset(trial_changes=[tracking.TrialChange(trial_id=1, run_id=3)]),
            r"run 3 of trial 1.*last.* is 1.*run 2",
        ),
        (Changeset(trial_changes=[tracking.TrialChange(trial_id=1, run_id=1)]), "run 1 of trial 1 cannot begin"),
        (Changeset(trial_changes=[tracking.TrialChange(trial_id=99, restarts=1)]), "trial 99 cannot be changed"),
    ],
)
def test_a_turn_that_fails_leaves_nothing(turn: Changeset, said: str, store: tracking.ExperimentStore) -> None:
    store.commit(Changeset(events=[event(1)], new_trials=[new_trial("a")]))
    driving.begin_runs(store, [1])
    before = store.trials()
    whole = Changeset(
        events=turn.events or [event(2)],
        snapshot=tracking.Snapshot(number=2, state={}),
        new_trials=[new_trial("b"), *turn.new_trials],
        trial_changes=[tracking.TrialChange(trial_id=1, state=RunState.ERROR), *turn.trial_changes],
        experiment_change=tracking.ExperimentChange(state=RunState.ERROR),
    )
    with pytest.raises(errors.TrackingException, match=said):
        store.commit(whole)
    assert (store.events(), store.trials(), store.snapshot()) == ([event(1)], before, None)
    assert store.control().state is RunState.ACTIVE
    (id,) = store.commit(Changeset(events=[event(2)], new_trials=[new_trial("b")]))
    assert [one.id for one in store.trials()] == [1, id]


def test_two_who_run_it_cannot_both_go_on(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    with tracking.ExperimentStore.open(database, 1) as second:
        second.claim()  # as the same process
        store.commit(Changeset(events=[event(1, "first")]))
        with pytest.raises(errors.TrackingException, match=r"events \[1\].*another runner has stored some meanwhile"):
            second.commit(Changeset(events=[event(1, "second")]))
    assert [one.request_id for one in store.events()] == ["first"]


def test_events_can_be_read_from_a_number_on(store: tracking.ExperimentStore) -> None:
    store.commit(Changeset(events=[event(1), event(2)]))
    store.commit(Changeset(events=[event(3)]))
    assert [one.number for one in store.events(after=1)] == [2, 3]
    assert store.events(after=3) == []


def test_the_newest_snapshot_is_kept(store: tracking.ExperimentStore) -> None:
    for number in (0, 5):
        store.commit(Changeset(snapshot=tracking.Snapshot(number=number, state={"n": number})))
    assert store.snapshot() == tracking.Snapshot(number=5, state={"n": 5})


def test_a_final_state_ends_a_trial_and_another_one_undoes_that(store: tracking.ExperimentStore) -> None:
    add_trials(store, 2)
    changes = [
        tracking.TrialChange(trial_id=1, state=RunState.COMPLETED, reason="done", ended=7.0),
        tracking.TrialChange(trial_id=2, state=RunState.ERROR),
    ]
    store.commit(Changeset(trial_changes=changes))
    one, two = store.trials()
    assert (one.state, one.reason, one.ended) == (RunState.COMPLETED, "done", 7.0)
    assert two.ended is not None
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=1, state=RunState.ACTIVE)]))
    assert store.trials()[0].ended is None


def test_what_a_change_does_not_name_stays(store: tracking.ExperimentStore) -> None:
    add_trials(store)
    process = tracking.RunProcess.current()
    store.commit(
        Changeset(trial_changes=[tracking.TrialChange(trial_id=1, handle=process.to_json(), reason="r", restarts=1)])
    )
    (before,) = store.trials()
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=1)]))
    assert store.trials() == [before]


def test_an_experiment_ends_with_a_final_state(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    change = tracking.ExperimentChange(state=RunState.COMPLETED, progress=1.0, ended=9.0)
    store.commit(Changeset(experiment_change=change))
    experiment = reader.experiment(1)
    assert (experiment.state, experiment.progress, experiment.ended) == (RunState.COMPLETED, 1.0, 9.0)


def test_a_run_is_recorded_from_its_start_to_its_end(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    (id,) = add_trials(store, run=False)
    process = tracking.RunProcess.current()
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=id, run_id=1, started_from_step=5)]))
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=id, handle=process.to_json())]))
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=id, run_ended=9.0, run_reason="exit code 1")]))
    (run,) = store.runs(id)
    assert (run.run_id, run.process, run.started_from_step, run.reported_steps) == (1, process, 5, 5)
    assert (run.ended, run.reason, run.outcome) == (9.0, "exit code 1", None)
    assert reader.runs(id) == [run]


def test_the_handle_of_any_executor_comes_back_as_it_was(store: tracking.ExperimentStore) -> None:
    add_trials(store)
    handle = {"actor": "run-1.1", "nodes": ["a", {"b": 2}], "attempt": 3}
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=1, handle=handle)]))
    (run,) = store.runs(1)
    assert (run.handle, run.process, store.trials()[0].process) == (handle, None, None)


def test_a_new_run_has_no_process_until_it_is_told(store: tracking.ExperimentStore) -> None:
    add_trials(store)
    store.commit(
        Changeset(trial_changes=[tracking.TrialChange(trial_id=1, handle=tracking.RunProcess.current().to_json())])
    )
    driving.begin_runs(store, [1], run_id=2)
    assert store.trials()[0].process is None
    assert [run.process is None for run in store.runs(1)] == [False, True]


# Validations


def test_validations_of_all_trials_come_once_in_the_order_of_their_storing(
    store: tracking.ExperimentStore, database: pathlib.Path
) -> None:
    for id in add_trials(store, 2):
        with tracking.TrialWriter.attach(database, 1, id, 1) as writer:
            writer.write([report(1, "training", loss=9.0), report(1, loss=1.0), report(2, loss=id)])
    first = store.validations(limit=3)
    assert [(one.id, one.trial_id, one.run_id, one.steps_completed) for one in first] == [
        (1, 1, 1, 1),
        (2, 1, 1, 2),
        (3, 2, 1, 1),
    ]
    (rest,) = store.validations(after_id=first[-1].id)
    assert (rest.trial_id, rest.metrics, rest.time) == (2, {"loss": 2}, 102.0)
    assert store.validations(after_id=rest.id) == []


def test_validations_of_other_experiments_are_not_seen(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    with driving.claimed(database) as other:
        (id,) = add_trials(other)
        with tracking.TrialWriter.attach(database, other.experiment_id, id, 1) as writer:
            writer.write([report(1, loss=1.0)])
    assert store.validations() == []


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, (2, 0.5)), (False, (1, 3.0))])
def test_the_best_validation_is_by_the_metric_of_the_search(
    smaller_is_better: bool, best: tuple[int, float], database: pathlib.Path
) -> None:
    config = {"searcher": {"metric": "loss", "smaller_is_better": smaller_is_better}}
    with driving.claimed(database, config=config) as store:
        assert store.best() is None
        values = [[3.0, float("nan"), "low", None, True], [2.0, 0.5, 10**400]]
        for id, of_trial in zip(add_trials(store, 2), values, strict=True):
            with tracking.TrialWriter.attach(database, 1, id, 1) as writer:
                writer.write([report(step, loss=value, other=-1.0) for step, value in enumerate(of_trial)])
                writer.write([report(9, "training", loss=-100.0)])
        found = store.best()
    assert found is not None
    assert (found.trial_id, found.metrics["loss"]) == best


# What people want


def test_what_people_ask_for_is_what_the_runner_sees(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    ids = add_trials(store, 3)
    with tracking.ExperimentStore.open(database, 1) as people:
        people.ask(desired=Desired.PAUSED, max_slots=2, priority=10)
        people.ask(requests={ids[0]: tracking.TrialRequest.STOP, ids[2]: tracking.TrialRequest.KILL})
    control = store.control()
    assert (control.desired, control.max_slots, control.priority) == (Desired.PAUSED, 2, 10)
    assert control.requests == {ids[0]: tracking.TrialRequest.STOP, ids[2]: tracking.TrialRequest.KILL}
    assert [trial.requested for trial in store.trials()] == [
        tracking.TrialRequest.STOP,
        None,
        tracking.TrialRequest.KILL,
    ]


def test_a_limit_can_be_lifted_and_the_rest_stays(database: pathlib.Path) -> None:
    with tracking.ExperimentStore.create(database, driving.describe(max_slots=2, priority=10)) as store:
        store.ask(max_slots=None)
        control = store.control()
        assert (control.max_slots, control.priority, control.desired) == (None, 10, Desired.ACTIVE)


def test_a_request_that_was_met_is_cleared(store: tracking.ExperimentStore) -> None:
    (id,) = add_trials(store)
    store.ask(requests={id: tracking.TrialRequest.STOP})
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=id, clears_request=True)]))
    assert store.control().requests == {}


def test_an_experiment_that_ends_cannot_be_made_to_go_on(store: tracking.ExperimentStore) -> None:
    store.ask(desired=Desired.CANCELED)
    for desired in (Desired.ACTIVE, Desired.PAUSED):
        with pytest.raises(errors.TrackingException, match=rf"become {desired}: it is to end as CANCELED"):
            store.ask(desired=desired)
    store.ask(desired=Desired.KILLED)
    with pytest.raises(errors.TrackingException, match="to end as KILLED"):
        store.ask(desired=Desired.CANCELED)


def test_nothing_can_be_wanted_of_what_has_ended(store: tracking.ExperimentStore) -> None:
    (id,) = add_trials(store)
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=id, state=RunState.COMPLETED)]))
    with pytest.raises(errors.TrackingException, match=r"trial 1 cannot kill: it has ended \(COMPLETED\)"):
        store.ask(desired=Desired.PAUSED, requests={id: tracking.TrialRequest.KILL})
    assert store.control().desired is Desired.ACTIVE, "all of it or nothing"
    store.commit(Changeset(experiment_change=tracking.ExperimentChange(state=RunState.COMPLETED)))
    with pytest.raises(errors.TrackingException, match=r"has ended \(COMPLETED\); `det experiment continue 1`"):
        store.ask(desired=Desired.KILLED)


def test_a_request_for_a_trial_of_another_experiment_is_refused(
    store: tracking.ExperimentStore, database: pathlib.Path
) -> None:
    with driving.claimed(database) as other:
        (id,) = add_trials(other)
    with pytest.raises(errors.TrackingException, match=f"no trial {id} in experiment 1"):
        store.ask(requests={id: tracking.TrialRequest.STOP})


def test_an_ended_experiment_can_be_begun_anew(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    store.ask(desired=Desired.CANCELED)
    store.commit(Changeset(experiment_change=tracking.ExperimentChange(state=RunState.CANCELED)))
    again = tracking.ExperimentChange(state=RunState.ACTIVE, desired=Desired.ACTIVE)
    store.commit(Changeset(experiment_change=again))
    experiment = reader.experiment(1)
    assert (experiment.state, experiment.desired, experiment.ended) == (RunState.ACTIVE, Desired.ACTIVE, None)


def test_an_experiment_can_go_on_with_another_config_but_the_same_metric(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    longer = {"searcher": {**driving.CONFIG["searcher"], "max_length": 9}}
    store.commit(Changeset(experiment_change=tracking.ExperimentChange(config=longer)))
    assert reader.experiment(1).config == longer
    other = tracking.ExperimentChange(config={"searcher": {"metric": "accuracy"}})
    with pytest.raises(errors.TrackingException, match=r"by 'loss' and cannot go on by 'accuracy'.*new experiment"):
        store.commit(Changeset(experiment_change=other))
    assert reader.experiment(1).config == longer


# Noticing changes


def test_what_others_store_is_noticed_once(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    (id,) = add_trials(store)
    assert store.changed(), "at first, everything is new"
    assert not store.changed()
    with tracking.TrialWriter.attach(database, 1, id, 1) as writer:
        writer.write([report(1, loss=1.0)])
        assert store.changed()
        assert not store.changed()


@pytest.mark.usefixtures("on_a_file")
def test_what_the_ledger_stores_itself_is_not_noticed(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    store.changed()
    store.commit(Changeset(events=[event(1)]))
    store.ask(priority=3)
    assert not store.changed()
    with tracking.ExperimentStore.open(database, 1) as other:
        other.ask(desired=Desired.PAUSED)
    store.commit(Changeset(events=[event(2)]))
    assert store.changed(), "what came before an own write counts"


@pytest.mark.usefixtures("on_a_file")
def test_what_threads_store_through_the_ledger_is_its_own(store: tracking.ExperimentStore) -> None:
    store.changed()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: store.ask(priority=number), range(1, 21)))
    assert not store.changed()


@pytest.mark.usefixtures("on_a_file")
def test_waiting_for_changes_does_not_keep_the_log_from_being_emptied(
    store: tracking.ExperimentStore, database: pathlib.Path
) -> None:
    (id,) = add_trials(store)
    with (
        tracking.TrialWriter.attach(database, 1, id, 1) as writer,
        closing(sqlite3.connect(database, isolation_level=None)) as other,
    ):
        for step in range(3):
            store.changed()
            writer.write([report(step, loss=1.0)])
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        assert pathlib.Path(f"{database}-wal").stat().st_size == 0


def test_a_runner_on_another_host_has_that_name(database: pathlib.Path) -> None:
    with tracking.ExperimentStore.create(database, driving.describe()) as store:
        store.claim(driving.elsewhere())
        runner = store.runner()
    assert runner is not None
    assert not runner.is_here
    assert not runner.is_gone
    assert tracking.RunProcess.current().host == socket.gethostname()


def test_numbers_that_no_database_takes_are_refused(store: tracking.ExperimentStore) -> None:
    with pytest.raises(errors.TrackingException, match=r"smaller number|there is no trial"):
        store.runs(2**70)


def anything(**changes: Any) -> tracking.SearchEvent:
    return event(1, "a\ud800\0b", **changes)


def test_events_hold_any_text_and_number(store: tracking.ExperimentStore) -> None:
    payload = {"nan": float("nan"), "inf": float("inf"), "text": "\ud800é😀\0", "list": [1, None]}
    store.commit(Changeset(events=[anything(**payload)]))
    (found,) = store.events()
    assert found.request_id == "a\\ud800\\x00b"
    assert repr(found.payload) == repr(payload)


# The three kinds of errors


def test_what_others_or_the_state_do_not_allow_is_a_conflict(
    store: tracking.ExperimentStore, database: pathlib.Path, living: tracking.RunProcess
) -> None:
    with tracking.ExperimentStore.open(database, 1) as other:
        store.claim(living, force=True)
        with pytest.raises(errors.ConflictException, match="is run by process"):
            other.claim()
    store.claim(force=True)
    store.commit(Changeset(experiment_change=tracking.ExperimentChange(state=RunState.COMPLETED)))
    with pytest.raises(errors.ConflictException, match="it has ended"):
        store.ask(desired=Desired.PAUSED)


def test_what_does_not_exist_or_makes_no_sense_is_an_invalid_request(
    store: tracking.ExperimentStore, database: pathlib.Path
) -> None:
    with pytest.raises(errors.NotOnRecordException, match="no experiment 99"):
        tracking.ExperimentStore.open(database, 99)
    with pytest.raises(errors.InvalidRequestException, match="max_slots=0"):
        store.ask(max_slots=0)
    assert issubclass(errors.NotOnRecordException, errors.InvalidRequestException)


@pytest.mark.usefixtures("on_a_file")
def test_a_database_that_is_gone_is_its_own_kind(store: tracking.ExperimentStore, database: pathlib.Path) -> None:
    database.rename(database.with_name("elsewhere.db"))
    with pytest.raises(errors.DatabaseException, match="deleted, moved or replaced"):
        store.ask(priority=1)
    kinds = (errors.DatabaseException, errors.ConflictException, errors.InvalidRequestException)
    assert all(issubclass(kind, errors.TrackingException) for kind in kinds)
