"""A tracking database that is deleted, moved or replaced during a run: the run is on record nevertheless."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable

import pytest

import determined
from determined import core, errors, tracking
from determined._home import home

Happen = Callable[[], None]


def files() -> list[pathlib.Path]:
    return [home().database.with_name(f"tracking.db{suffix}") for suffix in ("", "-wal", "-shm")]


def delete() -> None:
    for file in files():
        file.unlink()


def delete_the_main_file() -> None:
    home().database.unlink()


def move() -> None:
    for file in files():
        file.rename(file.with_name(f"moved-{file.name}"))


def report(context: core.Context, first: int, last: int) -> None:
    for step in range(first, last):
        context.train.report_training_metrics(step, {"loss": step / 7})
    context.flush()


def save(context: core.Context, steps: int) -> str:
    with context.checkpoint.store_path({"steps_completed": steps}) as (_, uuid):
        pass
    context.flush()
    return uuid


@pytest.mark.parametrize("happen", [delete, delete_the_main_file, move])
def test_a_run_whose_database_goes_is_on_record_as_a_whole(
    happen: Happen, records: tracking.TrackingReader, caplog: pytest.LogCaptureFixture
) -> None:
    with core.init():
        pass
    with core.init() as context:
        report(context, 0, 3)
        before = save(context, 3)
        context.train.set_metadata({"tag": "x"})
        context.flush()
        happen()
        report(context, 3, 6)
        after = save(context, 6)
    (experiment,) = records.experiments()
    assert (experiment.id, experiment.state) == (2, tracking.RunState.COMPLETED)
    assert records.trial(2).metadata == {"tag": "x"}
    assert [one.steps_completed for one in records.metrics(2)] == list(range(6))
    assert [one.uuid for one in records.checkpoints()] == [before, after]
    (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert f"{home().database} was deleted, moved or replaced" in said


def test_a_run_whose_database_is_replaced_by_that_of_another_gets_an_id_there(records: tracking.TrackingReader) -> None:
    with core.init() as context:
        report(context, 0, 3)
        delete()
        with core.init():
            pass
        report(context, 3, 6)
    assert [one.id for one in records.experiments()] == [2, 1]
    assert [len(records.metrics(id)) for id in (1, 2)] == [0, 6]


def test_a_run_whose_database_is_put_back_loses_nothing(
    records: tracking.TrackingReader, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with core.init() as context:
        report(context, 0, 3)
        copy = tmp_path / "copy"
        copy.write_bytes(home().database.read_bytes())
        report(context, 3, 5)
        delete()
        copy.rename(home().database)
        report(context, 5, 6)
    assert len(records.experiments()) == 1
    assert [one.steps_completed for one in records.metrics(1)] == list(range(6))


def train_and_delete() -> None:
    with core.init() as context:
        report(context, 0, 3)
        delete()
        report(context, 3, 6)


def test_a_trial_of_an_experiment_whose_database_goes_does_not_end_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    new_trial = tracking.NewTrial(request_id="one", hparams={}, seed=1, entrypoint="train.py")
    first_run = tracking.TrialChange(trial_id=1, run_id=1, started_from_step=0)
    with tracking.ExperimentStore.create(
        home().database, tracking.ExperimentDescription(name="search", config={})
    ) as store:
        store.claim()
        store.commit(tracking.Changeset(new_trials=[new_trial]))
        store.commit(tracking.Changeset(trial_changes=[first_run]))
    trial = determined.TrialInfo(trial_id=1, experiment_id=1, trial_seed=1, hparams={}, _config={}, _trial_run_id=1)
    for name, value in determined.ClusterInfo(trial=trial).to_environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.TrackingException, match="reports of this run are not in"):
        train_and_delete()
    assert not home().database.exists()
