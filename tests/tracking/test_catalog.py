"""What people add to the record, and what they delete from it."""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import driving
import psutil
import pytest
from driving import add_trials, report, saved

from determined import errors, tracking
from determined.tracking import Changeset, RunState


@pytest.fixture
def catalog(database: pathlib.Path) -> tracking.Catalog:
    return tracking.Catalog(database)


def ended(store: tracking.ExperimentStore) -> None:
    """Let an experiment end and its runner go."""
    changes = [tracking.TrialChange(trial_id=one.id, state=RunState.COMPLETED) for one in store.trials()]
    experiment = tracking.ExperimentChange(state=RunState.COMPLETED)
    store.commit(Changeset(trial_changes=changes, experiment_change=experiment))
    store.release()


def test_details_of_a_local_run_can_be_changed(
    writer: tracking.TrialWriter, catalog: tracking.Catalog, reader: tracking.TrackingReader
) -> None:
    details = {"description": "d", "project": "p", "workspace": "w", "notes": "many\nlines"}
    catalog.change_experiment(1, name="n", labels=["x"], **details)
    writer.write([tracking.ProgressChanged(progress=0.5)])
    found = reader.experiment(1)
    assert (found.name, found.description, found.labels, found.notes) == ("n", "d", ("x",), "many\nlines")
    assert (found.project, found.workspace, found.progress) == ("p", "w", 0.5)
    catalog.change_experiment(1, description=None)
    assert (reader.experiment(1).description, reader.experiment(1).name) == (None, "n")


def test_labels_are_added_and_removed_one_by_one(
    writer: tracking.TrialWriter, catalog: tracking.Catalog, reader: tracking.TrackingReader
) -> None:
    for label in ("a", "b", "a"):
        catalog.add_label(1, label)
    assert reader.experiment(1).labels == ("a", "b")
    catalog.remove_label(1, "a")
    assert reader.experiment(1).labels == ("b",)
    with pytest.raises(errors.TrackingException, match="no label 'a'; it has b"):
        catalog.remove_label(1, "a")


def test_archived_experiments_are_listed_on_request_only(
    catalog: tracking.Catalog,
    reader: tracking.TrackingReader,
    database: pathlib.Path,
    describe_run: Callable[..., Any],
) -> None:
    for name in ("first", "second", "third"):
        with tracking.TrialWriter.start(database, describe_run(name=name)) as writer:
            writer.write([tracking.StateChanged(state=RunState.COMPLETED, time=1.0)])
    catalog.change_experiment(3, archived=True)
    assert [one.name for one in reader.experiments(limit=1)] == ["second"]
    assert [one.name for one in reader.experiments(include_archived=True)] == ["third", "second", "first"]
    catalog.change_experiment(3, archived=False)
    assert len(reader.experiments()) == 3


def test_the_metadata_of_a_checkpoint_can_be_changed(
    writer: tracking.TrialWriter, catalog: tracking.Catalog, reader: tracking.TrackingReader
) -> None:
    writer.write([saved("one")])
    catalog.change_checkpoint("one", {"quality": "good"})
    assert reader.checkpoint("one").metadata == {"quality": "good"}
    with pytest.raises(errors.TrackingException, match="no checkpoint 'two'"):
        catalog.change_checkpoint("two", {})


# Deleting


@pytest.mark.usefixtures("on_a_file")
def test_a_deleted_experiment_leaves_nothing_and_the_others_whole(
    store: tracking.ExperimentStore,
    catalog: tracking.Catalog,
    reader: tracking.TrackingReader,
    database: pathlib.Path,
) -> None:
    with driving.claimed(database) as other, tracking.Slots(database) as slots:
        for driven in (store, other):
            (id,) = add_trials(driven)
            slots.take(driven.experiment_id, id, 1, 4)
            driven.commit(Changeset(events=[driving.event(1)], snapshot=tracking.Snapshot(number=1, state={})))
            with tracking.TrialWriter.attach(database, driven.experiment_id, id, 1) as writer:
                messages = [report(1, loss=1.0), saved(f"of {id}"), saved(f"gone {id}")]
                writer.write([*messages, tracking.CheckpointDeleted(uuid=f"gone {id}")])
        ended(store)
        kept = (reader.experiment(2), reader.trials(2), reader.metrics(2), reader.checkpoints(2), other.events())
        catalog.delete_experiment(1)
        assert [one.id for one in reader.experiments()] == [2]
        assert kept == (
            reader.experiment(2), reader.trials(2), reader.metrics(2), reader.checkpoints(2), other.events()
        )  # fmt: skip
        assert [one.uuid for one in reader.checkpoints()] == ["of 2", "gone 2"]
        with pytest.raises(errors.TrackingException, match="no experiment 1"):
            reader.experiment(1)
        with closing(sqlite3.connect(database)) as connection:
            tables = ("trials", "metrics", "checkpoints", "events", "snapshots", "runs", "runners", "leases")
            counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
        assert counts == [1, 1, 2, 1, 1, 1, 1, 1]


