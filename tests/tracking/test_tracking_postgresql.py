"""The same database on a PostgreSQL server."""

from __future__ import annotations

import concurrent.futures
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import driving
import pytest
from driving import add_trials, begin_runs, event, report, saved

from determined import errors, tracking
from determined.tracking import Changeset, Desired, RunState


@pytest.fixture
def url(postgresql_database: str) -> str:
    return postgresql_database


def test_a_local_run_is_recorded(url: str, describe_run: Callable[..., Any]) -> None:
    with tracking.TrialWriter.start(url, describe_run(config={"searcher": {"metric": "loss"}})) as writer:
        writer.write([report(1, loss=1.5), report(1, "training", loss=2.5), saved("local"), saved("gone")])
        writer.write([tracking.CheckpointDeleted(uuid="gone"), tracking.ProgressChanged(progress=0.5)])
        writer.write([tracking.StateChanged(state=RunState.COMPLETED, time=9.0)])
        assert writer.best_validation("loss", smaller_is_better=True) == 1.5
    reader = tracking.TrackingReader(url)
    experiment = reader.experiment(writer.experiment_id)
    assert (experiment.state, experiment.progress, experiment.checkpoint_count) == (RunState.COMPLETED, 0.5, 1)
    assert len(reader.metrics(writer.trial_id)) == 2
    tracking.Catalog(url).change_experiment(experiment.id, archived=True, labels=["x"])
    assert experiment.id not in {one.id for one in reader.experiments()}


def test_an_experiment_is_driven(url: str) -> None:
    with driving.claimed(url) as store, tracking.Slots(url) as slots:
        id = store.experiment_id
        first, second = add_trials(store, 2)
        assert slots.take(id, first, 2, 2) == [0, 1]
        assert slots.take(id, second, 1, 2) is None
        for trial in (first, second):
            with tracking.TrialWriter.attach(url, id, trial, 1) as writer:
                writer.write([report(step, loss=step / trial) for step in (1, 2)])
        begin_runs(store, [second], run_id=2, step=1)
        snapshot = tracking.Snapshot(number=2, state={"a": [1]})
        store.commit(Changeset(events=[event(1), event(2)], snapshot=snapshot))
        store.ask(desired=Desired.PAUSED, requests={first: tracking.TrialRequest.STOP})
        assert store.changed()
        assert [(one.id, one.trial_id) for one in store.validations(1)] == [(2, first), (3, second), (4, second)]
        assert (store.events(), store.snapshot()) == ([event(1), event(2)], snapshot)
        assert (store.control().desired, store.control().requests) == (
            Desired.PAUSED,
            {first: tracking.TrialRequest.STOP},
        )
        best = store.best()
        assert best is not None
        assert best.trial_id == second
        assert [one.run_id for one in store.trials()] == [1, 2]
        assert id in {demand.experiment_id for demand in slots.demands()}
        with pytest.raises(errors.TrackingException, match=r"events \[2\].*do not follow"):
            store.commit(Changeset(events=[event(2)]))
        slots.release(first)
        store.release()
    tracking.Catalog(url).delete_experiment(id)
    with pytest.raises(errors.TrackingException, match=f"no experiment {id}"):
        tracking.ExperimentStore.open(url, id)


def test_models_are_registered(url: str, describe_run: Callable[..., Any]) -> None:
    registry = tracking.Registry(url)
    with tracking.TrialWriter.start(url, describe_run()) as writer:
        writer.write([saved("registered")])
    registry.create_model("digits", labels=["a"], metadata={"b": 1})
    registry.register_version("digits", "registered", comment="good")
    assert [(one.number, one.checkpoint) for one in registry.versions("digits")] == [(1, "registered")]
    assert tracking.TrackingReader(url).registered_checkpoints() == {"registered"}
    registry.delete_model("digits")
    assert registry.models() == []


