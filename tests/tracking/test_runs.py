"""Several runs of one trial: what they report makes one history."""

from __future__ import annotations

import pathlib
import sqlite3
from contextlib import closing

import pytest
from driving import add_trials, begin_runs, report, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined import errors, tracking
from determined.tracking import RunState


def write(database: pathlib.Path, trial_id: int, run_id: int | None, *messages: tracking.Message) -> None:
    with tracking.TrialWriter.attach(database, 1, trial_id, run_id) as writer:
        writer.write(list(messages))


def continued(step: int, reported: int | None = None, checkpoint: str = "own") -> tracking.Continued:
    return tracking.Continued(
        checkpoint=checkpoint, steps_completed=step, reported_steps=step if reported is None else reported
    )


def losses(reader: tracking.TrackingReader, group: str, trial_id: int = 1) -> list[tuple[int, float]]:
    return [(one.steps_completed, one.metrics["loss"]) for one in reader.metrics(trial_id, group)]


@pytest.fixture
def trial(store: tracking.ExperimentStore) -> int:
    """A trial whose first run has begun."""
    return add_trials(store)[0]


def test_what_a_run_reported_past_the_start_of_the_next_one_is_superseded(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, *(report(step, group, loss=1.0) for step in (1, 2, 3, 4) for group in ("training", "x")))
    begin_runs(store, [trial], run_id=2, step=2)
    assert losses(reader, "training") == [(1, 1.0), (2, 1.0)]
    write(database, trial, 2, *(report(step, group, loss=2.0) for step in (3, 4, 5) for group in ("training", "x")))
    for group in ("training", "x"):
        assert losses(reader, group) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert reader.history(trial) == reader.metrics(trial)