def test_the_ids_of_a_deleted_experiment_do_not_come_back(
    store: tracking.ExperimentStore, catalog: tracking.Catalog, database: pathlib.Path
) -> None:
    add_trials(store, 3)
    ended(store)
    catalog.delete_experiment(1)
    with driving.claimed(database) as other:
        assert (other.experiment_id, add_trials(other)) == (2, [4])


@pytest.mark.parametrize("doing", ["deleted", "archived"])
def test_an_experiment_that_somebody_is_at_work_on_stays(
    doing: str, store: tracking.ExperimentStore, catalog: tracking.Catalog, reader: tracking.TrackingReader
) -> None:
    def act(**options: Any) -> None:
        if doing == "deleted":
            catalog.delete_experiment(1, **options)
        else:
            catalog.change_experiment(1, archived=True)

    with pytest.raises(errors.TrackingException, match=rf"be {doing}: process \d+ is at work.*experiment kill 1"):
        act()
    store.claim(driving.elsewhere(), force=True)
    with pytest.raises(errors.TrackingException, match=rf"{doing}: process 4242 on 'elsewhere' may be.*force=True"):
        act()
    store.claim(driving.ended_process(), force=True)
    act()
    assert reader.experiments() == []


def test_force_deletes_what_another_host_may_be_at_work_on(
    store: tracking.ExperimentStore, catalog: tracking.Catalog, reader: tracking.TrackingReader
) -> None:
    store.claim(driving.elsewhere(), force=True)
    catalog.delete_experiment(1, force=True)
    assert reader.experiments(include_archived=True) == []


def test_a_trial_that_outlives_its_runner_keeps_its_experiment(
    store: tracking.ExperimentStore, catalog: tracking.Catalog, living: tracking.RunProcess
) -> None:
    (id,) = add_trials(store)
    store.commit(Changeset(trial_changes=[tracking.TrialChange(trial_id=id, handle=living.to_json())]))
    store.release()
    with pytest.raises(errors.TrackingException, match=f"process {living.pid} is at work"):
        catalog.delete_experiment(1)


def test_a_local_run_at_work_stays(writer: tracking.TrialWriter, catalog: tracking.Catalog) -> None:
    with pytest.raises(errors.TrackingException, match="cannot be deleted"):
        catalog.delete_experiment(1)
    writer.write([tracking.StateChanged(state=RunState.COMPLETED, time=1.0)])
    catalog.delete_experiment(1)


def test_a_local_run_at_work_stays_after_a_step_of_the_clock(
    database: pathlib.Path, describe_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, boot_time = tracking.RunProcess.current(), psutil.boot_time()
    assert process.identity is not None
    tracking.TrialWriter.start(database, describe_run(identity=process.identity.to_json())).close()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    with pytest.raises(errors.TrackingException, match=f"process {process.pid} is at work"):
        tracking.Catalog(database).delete_experiment(1)


def test_an_experiment_with_a_registered_checkpoint_stays(
    store: tracking.ExperimentStore, catalog: tracking.Catalog, database: pathlib.Path
) -> None:
    (id,) = add_trials(store)
    with tracking.TrialWriter.attach(database, 1, id, 1) as writer:
        writer.write([saved("one")])
    ended(store)
    registry = tracking.Registry(database)
    registry.create_model("digits")
    registry.register_version("digits", "one")
    with pytest.raises(errors.TrackingException, match="version 1 of model 'digits'; delete that version first"):
        catalog.delete_experiment(1)
    registry.delete_version("digits", 1)
    catalog.delete_experiment(1)


# Where trials are to start from


def test_checkpoints_that_a_running_experiment_is_to_start_from_are_told(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    messages = [saved("old", step=1), saved("new", step=2), saved("newest", step=3), saved("other", step=9)]
    writer.write([*messages, tracking.CheckpointDeleted(uuid="newest"), tracking.CheckpointDeleted(uuid="other")])
    searchers = [{"source_checkpoint_uuid": "abcd"}, {"source_trial_id": 1}, {"source_trial_id": 99}, {}]
    ledgers = [driving.claimed(database, config={"searcher": searcher}) for searcher in searchers]
    assert reader.experiment_sources() == {"abcd", "new"}
    ended(ledgers[0])
    assert reader.experiment_sources() == {"new"}
    for store in ledgers:
        store.close()


def test_there_are_no_sources_where_there_is_no_database(reader: tracking.TrackingReader) -> None:
    assert reader.experiment_sources() == set()
    assert reader.registered_checkpoints() == set()
