"""Which checkpoints of a run stay when it ends, and what a crash while deleting leaves."""

from __future__ import annotations

import os
import pathlib
import signal
import sqlite3
from typing import Any

import pytest

import forking
from det_command import run_det
from determined import errors, pytorch, tracking
from determined._home import home
from determined.pytorch import Batch
from determined.storage import Manifest
from trials import LineTrial, ScriptedTrial, fit, records, scripted, trainer


def conf(**storage: Any) -> dict[str, Any]:
    return {"checkpoint_storage": storage, "reproducibility": {"experiment_seed": 5}}


def kept(trial_id: int = 1) -> list[int]:
    """Return the batches of the checkpoints that are on record and in the store, which must agree."""
    present = [one for one in records().checkpoints(trial_id=trial_id) if one.state.value == "COMPLETED"]
    assert all(pathlib.Path(one.path).is_dir() for one in present)
    gone = [one for one in records().checkpoints(trial_id=trial_id) if one not in present]
    assert not any(pathlib.Path(one.path).exists() for one in gone)
    return [one.steps_completed for one in present]


def after(values: list[Any], storage: dict[str, int], config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Validate with these values, a checkpoint after each, and return which ones are left."""
    told = {"checkpoint_policy": "all", "smaller_is_better": True}
    scripted(values, exp_conf=conf(**storage) | (config or {}))(**(told | arguments))
    return kept()


VALUES = [3.0, 1.0, 2.0, 5.0, 4.0]


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"save_trial_best": 1}, [2, 5]),
        ({"save_trial_best": 2, "save_trial_latest": 0}, [2, 3]),
        ({"save_trial_best": 0, "save_trial_latest": 2}, [4, 5]),
        ({"save_trial_best": 0, "save_trial_latest": 1, "save_experiment_best": 3}, [1, 2, 3, 5]),
        ({"save_trial_best": 99}, [1, 2, 3, 4, 5]),
    ],
)
def test_numbers_of_the_config_say_what_stays(storage: dict[str, int], expected: list[int]) -> None:
    assert after(VALUES, storage) == expected


def test_best_by_the_searchers_metric() -> None:
    values = [{"accuracy": value, "loss": value} for value in VALUES]
    searcher = {"searcher": {"metric": "accuracy", "smaller_is_better": False}}
    assert after(values, {"save_trial_latest": 0}, searcher) == [4]


@pytest.mark.parametrize("policy", ["best", "all"])
def test_best_by_the_metric_that_fit_is_told(policy: str) -> None:
    values = [{"a": value, "b": -value} for value in VALUES]
    told = {"best_metric": "a", "smaller_is_better": False, "checkpoint_policy": policy}
    assert after(values, {"save_trial_latest": 0}, **told) == [4]


def test_where_nothing_tells_what_is_best_all_stay_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert after([{"a": value, "b": value} for value in VALUES], {"save_trial_best": 1}) == [1, 2, 3, 4, 5]
    assert any("All checkpoints are kept" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["accuracy", "validation_loss", "whatever"])
def test_nothing_is_deleted_by_a_direction_that_only_a_name_suggests(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = [{name: value} for value in VALUES]
    assert after(values, {"save_trial_best": 1}, smaller_is_better=None) == [1, 2, 3, 4, 5]
    assert any("fit(best_metric='...', smaller_is_better=...)" in message for message in caplog.messages)


def test_nothing_is_deleted_by_a_direction_that_the_config_leaves_out() -> None:
    values, searcher = [{"accuracy": value} for value in VALUES], {"searcher": {"metric": "accuracy"}}
    assert after(values, {"save_trial_best": 1}, searcher, smaller_is_better=None) == [1, 2, 3, 4, 5]


def test_config_can_name_the_metric_and_fit_the_direction() -> None:
    values, searcher = [{"accuracy": value} for value in VALUES], {"searcher": {"metric": "accuracy"}}
    assert after(values, {"save_trial_latest": 0}, searcher, smaller_is_better=False) == [4]


def test_where_no_best_is_to_stay_nothing_needs_to_tell() -> None:
    values = [{"a": value, "b": value} for value in VALUES]
    assert after(values, {"save_trial_best": 0, "save_trial_latest": 1}) == [5]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 10**400])
def test_value_that_is_not_finite_ranks_last(bad: Any) -> None:
    assert after([bad, 2.0, bad, 1.0, bad], {"save_trial_best": 2, "save_trial_latest": 0}) == [2, 4]


def test_validation_without_the_metric_ranks_last() -> None:
    values = [{"a": 1.0}, {"b": 0.0}, {"a": 2.0}]
    told = {"best_metric": "a", "smaller_is_better": True}
    assert after(values, {"save_trial_best": 2, "save_trial_latest": 0}, **told) == [1, 3]


def test_checkpoint_without_a_validation_stays_only_as_one_of_the_latest() -> None:
    init = {"exp_conf": conf(save_trial_best=5, save_trial_latest=2)}
    periods = {"checkpoint_period": Batch(1), "validation_period": Batch(3)}
    fit(LineTrial, init, max_length=Batch(6), smaller_is_better=True, **periods)
    assert kept() == [3, 5, 6]


def test_run_of_another_experiment_is_left_alone() -> None:
    after(VALUES, {})
    fit(LineTrial, {"exp_conf": conf(save_trial_best=1)}, checkpoint_period=Batch(1), smaller_is_better=True)
    assert kept(1) == [1, 2, 3, 4, 5]
    assert kept(2) == [6]


def test_checkpoint_that_a_run_started_from_stays() -> None:
    with trainer(LineTrial, exp_conf=conf(save_trial_best=0, save_trial_latest=1)) as (its_trainer, _):
        its_trainer.fit(max_length=Batch(2), checkpoint_policy="none")
        fit(LineTrial, latest_checkpoint=records().checkpoints()[0].uuid)  # another run goes on from it
        its_trainer.fit(max_length=Batch(4), checkpoint_policy="none")
    assert kept(1) == [2, 4]


def test_run_that_a_signal_stops_keeps_the_checkpoint_to_go_on_from() -> None:
    class Trial(ScriptedTrial):
        values = VALUES

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 3:
                signal.raise_signal(signal.SIGTERM)
            return super().train_batch(batch, epoch_idx, batch_idx)

    init = {"exp_conf": conf(save_trial_best=1, save_trial_latest=0)}
    with pytest.raises(SystemExit):
        fit(Trial, init, validation_period=Batch(1), checkpoint_policy="all", smaller_is_better=True)
    assert kept() == [2, 4]


def test_deleted_checkpoint_is_not_offered_to_continue_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert after(VALUES, {"save_trial_latest": 0}) == [2]
    assert "continue" not in capsys.readouterr().out


def test_store_of_the_section_is_the_one_cleaned(tmp_path: pathlib.Path) -> None:
    storage = {"type": "shared_fs", "host_path": str(tmp_path / "store"), "save_trial_best": 1}
    assert after(VALUES, storage) == [2, 5]
    assert len(list((tmp_path / "store").iterdir())) == 2


@pytest.mark.parametrize("value", [-1, "2", 1.5, True])
def test_number_that_is_none_is_refused_before_training(value: Any) -> None:
    with (
        pytest.raises(errors.StorageException, match=r"save_trial_best=.*an int >= 0"),
        pytorch.init(exp_conf=conf(save_trial_best=value)),
    ):
        pytest.fail("init must refuse it")
    assert records().experiments() == []


# Crashes while deleting

PROGRAM = """
from determined.pytorch import Batch
from trials import scripted
storage = {"save_trial_best": 1, "save_trial_latest": 1}
run = scripted([3.0, 1.0, 2.0, 4.0], exp_conf={"checkpoint_storage": storage})
run(checkpoint_policy="all", smaller_is_better=True)
"""


def die_at(point: str) -> None:
    done = forking.run(
        ["-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": forking.PYTHONPATH, "DET_DIE_AT": point},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def completed() -> dict[str, pathlib.Path]:
    return {one.uuid: pathlib.Path(one.path) for one in records().checkpoints() if one.state.value == "COMPLETED"}


@pytest.mark.parametrize("point", ["unlisted", "to_delete", "unlisted:2", "to_delete:2"])
def test_crash_while_deleting_leaves_no_half_checkpoint_and_gc_finishes_the_job(point: str) -> None:
    die_at(point)
    steps = {one.steps_completed for one in records().checkpoints() if one.uuid in completed()}
    assert steps >= {2, 4}  # the best and the latest
    for path in completed().values():
        check_whole(path)
    assert run_det("gc").exit_code == 0
    assert {path.name for path in home().checkpoints.iterdir()} == set(completed())
    assert {path for path in completed().values() if path.is_dir()} == set(completed().values())


def check_whole(path: pathlib.Path) -> None:
    Manifest.read(path).verify(path)


# A reader in the way (row 27)


def test_reader_that_holds_a_transaction_does_not_stop_the_writers() -> None:
    fit(LineTrial, max_length=Batch(1))
    reader = sqlite3.connect(home().database, isolation_level=None)
    try:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM metrics").fetchone()
        assert after_a_run() == [2, 4]
        assert reader.execute("SELECT count(*) FROM metrics").fetchone() == before
    finally:
        reader.close()
    assert records().trial(2).state is tracking.RunState.COMPLETED


def after_a_run() -> list[int]:
    scripted([3.0, 1.0, 2.0, 4.0], exp_conf=conf(save_trial_best=1))(checkpoint_policy="all", smaller_is_better=True)
    return kept(2)
