from __future__ import annotations

import concurrent.futures
import json
import math
import multiprocessing
import os
import pathlib
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from determined import errors, tracking
from determined.tracking import RunState


def report(step: int, group: str = "validation", **metrics: Any) -> tracking.MetricReport:
    return tracking.MetricReport(group=group, steps_completed=step, metrics=metrics, time=100.0 + step)


def saved(uuid: str, step: int = 10) -> tracking.CheckpointSaved:
    return tracking.CheckpointSaved(
        uuid=uuid,
        steps_completed=step,
        path=f"/checkpoints/{uuid}",
        metadata={"format": "pickle"},
        resources={"a.bin": 3, "b.bin": 4},
        time=5.0,
    )


def test_start_records_an_active_experiment_with_one_trial(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    (experiment,) = reader.experiments()
    (trial,) = reader.trials(experiment.id)
    assert (experiment.id, trial.id) == (writer.experiment_id, writer.trial_id)
    assert (experiment.name, experiment.state, trial.state) == ("digits", RunState.ACTIVE, RunState.ACTIVE)
    assert (trial.hparams, trial.seed, trial.git_commit, trial.pid) == ({"lr": 0.1}, 7, "abc123", os.getpid())


@pytest.mark.usefixtures("on_a_file")
def test_only_the_owner_may_read_the_database(writer: tracking.TrialWriter, database: pathlib.Path) -> None:
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    assert stat.S_IMODE(database.parent.stat().st_mode) == 0o700


@pytest.mark.usefixtures("on_a_file")
def test_the_database_is_in_write_ahead_mode(writer: tracking.TrialWriter, database: pathlib.Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_second_run_gets_ids_of_its_own(
    writer: tracking.TrialWriter, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    with tracking.TrialWriter.start(database, describe_run()) as second:
        assert (second.experiment_id, second.trial_id) != (writer.experiment_id, writer.trial_id)


def test_all_kinds_of_messages_go_into_one_write(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write(
        [
            tracking.Continued(checkpoint="before", steps_completed=5, reported_steps=4),
            tracking.SeedChanged(seed=11),
            tracking.StatusChanged(status="validating"),
            tracking.MetadataChanged(metadata={"best": math.inf}),
            tracking.ProgressChanged(progress=0.25),
            report(10, loss=1.0),
            saved("one"),
            tracking.StateChanged(state=RunState.ERROR, time=50.0, reason="no data"),
        ]
    )
    trial = reader.trial(writer.trial_id)
    assert (trial.source_checkpoint, trial.source_steps_completed, trial.seed) == ("before", 5, 11)
    assert (trial.status, trial.metadata, trial.progress) == ("validating", {"best": math.inf}, 0.25)
    assert (trial.state, trial.reason, trial.ended, trial.steps_completed) == (
        RunState.ERROR,
        "no data",
        50.0,
        10,
    )


def test_the_experiment_of_a_local_run_follows_its_trial(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write(
        [
            tracking.ProgressChanged(progress=1.0),
            tracking.StateChanged(state=RunState.COMPLETED, time=9.0),
        ]
    )
    experiment = reader.experiment(writer.experiment_id)
    assert (experiment.state, experiment.progress, experiment.ended) == (RunState.COMPLETED, 1.0, 9.0)


def test_the_last_state_of_a_write_stands(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write(
        [
            tracking.StateChanged(state=RunState.PAUSED, time=1.0),
            tracking.StateChanged(state=RunState.ACTIVE, time=2.0),
        ]
    )
    assert reader.trial(writer.trial_id).state is RunState.ACTIVE


def test_a_deleted_checkpoint_keeps_its_record(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write([saved("one"), saved("two"), tracking.CheckpointDeleted(uuid="one")])
    states = {record.uuid: record.state for record in reader.checkpoints()}
    assert states == {"one": tracking.CheckpointState.DELETED, "two": tracking.CheckpointState.COMPLETED}


@pytest.mark.usefixtures("on_a_file")
def test_a_write_that_fails_leaves_nothing(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    connection = sqlite3.connect(database)
    connection.execute("ALTER TABLE checkpoints RENAME TO aside")
    connection.commit()
    with pytest.raises(errors.TrackingException, match=r"tracking\.db"):
        writer.write([report(1, loss=1.0), saved("one")])
    connection.execute("ALTER TABLE aside RENAME TO checkpoints")
    connection.commit()
    connection.close()
    assert reader.metrics(writer.trial_id) == []


def test_a_checkpoint_that_is_on_record_can_be_recorded_again(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([saved("one")])
    writer.write([report(1, loss=1.0), saved("one")])
    assert [one.uuid for one in reader.checkpoints()] == ["one"]
    assert len(reader.metrics(writer.trial_id)) == 1


def test_writing_no_messages_does_nothing(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write([])
    assert reader.metrics(writer.trial_id) == []


def test_names_that_no_database_takes_are_stored_escaped(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([tracking.StatusChanged(status="a\ud800b\0c")])
    assert reader.trial(writer.trial_id).status == "a\\ud800b\\x00c"


def test_threads_may_share_a_recorder(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda step: writer.write([report(step, loss=0.0)]), range(40)))
    assert [item.steps_completed for item in reader.metrics(writer.trial_id)] == list(range(40))


def test_attach_writes_to_a_recorded_trial(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    with tracking.TrialWriter.attach(database, writer.experiment_id, writer.trial_id) as other:
        other.write([report(3, loss=2.0)])
    assert reader.metrics(writer.trial_id) == [report(3, loss=2.0)]


def test_attach_refuses_a_trial_of_another_experiment(writer: tracking.TrialWriter, database: pathlib.Path) -> None:
    with pytest.raises(errors.TrackingException, match=r"no trial 1 in experiment 99.*det experiment list"):
        tracking.TrialWriter.attach(database, 99, writer.trial_id)


@pytest.mark.usefixtures("on_a_file")
def test_attach_does_not_create_a_database(database: pathlib.Path) -> None:
    with pytest.raises(errors.TrackingException, match=r"tracking\.db"):
        tracking.TrialWriter.attach(database, 1, 1)
    assert not database.exists()


def test_a_closed_recorder_may_be_closed_again(writer: tracking.TrialWriter) -> None:
    writer.close()
    writer.close()


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, 0.5), (False, 3.0)])
def test_best_validation_leaves_out_what_is_not_a_number(
    writer: tracking.TrialWriter, smaller_is_better: bool, best: float
) -> None:
    values = [3.0, math.nan, "low", None, True, 10**400, -(10**400), 0.5]
    writer.write([report(step, loss=value) for step, value in enumerate(values)])
    writer.write([report(9, group="training", loss=-100.0)])
    assert writer.best_validation("loss", smaller_is_better) == best


def test_there_is_no_best_validation_before_the_first(writer: tracking.TrialWriter) -> None:
    assert writer.best_validation("loss", smaller_is_better=True) is None


def test_best_validation_looks_at_its_own_experiment_only(
    writer: tracking.TrialWriter, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    writer.write([report(1, loss=0.1)])
    with tracking.TrialWriter.start(database, describe_run()) as other:
        assert other.best_validation("loss", smaller_is_better=True) is None


@pytest.mark.usefixtures("on_a_file")
def test_the_database_holds_strict_json_only(database: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    odd = {"nan": math.nan, "object": object()}
    with tracking.TrialWriter.start(database, describe_run(config=odd, hparams=odd)) as writer:
        writer.write([report(1, **odd), tracking.MetadataChanged(metadata=odd)])
    with closing(sqlite3.connect(database)) as connection:
        texts = connection.execute(
            "SELECT config, hparams, trials.metadata, metrics.metrics FROM experiments, trials, metrics"
        ).fetchone()
    assert [json.loads(text)["nan"] for text in texts] == ["NaN"] * 4


@pytest.mark.usefixtures("on_a_file")
def test_a_file_that_is_no_database_is_refused_by_name(
    database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    database.parent.mkdir()
    database.write_text("not a database at all, but long enough to have a header " * 10)
    with pytest.raises(errors.TrackingException, match=r"tracking\.db.*DET_HOME"):
        tracking.TrialWriter.start(database, describe_run())


def test_a_folder_that_cannot_be_made_is_refused_by_name(
    tmp_path: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.TrackingException, match=r"tracking\.db.*DET_HOME"):
        tracking.TrialWriter.start(tmp_path / "file" / "tracking.db", describe_run())


def test_a_database_in_memory_is_refused(describe_run: Callable[..., Any]) -> None:
    with pytest.raises(errors.TrackingException, match="path of a file"):
        tracking.TrialWriter.start("sqlite://", describe_run())


@pytest.mark.usefixtures("on_a_file")
def test_a_sqlite_url_means_its_file(database: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    tracking.TrialWriter.start(f"sqlite:///{database}", describe_run()).close()
    assert len(tracking.TrackingReader(database).experiments()) == 1


def test_a_file_name_may_hold_what_means_something_in_a_url(
    tmp_path: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    odd = tmp_path / "what?#%41" / "t.db"
    tracking.TrialWriter.start(odd, describe_run()).close()
    assert odd.exists()
    assert len(tracking.TrackingReader(odd).experiments()) == 1


def _start_and_write(database: pathlib.Path, run: tracking.RunDescription, barrier: Any) -> None:
    barrier.wait(60)
    with tracking.TrialWriter.start(database, run) as writer:
        for step in range(10):
            writer.write([report(step, loss=1.0)])


def test_processes_that_start_at_once_share_a_new_database(
    database: pathlib.Path, describe_run: Callable[..., Any], reader: tracking.TrackingReader
) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    arguments = (database, describe_run(), barrier)
    processes = [context.Process(target=_start_and_write, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert [len(reader.metrics(item.id)) for item in reader.experiments()] == [10] * 4


def test_importing_the_package_does_not_import_sqlalchemy() -> None:
    check = "import sys, determined.tracking; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=120).returncode == 0


def test_every_public_name_can_be_used() -> None:
    assert all(getattr(tracking, name) is not None for name in tracking.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        tracking.nonsense  # noqa: B018 - the access is what raises
