"""What experiments begin with and leave: warm starts, checkpoints that stay, going on after the end."""

from __future__ import annotations

import json
import os
import pathlib
import socket

import pytest

from determined import errors
from determined.experiment import best_checkpoints, control, scores
from determined.tracking import Catalog, ExperimentStore, Registry, RunProcess, RunState
from told import KEEP_ALL, KEEP_NONE, Workshop, losses, settings


@pytest.fixture
def workshop(tmp_path: pathlib.Path) -> Workshop:
    return Workshop(tmp_path)


GRID = {"name": "grid", "metric": "validation_loss", "max_length": {"batches": 3}}


def two_trials(**storage: int) -> dict[str, object]:
    """Return the config of two trials with the losses 3, 1, 2 and 5, 4, 6."""
    told = {"losses": {"type": "categorical", "vals": [[3.0, 1.0, 2.0], [5.0, 4.0, 6.0]]}}
    return settings(hyperparameters=told, searcher=GRID, checkpoint_storage=storage)


# Checkpoints that stay


@pytest.mark.parametrize(("best", "latest", "kept"), [(1, 1, [2, 4]), (0, 1, [4]), (2, 0, [2, 3]), (0, 0, [])])
def test_the_best_and_the_latest_checkpoints_of_a_trial_stay(
    workshop: Workshop, best: int, latest: int, kept: list[int]
) -> None:
    storage = {"save_trial_best": best, "save_trial_latest": latest}
    id = workshop.run(settings(hyperparameters=losses(3, 1, 2, 4), checkpoint_storage=storage))
    assert workshop.kept(id) == kept


def test_the_best_checkpoints_of_an_experiment_stay(workshop: Workshop) -> None:
    id = workshop.run(two_trials(save_experiment_best=2, save_trial_best=0, save_trial_latest=0))
    kept = [one for one in workshop.records.checkpoints(id) if pathlib.Path(one.path).exists()]
    assert sorted((one.trial_id, one.steps_completed) for one in kept) == [(2, 2), (2, 3)]


