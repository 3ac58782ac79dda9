from __future__ import annotations

import math
import pathlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import driving
import psutil
import pytest

from determined import errors, tracking
from determined.tracking import RunState


def report(step: int, group: str = "validation", **metrics: Any) -> tracking.MetricReport:
    return tracking.MetricReport(group=group, steps_completed=step, metrics=metrics, time=100.0)


def saved(uuid: str) -> tracking.CheckpointSaved:
    return tracking.CheckpointSaved(
        uuid=uuid,
        steps_completed=10,
        path=f"/checkpoints/{uuid}",
        metadata={},
        resources={"a.bin": 3, "b.bin": 4},
        time=5.0,
    )


@pytest.mark.usefixtures("on_a_file")
def test_a_missing_database_has_no_experiments_and_is_not_created(
    reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    assert reader.experiments() == []
    assert reader.checkpoints() == []
    assert not database.parent.exists()


@pytest.mark.usefixtures("on_a_file")
def test_an_empty_file_is_a_database_that_is_just_being_created(
    reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    database.parent.mkdir()
    database.touch()
    assert reader.experiments() == []


@pytest.mark.usefixtures("on_a_file")
def test_a_file_that_is_no_database_is_refused_by_name(reader: tracking.TrackingReader, database: pathlib.Path) -> None:
    database.parent.mkdir()
    database.write_text("some notes of mine, which are longer than a header " * 10)
    with pytest.raises(errors.TrackingException, match=r"tracking\.db.*move that file away"):
        reader.experiments()


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda reader: reader.experiment(99), "experiment 99.*det experiment list"),
        (lambda reader: reader.trials(99), "experiment 99"),
        (lambda reader: reader.trial(99), "trial 99.*det experiment describe"),
        (lambda reader: reader.metrics(99), "trial 99"),
        (lambda reader: reader.checkpoints(experiment_id=99), "experiment 99"),
        (lambda reader: reader.checkpoint("feedbeef"), "checkpoint 'feedbeef'.*det checkpoint list"),
    ],
)
@pytest.mark.parametrize("is_created", [True, False])
def test_an_unknown_id_is_named_with_the_command_that_lists_ids(
    ask: Callable[[tracking.TrackingReader], Any],
    named: str,
    is_created: bool,
    database: pathlib.Path,
    describe_run: Callable[..., Any],
) -> None:
    if is_created:
        tracking.TrialWriter.start(database, describe_run()).close()
    with pytest.raises(errors.TrackingException, match=named):
        ask(tracking.TrackingReader(database))