def test_the_start_that_a_run_tells_itself_counts(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    messages = [report(step, group, loss=1.0) for step in (1, 2, 3) for group in ("training", "validation")]
    write(database, trial, 1, *messages)
    begin_runs(store, [trial], run_id=2, step=3)
    write(database, trial, 2, continued(2, reported=1))
    assert losses(reader, "training") == [(1, 1.0)], "its checkpoint holds a batch whose metrics it reports anew"
    assert losses(reader, "validation") == [(1, 1.0), (2, 1.0)]


def test_a_validation_that_is_repeated_after_a_restart_counts_once(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, report(2, loss=1.0))
    begin_runs(store, [trial], run_id=2, step=2)
    write(database, trial, 2, report(2, loss=2.0))
    assert losses(reader, "validation") == [(2, 2.0)]


def test_a_run_that_began_anew_though_it_was_given_a_checkpoint_replaces_all(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, *(report(step, "training", loss=1.0) for step in (1, 2, 3)))
    begin_runs(store, [trial], run_id=2, step=3)
    write(database, trial, 2, report(1, "training", loss=2.0))
    assert losses(reader, "training") == [(1, 2.0)]


def test_the_metrics_of_the_machine_do_not_replace_those_of_before(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, report(0, "cpu", loss=1.0), report(2, "cpu", loss=1.0))
    begin_runs(store, [trial], run_id=2, step=2)
    write(database, trial, 2, report(0, "cpu", loss=2.0))
    assert losses(reader, "cpu") == [(0, 1.0), (0, 2.0), (2, 1.0)]


def test_a_process_of_an_earlier_run_that_still_reports_changes_nothing(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    begin_runs(store, [trial], run_id=2, step=0)
    write(database, trial, 2, report(1, loss=2.0))
    write(database, trial, 1, report(1, loss=1.0), report(9, loss=1.0))
    assert losses(reader, "validation") == [(1, 2.0)]


def test_superseded_reports_are_in_no_summary_and_no_best(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, report(1, loss=0.5), report(2, loss=0.1))
    begin_runs(store, [trial], run_id=2, step=1)
    found = reader.trial(trial)
    assert found.best_validation is not None
    assert (found.best_validation.value, found.steps_completed) == (0.5, 1)
    assert found.summary["validation"]["loss"].count == 1
    best = store.best()
    assert best is not None
    assert best.metrics == {"loss": 0.5}
    with tracking.TrialWriter.attach(database, 1, trial, 2) as writer:
        assert writer.best_validation("loss", smaller_is_better=True) == 0.5


def test_the_best_of_any_other_metric_leaves_superseded_reports_out_too(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path
) -> None:
    write(database, trial, 1, report(1, other=0.5), report(2, other=0.1))
    begin_runs(store, [trial], run_id=2, step=1)
    with tracking.TrialWriter.attach(database, 1, trial, 2) as writer:
        assert writer.best_validation("other", smaller_is_better=True) == 0.5


@pytest.mark.usefixtures("on_a_file")
def test_what_is_superseded_stays_stored(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, report(1, loss=1.0))
    begin_runs(store, [trial], run_id=2, step=0)
    assert reader.metrics(trial) == []
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT run_id, steps_completed FROM metrics").fetchall() == [(1, 1)]


def test_only_another_trials_checkpoint_is_the_source_of_a_trial(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    (other,) = add_trials(store)
    write(database, trial, 1, report(1, "training", loss=1.0), report(3, "training", loss=1.0), saved("first", step=2))
    write(database, other, 1, continued(2, checkpoint="first"), report(3, "training", loss=2.0), saved("own", step=3))
    begin_runs(store, [other], run_id=2, step=3)
    write(database, other, 2, continued(3, checkpoint="own"), report(4, "training", loss=3.0))
    found = reader.trial(other)
    assert (found.source_checkpoint, found.source_steps_completed) == ("first", 2)
    assert [run.source_checkpoint for run in reader.runs(other)] == ["first", "own"]
    assert [one.metrics["loss"] for one in reader.history(other)] == [1.0, 2.0, 3.0]
    assert reader.sources() == {"first"}


@pytest.mark.parametrize("run_id", [0, 2, -1])
def test_a_run_that_is_not_on_record_cannot_write(run_id: int, trial: int, database: pathlib.Path) -> None:
    with pytest.raises(
        errors.TrackingException, match=rf"trial 1 of experiment 1 has 1 runs on record, so run {run_id}"
    ):
        tracking.TrialWriter.attach(database, 1, trial, run_id)


def test_a_local_trial_has_no_runs(writer: tracking.TrialWriter, database: pathlib.Path) -> None:
    with tracking.TrialWriter.attach(database, 1, 1, 5) as other:
        other.write([report(1, loss=1.0), continued(7)])
    reader = tracking.TrackingReader(database)
    assert reader.runs(1) == []
    assert reader.trial(1).source_steps_completed == 7


# States are the runner's


def test_a_trial_process_changes_no_state_of_a_driven_experiment(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, tracking.StateChanged(state=RunState.ERROR, time=5.0, reason="no data"))
    found = reader.trial(trial)
    assert (found.state, found.reason, found.ended) == (RunState.ACTIVE, None, None)
    assert reader.experiment(1).state is RunState.ACTIVE
    (run,) = store.runs(trial)
    assert (run.outcome, run.outcome_reason, run.ended) == (RunState.ERROR, "no data", None)


def test_the_progress_of_a_driven_trial_is_its_own(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    write(database, trial, 1, tracking.ProgressChanged(progress=0.5), tracking.StatusChanged(status="busy"))
    (entry,) = store.trials()
    assert (entry.progress, entry.status) == (0.5, "busy")
    assert reader.experiment(1).progress == 0.0


def test_a_tool_without_a_run_can_write_what_is_no_state(
    store: tracking.ExperimentStore, trial: int, database: pathlib.Path, reader: tracking.TrackingReader
) -> None:
    ended = tracking.StateChanged(state=RunState.ERROR, time=1.0)
    write(database, trial, None, saved("a"), report(1, "x", loss=1.0), ended)
    begin_runs(store, [trial], run_id=2, step=0)
    assert [one.uuid for one in reader.checkpoints(trial_id=trial)] == ["a"]
    assert losses(reader, "x") == [(1, 1.0)], "what belongs to no run is superseded by none"
    assert store.trials()[0].state is RunState.ACTIVE


# Any course


runs_of_a_trial = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(course=runs_of_a_trial)
def test_runs_that_were_cut_short_leave_the_history_of_one_that_was_not(
    course: list[tuple[int, int]],
    store: tracking.ExperimentStore,
    database: pathlib.Path,
    reader: tracking.TrackingReader,
) -> None:
    """Each run goes on from a step that was reached before, for so many steps; the last one to the end."""
    (id,) = add_trials(store, run=False)
    reached = 0
    for run_id, (start, length) in enumerate(course, 1):
        start = min(start, reached)
        begin_runs(store, [id], run_id=run_id, step=start)
        end = 12 if run_id == len(course) else start + length
        messages = [continued(start, checkpoint="some")] if start else []
        steps = range(start + 1, end + 1)
        write(database, id, run_id, *messages, *(report(step, loss=step, run=run_id) for step in steps))
        reached = end
    assert [one.steps_completed for one in reader.metrics(id, "validation")] == list(range(1, 13))
    found = [one.metrics["run"] for one in reader.metrics(id, "validation")]
    assert found == sorted(found), "what stands of an earlier run comes before what stands of a later one"


def test_a_trial_can_be_described_before_its_first_run(
    store: tracking.ExperimentStore, reader: tracking.TrackingReader
) -> None:
    (id,) = add_trials(store, run=False)
    found = reader.trial(id)
    assert (found.pid, found.host, found.process, found.is_lost) == (None, None, None, False)
    assert (found.request_id, found.run_id, found.restarts, found.steps_completed) == ("request 0", 0, 0, 0)