def test_of_many_who_claim_at_once_one_gets_the_experiment(url: str) -> None:
    with tracking.ExperimentStore.create(url, driving.describe()) as made:
        id = made.experiment_id
    processes = [tracking.RunProcess(pid=number, started=1.0, host="elsewhere") for number in range(1, 7)]

    def claim(process: tracking.RunProcess) -> str:
        with tracking.ExperimentStore.open(url, id) as store:
            try:
                store.claim(process)
            except errors.TrackingException as error:
                return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as threads:
        refusals = sorted(threads.map(claim, processes))
    assert [bool(refusal) for refusal in refusals] == [False, *[True] * 5]
    assert all(f"experiment {id} is run by process" in refusal for refusal in refusals[1:])


def test_a_new_database_is_set_up_once_though_several_begin_with_it_at_once(url: str) -> None:
    count = 8
    start = threading.Barrier(count)

    def open_new(number: int) -> bool:
        start.wait(60)
        if number % 2:
            return tracking.TrackingReader(url).experiments() == []
        with tracking.Slots(url):
            return True

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        assert all(threads.map(open_new, range(count)))
    assert tracking.TrackingReader(url).experiments() == []


def test_a_database_of_an_older_version_is_migrated(url: str, describe_run: Callable[..., Any]) -> None:
    import sqlalchemy as sa

    with driving.claimed(url) as store:
        (id,) = add_trials(store)
        store.ask(requests={id: tracking.TrialRequest.KILL})
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in (
            "ALTER TABLE trials RENAME COLUMN requested TO wish",
            "ALTER TABLE metrics ADD COLUMN checksum BIGINT",
            "ALTER TABLE runners DROP COLUMN alive_until",
            "DROP INDEX metrics_by_run",
            "CREATE INDEX metrics_by_step ON metrics (trial_id, steps_completed)",
            "CREATE TABLE tallies (kind TEXT)",
            "UPDATE schema_version SET version = 4",
        ):
            connection.exec_driver_sql(statement)
    with tracking.ExperimentStore.open(url, 1) as store:
        assert store.control().requests == {id: tracking.TrialRequest.KILL}
    inspected = sa.inspect(engine)
    assert "tallies" not in inspected.get_table_names()
    assert "checksum" not in {column["name"] for column in inspected.get_columns("metrics")}
    indexes = {index["name"] for index in inspected.get_indexes("metrics")}
    assert indexes == {"metrics_by_run", "validations_by_number", "validations_by_score"}
    engine.dispose()


def test_no_slot_is_given_twice(url: str) -> None:
    def take(trial_id: int) -> list[int] | None:
        with tracking.Slots(url, "elsewhere") as slots:
            return slots.take(1, trial_id, 2, 9, driving.elsewhere())

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        found = [slots for slots in threads.map(take, range(100, 106)) if slots is not None]
    taken = [slot for slots in found for slot in slots]
    assert (len(found), len(set(taken))) == (4, 8)


def test_a_runner_sees_every_validation_while_trials_write_at_once(url: str) -> None:
    """Transactions end in another order than they begin."""
    count, writes = 5, 30
    with driving.claimed(url) as store:
        ids = add_trials(store, count)
        start = threading.Barrier(count)

        def train(trial_id: int) -> None:
            with tracking.TrialWriter.attach(url, store.experiment_id, trial_id, 1) as writer:
                start.wait(60)
                for step in range(writes):
                    messages = [report(step, group, loss=1.0) for group in ("training", "validation")]
                    writer.write([*messages, tracking.ProgressChanged(progress=step / writes)])

        seen: list[tracking.Validation] = []
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            working = [threads.submit(train, id) for id in ids]
            while len(seen) < count * writes and not any(one.done() and one.exception() for one in working):
                seen += store.validations(after_id=seen[-1].id if seen else 0)
            for one in working:
                one.result(60)
        assert len({(one.trial_id, one.steps_completed) for one in seen}) == len(seen) == count * writes
        assert [one.id for one in seen] == list(range(1, count * writes + 1))


def test_a_server_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'resolute[postgres]')")
    with pytest.raises(errors.TrackingException, match="cannot be used"):
        tracking.ExperimentStore.open(f"postgresql://tests@/postgres?host={tmp_path}", 1)