def test_what_a_killed_runner_left_goes_at_the_end_of_a_later_experiment(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("determined.experiment.runner._process.conclude", lambda *_: None)
        id = workshop.run(settings(hyperparameters=losses(3, 1, 2, 4)))
    assert workshop.kept(id) == [1, 2, 3, 4]
    with ExperimentStore.open(workshop.home.database, id) as store:
        store.claim(RunProcess(pid=os.getpid(), started=1.0, host=socket.gethostname()))
        workshop.run(settings(1))
        assert workshop.kept(id) == [2, 4]
        assert store.runner() is None


def test_larger_can_be_better(workshop: Workshop) -> None:
    storage = {"save_trial_best": 1, "save_trial_latest": 0}
    searcher = {"smaller_is_better": False}
    id = workshop.run(settings(hyperparameters=losses(3, 1, 4, 2), searcher=searcher, checkpoint_storage=storage))
    assert workshop.kept(id) == [3]


def test_a_registered_checkpoint_stays(workshop: Workshop) -> None:
    id = workshop.run(settings(**KEEP_ALL))
    registry = Registry(workshop.home.database)
    registry.register_version(registry.create_model("line").id, workshop.checkpoint(id, 2))
    control.reopen(id, workshop.home, overrides=KEEP_NONE)
    workshop.drive(id)
    assert workshop.kept(id) == [2]


def test_the_source_of_a_warm_start_stays(workshop: Workshop) -> None:
    first = workshop.run(settings(**KEEP_ALL))
    second = workshop.create(settings(searcher={"source_checkpoint_uuid": workshop.checkpoint(first, 3)}))
    control.reopen(first, workshop.home, overrides=KEEP_NONE)
    workshop.drive(first)
    assert workshop.kept(first) == [3]
    assert workshop.drive(second) is RunState.COMPLETED
    control.reopen(first, workshop.home)
    workshop.drive(first)
    assert workshop.kept(first) == [3]  # also when the other experiment has ended


# Warm start


def test_a_warm_start_takes_over_the_weights_and_nothing_else(workshop: Workshop) -> None:
    first = workshop.run(settings())
    assert workshop.values(first, "weight") == [1.0, 2.5, 4.25, 6.125]
    second = workshop.run(settings(2, searcher={"source_trial_id": 1}, perform_initial_validation=True))
    assert workshop.values(second, "weight") == [6.125, 7.125, 8.625]
    assert workshop.records.trials(second)[0].steps_completed == 2
    assert workshop.starts(second) == [0]


def test_all_trials_of_a_search_begin_with_the_same_weights(workshop: Workshop) -> None:
    first = workshop.run(settings(**KEEP_ALL))
    searcher = {"source_checkpoint_uuid": workshop.checkpoint(first, 2)[:8], "name": "random", "max_trials": 2}
    second = workshop.run(settings(1, searcher=searcher))
    reports = [workshop.records.metrics(trial.id, "validation") for trial in workshop.records.trials(second)]
    assert [[report.metrics["weight"] for report in of_trial] for of_trial in reports] == [[3.5], [3.5]]


@pytest.mark.thorough
def test_a_trial_that_fails_after_a_warm_start_goes_on_from_its_own_checkpoint(workshop: Workshop) -> None:
    first = workshop.run(settings())
    workshop.told.write_text("2")
    config = settings(searcher={"source_trial_id": 1}, data={"told": str(workshop.told)}, max_restarts=1)
    second = workshop.run(config)
    assert workshop.starts(second) == [0, 2]
    assert workshop.values(second, "weight") == [7.125, 8.625]
    workshop.told.unlink()
    control.reopen(second, workshop.home)
    workshop.drive(second)
    assert workshop.values(second, "weight") == [7.125, 8.625, 10.375, 12.25]
    assert workshop.kept(first) == [4]


def test_a_trial_that_fails_before_its_first_checkpoint_begins_with_the_weights_again(workshop: Workshop) -> None:
    workshop.run(settings())
    workshop.told.write_text("0")
    config = settings(1, searcher={"source_trial_id": 1}, data={"told": str(workshop.told)}, max_restarts=1)
    second = workshop.run(config)
    workshop.told.unlink()
    control.reopen(second, workshop.home)
    assert workshop.drive(second) is RunState.COMPLETED
    assert workshop.starts(second) == [0, 0, 0]
    assert workshop.values(second, "weight") == [7.125]


@pytest.mark.thorough
def test_the_source_is_what_was_the_latest_at_the_creation(workshop: Workshop) -> None:
    first = workshop.run(settings(2))
    second = workshop.create(settings(1, searcher={"source_trial_id": 1}))
    control.reopen(first, workshop.home, overrides=["searcher.max_length.batches=4"])
    workshop.drive(first)
    workshop.drive(second)
    assert workshop.values(second, "weight") == [2.5 + 1]


def test_a_source_that_is_not_there_is_refused_before_anything_is_made(workshop: Workshop) -> None:
    id = workshop.run(settings(**KEEP_ALL))
    deleted = workshop.checkpoint(id, 1)
    control.delete_checkpoint(deleted, workshop.home)
    bare = workshop.run(settings(checkpoint_policy="none", checkpoint_storage={"save_trial_latest": 0}))
    control.reopen(bare, workshop.home, overrides=KEEP_NONE)
    workshop.drive(bare)
    sources = {
        "source_trial_id=77: there is no trial 77": {"source_trial_id": 77},
        "source_trial_id=2: this trial has no checkpoint": {"source_trial_id": 2},
        "source_checkpoint_uuid='nope': there is no checkpoint 'nope'": {"source_checkpoint_uuid": "nope"},
        f"source_checkpoint_uuid='{deleted}': this checkpoint was deleted": {"source_checkpoint_uuid": deleted},
    }
    for words, source in sources.items():
        with pytest.raises(errors.InvalidExperimentException, match=words):
            workshop.create(settings(searcher=source))
    assert [one.id for one in workshop.records.experiments()] == [bare, id]


def test_a_source_in_another_store_is_refused(workshop: Workshop, tmp_path: pathlib.Path) -> None:
    workshop.run(settings(1))
    elsewhere = {"type": "shared_fs", "host_path": str(tmp_path / "elsewhere")}
    with pytest.raises(errors.InvalidExperimentException, match="set checkpoint_storage to where it is"):
        workshop.create(settings(searcher={"source_trial_id": 1}, checkpoint_storage=elsewhere))


# Going on after the end


def test_an_experiment_that_failed_can_be_continued(workshop: Workshop) -> None:
    workshop.told.write_text("3")
    id = workshop.create(settings(data={"told": str(workshop.told)}, max_restarts=0))
    assert workshop.drive(id) is RunState.ERROR
    workshop.told.unlink()
    assert control.reopen(id, workshop.home) == [1]
    assert workshop.drive(id) is RunState.COMPLETED
    assert workshop.values(id, "weight") == [1.0, 2.5, 4.25, 6.125]
    assert workshop.starts(id) == [0, 3]


@pytest.mark.thorough
def test_a_continued_experiment_that_fails_again_has_failed(workshop: Workshop) -> None:
    workshop.told.write_text("3")
    id = workshop.create(settings(data={"told": str(workshop.told)}, max_restarts=0))
    assert workshop.drive(id) is RunState.ERROR
    control.reopen(id, workshop.home)
    assert workshop.drive(id) is RunState.ERROR
    assert workshop.records.experiment(id).state is RunState.ERROR


def test_only_trials_that_did_not_complete_are_continued(workshop: Workshop) -> None:
    workshop.told.write_text("2")
    config = two_trials() | {"data": {"told": str(workshop.told)}, "max_restarts": 0}
    id = workshop.create(config)
    assert workshop.drive(id) is RunState.ERROR
    workshop.told.unlink()
    assert control.reopen(id, workshop.home) == [1, 2]
    assert workshop.drive(id) is RunState.COMPLETED
    with pytest.raises(errors.TrackingException, match="all trials of experiment 1 have completed"):
        control.reopen(id, workshop.home)


def test_a_single_search_can_go_on_for_longer(workshop: Workshop) -> None:
    id = workshop.run(settings(2))
    control.reopen(id, workshop.home, overrides=["searcher.max_length.batches=4", "max_restarts=1"])
    assert workshop.drive(id) is RunState.COMPLETED
    assert workshop.values(id, "weight") == [1.0, 2.5, 4.25, 6.125]
    config = workshop.records.experiment(id).config or {}
    assert (config["searcher"]["max_length"], config["max_restarts"]) == ({"batches": 4}, 1)


def test_limits_that_people_set_change_only_if_the_config_does(workshop: Workshop) -> None:
    id = workshop.run(settings(1))
    with ExperimentStore.open(workshop.home.database, id) as store:
        store.ask(max_slots=3, priority=5)
        control.reopen(id, workshop.home, overrides=["resources.priority=7"])
        wanted = store.control()
    assert (wanted.max_slots, wanted.priority) == (3, 7)


UNCHANGEABLE = {
    "hyperparameters.lr=1": "cannot be continued with hyperparameters",
    "searcher.metric=accuracy": "only its max_length can change",
    "reproducibility.experiment_seed=4": "cannot be continued with reproducibility",
    "entrypoint=program:Other": "instead of 'program:Told'",
    "name=other": "use `det experiment set name`",
    "labels=[a]": "use `det experiment label`",
    "checkpoint_storage={type: directory, container_path: /tmp}": "cannot be continued with checkpoint_storage",
    "searcher.max_length.epochs=3": "exactly one of batches, records, epochs",
    "resources.slots_per_trial=512": "slots_per_trial=512, but this machine has",
    "max_restart=1": "max_restarts",
}


def test_what_cannot_change_is_refused(workshop: Workshop) -> None:
    id = workshop.run(settings(1, hyperparameters={"global_batch_size": 512}))
    for override, words in UNCHANGEABLE.items():
        with pytest.raises(errors.InvalidExperimentException, match=words):
            control.reopen(id, workshop.home, overrides=[override])
    assert workshop.records.experiment(id).state is RunState.COMPLETED


def test_an_experiment_that_has_not_ended_is_not_continued(workshop: Workshop) -> None:
    id = workshop.create(settings(), paused=True)
    with pytest.raises(errors.TrackingException, match="has not ended"):
        control.reopen(id, workshop.home)


# What is best


def test_the_best_trial_and_checkpoints_are_those_of_the_best_validations(workshop: Workshop) -> None:
    id = workshop.run(two_trials(save_trial_latest=9))
    records = workshop.records
    overview = records.overview(id)
    assert overview.best is not None
    assert (overview.best.id, [trial.id for trial in overview.ranked]) == (2, [2, 1])
    found = best_checkpoints(records, id, 4)
    assert [(one.trial_id, one.steps_completed) for one in found] == [(2, 2), (2, 3), (2, 1), (1, 2)]
    assert [one.steps_completed for one in best_checkpoints(records, id, trial_id=1)] == [2, 1, 3]
    assert [one.steps_completed for one in best_checkpoints(records, id, 2, "weight", False)] == [3, 3]
    assert scores(records, id).of(found[0]) == 1.0


def test_what_is_not_finite_is_never_the_best(workshop: Workshop) -> None:
    id = workshop.run(settings(hyperparameters=losses("inf", 2, 3, 4), **KEEP_ALL))
    assert [one.steps_completed for one in best_checkpoints(workshop.records, id)] == [2, 3, 4]
    by = scores(workshop.records, id)
    assert [one.steps_completed for one in by.ranked(workshop.records.checkpoints(id))] == [2, 3, 4, 1]


def test_a_metric_of_your_own_needs_to_be_told_what_is_better(workshop: Workshop) -> None:
    id = workshop.run(settings(1))
    with pytest.raises(errors.InvalidExperimentException, match="whether a smaller 'weight' is better"):
        best_checkpoints(workshop.records, id, 1, "weight")


def test_without_a_checkpoint_there_is_no_best_one(workshop: Workshop) -> None:
    id = workshop.create(settings(1))
    with pytest.raises(errors.CheckpointNotFoundException, match="it has none"):
        best_checkpoints(workshop.records, id)
    assert workshop.records.overview(id).best is None
    workshop.drive(id)
    with pytest.raises(errors.CheckpointNotFoundException, match="none of its 1 was saved at a validation"):
        best_checkpoints(workshop.records, id, 1, "accuracy", False)


# Deleting


def test_nothing_is_left_of_a_deleted_experiment(workshop: Workshop) -> None:
    other, id = workshop.run(settings(1)), workshop.run(settings(1))
    before = [path for path in workshop.home.path.rglob("*") if path.is_file()]
    assert any(path.is_relative_to(workshop.home.tensorboards(id)) for path in before)
    control.delete(id, workshop.home)
    assert [one.id for one in workshop.records.experiments()] == [other]
    assert not workshop.home.experiment(id).exists()
    assert not workshop.home.tensorboards(id).exists()
    assert len(list(workshop.home.checkpoints.iterdir())) == 1
    assert workshop.kept(other) == [1]
    assert workshop.home.code(other).is_dir()


def test_an_experiment_that_runs_cannot_be_deleted(workshop: Workshop) -> None:
    id = workshop.create(settings(1))
    with ExperimentStore.open(workshop.home.database, id) as store:
        store.claim()
        with pytest.raises(errors.TrackingException, match="is at work on it"):
            control.delete(id, workshop.home)
        store.release()
    assert workshop.home.code(id).is_dir()
    control.delete(id, workshop.home)
    assert workshop.records.experiments() == []


def test_what_is_registered_cannot_be_deleted(workshop: Workshop) -> None:
    id = workshop.run(settings(1))
    uuid = workshop.checkpoint(id, 1)
    registry = Registry(workshop.home.database)
    registry.register_version(registry.create_model("line").id, uuid)
    with pytest.raises(errors.TrackingException, match="it is a version of a model"):
        control.delete_checkpoint(uuid, workshop.home)
    with pytest.raises(errors.TrackingException, match="is version 1 of model 'line'"):
        control.delete(id, workshop.home)
    assert workshop.kept(id) == [1]
    registry.delete_model("line")
    control.delete(id, workshop.home)
    assert workshop.records.experiments() == []


def test_what_another_experiment_begins_with_cannot_be_deleted(workshop: Workshop) -> None:
    first = workshop.run(settings(1))
    uuid = workshop.checkpoint(first, 1)
    second = workshop.create(settings(1, searcher={"source_checkpoint_uuid": uuid}))
    for delete in (
        lambda: control.delete_checkpoint(uuid, workshop.home),
        lambda: control.delete(first, workshop.home),
    ):
        with pytest.raises(errors.TrackingException, match=f"experiment {second} begin with checkpoint {uuid}"):
            delete()
    workshop.drive(second)
    control.delete(first, workshop.home)
    assert [report.steps_completed for report in workshop.records.history(2) if report.group == "validation"] == [1]


def test_a_deleted_checkpoint_leaves_its_record(workshop: Workshop) -> None:
    id = workshop.run(settings(1))
    uuid = workshop.checkpoint(id, 1)
    control.delete_checkpoint(uuid[:6], workshop.home)
    assert workshop.kept(id) == []
    with pytest.raises(errors.TrackingException, match="was deleted before"):
        control.delete_checkpoint(uuid, workshop.home)


# Copies


def test_a_checkpoint_is_copied_whole(workshop: Workshop, tmp_path: pathlib.Path) -> None:
    id = workshop.run(settings(1))
    (record,) = workshop.records.checkpoints(id)
    target = control.download_checkpoint(record, tmp_path / "copy")
    assert json.loads((target / "metadata.json").read_text()) == record.metadata
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert names >= set(record.resources)
    assert control.download_checkpoint(record, target) == target  # it is there already


def test_a_folder_with_something_else_is_not_written_to(workshop: Workshop, tmp_path: pathlib.Path) -> None:
    id = workshop.run(settings(1))
    (record,) = workshop.records.checkpoints(id)
    with pytest.raises(errors.StorageException, match="is not empty"):
        control.download_checkpoint(record, workshop.code)
    with pytest.raises(errors.StorageException, match="is a file"):
        control.download_checkpoint(record, workshop.code / "program.py")
    assert sorted(path.name for path in workshop.code.iterdir()) == ["program.py"]


def test_a_damaged_checkpoint_is_not_copied(workshop: Workshop, tmp_path: pathlib.Path) -> None:
    id = workshop.run(settings(1))
    (record,) = workshop.records.checkpoints(id)
    file = pathlib.Path(record.path, "state_dict.pth")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(errors.InvalidCheckpointException):
        control.download_checkpoint(record, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


# Logs

DAY = 86400.0


def write_logs(workshop: Workshop, id: int) -> list[pathlib.Path]:
    files = [workshop.home.runner_log(id), workshop.home.run(id, id, 1).log(0), workshop.home.run(id, id, 1).log(1)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("words\n")
    return files


@pytest.mark.parametrize(
    ("days", "after", "stays"), [(3, 2.9, True), (3, 3.1, False), (0, 0.0, False), (-1, 9e5, True)]
)
def test_logs_stay_for_as_long_as_the_config_says(workshop: Workshop, days: int, after: float, stays: bool) -> None:
    id = workshop.run(settings(1, retention_policy={"log_retention_days": days}))
    files = write_logs(workshop, id)
    Catalog(workshop.home.database).change_experiment(id, archived=True)
    ended = workshop.records.experiment(id).ended
    assert ended is not None
    removed = control.remove_expired_logs(workshop.home, ended + after * DAY)
    assert sorted(removed) == ([] if stays else sorted(files))
    assert all(file.exists() is stays for file in files)


def test_the_end_of_a_later_experiment_removes_logs(workshop: Workshop) -> None:
    first = workshop.run(settings(1, retention_policy={"log_retention_days": 0}))
    second = workshop.run(settings(1))
    files, others = write_logs(workshop, first), write_logs(workshop, second)
    workshop.run(settings(1))
    assert not any(file.exists() for file in files)
    assert all(file.exists() for file in others)
    assert workshop.home.code(first).is_dir()