def test_a_number_too_large_for_the_database_is_refused(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    with pytest.raises(errors.TrackingException, match=r"smaller number|there is no trial"):
        reader.trial(2**64)


def test_experiments_come_newest_first_up_to_the_limit(
    reader: tracking.TrackingReader, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    for name in ("first", "second", "third"):
        tracking.TrialWriter.start(database, describe_run(name=name)).close()
    assert [item.name for item in reader.experiments(limit=2)] == ["third", "second"]


def test_metrics_are_ordered_by_step_then_by_arrival(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    reports = [report(2, a=1), report(1, a=2), report(2, a=3), report(1, "training", a=4)]
    writer.write(reports)
    found = reader.metrics(writer.trial_id)
    assert [item.metrics["a"] for item in found] == [2, 4, 1, 3]


def test_metrics_can_be_read_by_group(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write([report(1, "training", a=1), report(1, "mine", a=2)])
    assert reader.metrics(writer.trial_id, "mine") == [report(1, "mine", a=2)]


def test_a_trial_summarizes_each_metric(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write([report(1, loss=3.0), report(2, loss=1.0), report(3, loss=math.nan)])
    summary = reader.trial(writer.trial_id).summary["validation"]["loss"]
    assert (summary.count, summary.latest_step, summary.smallest, summary.largest) == (3, 3, 1.0, 3.0)
    assert math.isnan(summary.latest)


@pytest.mark.parametrize(
    ("config", "best"),
    [
        (None, ("loss", 0.5, 1)),
        ({"searcher": {"metric": "accuracy", "smaller_is_better": False}}, ("accuracy", 0.9, 2)),
        ({"searcher": {"metric": "accuracy"}}, ("accuracy", 0.1, 1)),
        ({"searcher": {"metric": "absent"}}, None),
    ],
)
def test_best_validation_is_ranked_by_the_searcher_metric_or_a_loss(
    config: dict[str, Any] | None,
    best: tuple[str, float, int] | None,
    reader: tracking.TrackingReader,
    database: pathlib.Path,
    describe_run: Callable[..., Any],
) -> None:
    with tracking.TrialWriter.start(database, describe_run(config=config)) as writer:
        writer.write([report(1, loss=0.5, accuracy=0.1), report(2, loss=0.7, accuracy=0.9)])
    found = reader.trial(writer.trial_id).best_validation
    assert (found and (found.metric, found.value, found.steps_completed)) == best


def test_a_metric_that_says_nothing_about_its_direction_has_no_best(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([report(1, accuracy=0.5)])
    assert reader.trial(writer.trial_id).best_validation is None


def test_a_metric_beyond_the_range_of_floats_does_not_disturb_the_others(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([report(1, loss=10**400), report(2, loss=1.0)])
    trial = reader.trial(writer.trial_id)
    assert trial.best_validation is not None
    assert trial.best_validation.value == 1.0


def test_a_checkpoint_record_holds_the_total_size(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([saved("abcd-1")])
    record = reader.checkpoint("abcd-1")
    assert (record.size, record.resources, record.experiment_id) == (
        7,
        {"a.bin": 3, "b.bin": 4},
        writer.experiment_id,
    )


def test_checkpoints_can_be_read_by_experiment_and_trial(
    writer: tracking.TrialWriter,
    reader: tracking.TrackingReader,
    database: pathlib.Path,
    describe_run: Callable[..., Any],
) -> None:
    writer.write([saved("abcd-1")])
    with tracking.TrialWriter.start(database, describe_run()) as other:
        other.write([saved("abcd-2")])
    by_experiment = reader.checkpoints(experiment_id=writer.experiment_id)
    by_trial = reader.checkpoints(trial_id=other.trial_id)
    assert [record.uuid for record in by_experiment + by_trial] == ["abcd-1", "abcd-2"]


def test_the_beginning_of_a_uuid_is_enough_when_it_is_unique(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([saved("abcd-1"), saved("efgh-2")])
    assert reader.checkpoint("abcd").uuid == "abcd-1"


def test_a_whole_uuid_wins_over_longer_ones(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    writer.write([saved("abcd"), saved("abcd-1")])
    assert reader.checkpoint("abcd").uuid == "abcd"


def test_an_ambiguous_beginning_names_the_candidates(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([saved("abcd-1"), saved("abcd-2")])
    with pytest.raises(errors.TrackingException, match=r"abcd-1, abcd-2.*more characters"):
        reader.checkpoint("abcd")


@pytest.mark.parametrize("beginning", ["abc", "%%%%", "____"])
def test_a_short_beginning_or_a_pattern_finds_nothing(
    beginning: str, writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([saved("abcd-1")])
    with pytest.raises(errors.TrackingException, match="no checkpoint"):
        reader.checkpoint(beginning)


def test_a_run_whose_process_lives_is_not_lost(writer: tracking.TrialWriter, reader: tracking.TrackingReader) -> None:
    assert not reader.trial(writer.trial_id).is_lost
    assert not reader.experiment(writer.experiment_id).is_lost


def _ended_process() -> dict[str, Any]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(process.pid).create_time()
    process.communicate(b"\n", timeout=60)
    return {"pid": process.pid, "process_started": started}


def test_an_active_run_whose_process_ended_is_lost(
    reader: tracking.TrackingReader, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    tracking.TrialWriter.start(database, describe_run(**_ended_process())).close()
    assert reader.experiments()[0].is_lost
    assert reader.trials(1)[0].is_lost


def test_a_pid_that_belongs_to_a_later_process_is_lost(
    reader: tracking.TrackingReader, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    tracking.TrialWriter.start(database, describe_run(process_started=1000.0)).close()
    assert reader.trial(1).is_lost


def test_a_process_on_another_host_is_never_called_lost(
    reader: tracking.TrackingReader, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    tracking.TrialWriter.start(database, describe_run(host="elsewhere", **_ended_process())).close()
    assert not reader.trial(1).is_lost


def test_a_finished_run_is_not_lost(
    reader: tracking.TrackingReader, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    with tracking.TrialWriter.start(database, describe_run(**_ended_process())) as writer:
        writer.write([tracking.StateChanged(state=RunState.COMPLETED, time=1.0)])
    assert not reader.experiments()[0].is_lost


@pytest.mark.usefixtures("on_a_file")
def test_reading_does_not_wait_for_a_writer(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader, database: pathlib.Path
) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert len(reader.experiments()) == 1


def test_an_overview_ranks_the_trials_of_one_experiment(database: pathlib.Path) -> None:
    with driving.claimed(database) as store:
        ids = driving.add_trials(store, 3)
        for id, loss in zip(ids, (2.0, 1.0, math.nan), strict=True):
            with tracking.TrialWriter.attach(database, 1, id, 1) as writer:
                writer.write([report(1, loss=loss), report(2, loss=loss)])
        driving.begin_runs(store, [2], run_id=2, step=0)
        before = tracking.TrackingReader(database).overview(1)
        assert before.best is not None
        assert before.best.id == 1, "the validations of trial 2 are superseded"
        with tracking.TrialWriter.attach(database, 1, 2, 2) as writer:
            writer.write([report(1, loss=1.5)])
    found = tracking.TrackingReader(database).overview(1)
    assert (found.metric, found.smaller_is_better) == ("loss", True)
    assert [trial.id for trial in found.ranked] == [2, 1, 3]
    assert found.best is not None
    assert found.best.best_validation == tracking.BestValidation(metric="loss", value=1.5, steps_completed=1)
    assert found.ranked[-1].best_validation is None
