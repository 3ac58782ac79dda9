"""The client: experiments, trials, checkpoints and models by calls."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from determined import errors
from determined.experimental import Determined, client
from determined.experimental.client import (
    CheckpointSortBy,
    CheckpointState,
    ExperimentSortBy,
    ExperimentState,
    ModelSortBy,
    OrderBy,
    TrialSortBy,
    TrialState,
)
from determined.tracking import ExperimentStore
from told import KEEP_ALL, Workshop, settings

LOSSES = [[3.0, 1.0, 2.0], [5.0, 4.0, 6.0]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, module_database: str) -> pathlib.Path:
    """A home folder in which experiment 1 has run: trial 1 with the losses 5, 4, 6 and trial 2 with 3, 1, 2."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(folder / "home"))
        patch.setenv("DET_DATABASE", module_database)
        patch.setenv("DET_PROGRESS", "0")
        config = settings(
            name="search",
            labels=["first", "digits"],
            description="two trials",
            hyperparameters={"losses": {"type": "categorical", "vals": LOSSES}},
            searcher={"name": "grid", "max_length": {"batches": 3}},
            **KEEP_ALL,
        )
        workshop = Workshop(folder)
        workshop.run(config)
        log = workshop.home.run(1, 1, 1).log(0)
        lines = [f"2026-01-01T00:00:0{n}.000000Z\t{'stderr' if n == 2 else 'stdout'}\tline {n}\n" for n in range(4)]
        log.write_text("".join(lines))
        log.with_name("rank-1.log").write_text("2026-01-01T00:00:09.000000Z\tstdout\tof rank 1\n")
    return folder / "home"


@pytest.fixture
def known(finished: pathlib.Path, module_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what has finished; such tests change nothing."""
    monkeypatch.setenv("DET_HOME", str(finished))
    monkeypatch.setenv("DET_DATABASE", module_database)


@pytest.fixture
def workshop(tmp_path: pathlib.Path) -> Workshop:
    return Workshop(tmp_path)


# Looking


def test_an_experiment_tells_of_itself(known: None) -> None:
    experiment = client.get_experiment(1)
    assert (experiment.id, experiment.name, experiment.description) == (1, "search", "two trials")
    assert experiment.labels == {"first", "digits"}
    assert experiment.state is ExperimentState.COMPLETED
    assert experiment.progress == 1.0
    assert not experiment.archived
    assert experiment.config["searcher"]["name"] == "grid"
    assert experiment.wait() is ExperimentState.COMPLETED
    assert repr(experiment) == "Experiment(id=1, name='search', state=COMPLETED)"


def test_states_are_called_as_in_determined(known: None) -> None:
    assert client.get_experiment(1).state.value == "STATE_COMPLETED"
    assert client.get_trial(1).state is TrialState.COMPLETED


def test_old_programs_compare_with_states_of_a_cluster(workshop: Workshop) -> None:
    workshop.create(settings())
    state = client.get_experiment(1).state
    assert state is ExperimentState.RUNNING
    assert state not in (ExperimentState.QUEUED, ExperimentState.DELETED)


def test_a_config_that_was_given_is_a_copy(known: None) -> None:
    experiment = client.get_experiment(1)
    experiment.config["searcher"]["name"] = "changed"
    assert experiment.config["searcher"]["name"] == "grid"


def test_trials_come_in_the_order_asked_for(known: None) -> None:
    experiment = client.get_experiment(1)
    assert [trial.id for trial in experiment.list_trials()] == [1, 2]
    assert [trial.id for trial in experiment.get_trials(TrialSortBy.ID, OrderBy.DESCENDING)] == [2, 1]
    assert [trial.id for trial in experiment.list_trials(TrialSortBy.BEST_VALIDATION_METRIC)] == [2, 1]
    assert experiment.await_first_trial().id == 1


def test_a_trial_tells_of_itself(known: None) -> None:
    trial = client.get_trial(2)
    assert (trial.id, trial.experiment_id, trial.steps_completed, trial.restarts) == (2, 1, 3, 0)
    assert trial.hparams["losses"] == LOSSES[0]
    summary = trial.summary_metrics["validation_metrics"]["validation_loss"]
    assert summary == {"count": 3, "last": 2.0, "min": 1.0, "max": 3.0}
    assert trial.summary_metrics["avg_metrics"]["loss"]["count"] == 3


def test_metrics_come_by_group_and_step(known: None) -> None:
    trial = client.get_trial(2)
    found = list(trial.iter_metrics("validation"))
    assert [one.metrics["validation_loss"] for one in found] == LOSSES[0]
    assert [(one.trial_id, one.steps_completed, one.group) for one in found] == [
        (2, n, "validation") for n in (1, 2, 3)
    ]
    assert found[0].end_time.tzinfo is datetime.UTC
    assert list(trial.stream_metrics("validation")) == found
    assert {one.group for one in trial.iter_metrics()} == {"training", "validation"}


def test_metrics_and_logs_have_their_older_names(known: None) -> None:
    trial = client.get_trial(2)
    training, validation = list(trial.iter_metrics("training")), list(trial.iter_metrics("validation"))
    assert list(trial.stream_training_metrics()) == list(client.stream_trials_training_metrics([2])) == training
    assert list(trial.stream_validation_metrics()) == list(client.stream_trials_validation_metrics([2])) == validation
    assert list(client.get_trial(1).logs(tail=1)) == ["of rank 1\n"]


def test_metrics_of_several_trials_come_by_trial(known: None) -> None:
    found = list(client.iter_trials_metrics([2, 1], "validation"))
    assert [(one.trial_id, one.steps_completed) for one in found] == [(id, n) for id in (2, 1) for n in (1, 2, 3)]
    assert list(client.stream_trials_metrics([2, 1], "validation")) == found


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ["line 0\n", "line 1\n", "line 2\n", "line 3\n", "of rank 1\n"]),
        ({"head": 2}, ["line 0\n", "line 1\n"]),
        ({"tail": 2}, ["line 3\n", "of rank 1\n"]),
        ({"tail": 1, "rank_ids": [0]}, ["line 3\n"]),
        ({"stdtypes": ["stderr"]}, ["line 2\n"]),
        ({"stdtypes": ["stdout"], "head": 3}, ["line 0\n", "line 1\n", "line 3\n"]),
        ({"follow": True, "tail": 1}, ["of rank 1\n"]),
        ({"timestamp_after": datetime.datetime(2026, 1, 1, 0, 0, 3, tzinfo=datetime.UTC)}, ["line 3\n", "of rank 1\n"]),
        ({"timestamp_before": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}, ["line 0\n"]),
    ],
)
def test_logs_can_be_chosen_from(known: None, options: dict[str, object], found: list[str]) -> None:
    assert list(client.get_trial(1).iter_logs(**options)) == found  # type: ignore[arg-type]  # one call for all


def test_logs_cannot_be_cut_at_both_ends(known: None) -> None:
    trial = client.get_trial(1)
    for options in ({"head": 1, "tail": 1}, {"head": 1, "follow": True}):
        with pytest.raises(ValueError, match="leave one of them out"):
            trial.iter_logs(**options)  # type: ignore[arg-type]  # wrong on purpose


def places(checkpoints: list[client.Checkpoint]) -> list[tuple[int, int]]:
    return [(one.trial_id, one.steps_completed) for one in checkpoints]


def test_checkpoints_come_the_best_first(known: None) -> None:
    experiment = client.get_experiment(1)
    ranked = [(2, 2), (2, 3), (2, 1), (1, 2), (1, 1), (1, 3)]
    assert places(experiment.list_checkpoints()) == ranked
    assert places(experiment.list_checkpoints(max_results=2)) == ranked[:2]
    assert places(experiment.list_checkpoints(CheckpointSortBy.SEARCHER_METRIC, OrderBy.DESC)) == [
        (1, 3), (1, 1), (1, 2), (2, 1), (2, 3), (2, 2)
    ]  # fmt: skip
    assert places(experiment.top_n_checkpoints(3)) == ranked[:3]
    assert places([experiment.top_checkpoint()]) == ranked[:1]


def test_checkpoints_can_be_sorted_by_anything(known: None) -> None:
    experiment = client.get_experiment(1)
    by_batch = places(experiment.list_checkpoints(CheckpointSortBy.BATCH_NUMBER, OrderBy.DESCENDING))
    assert [steps for _, steps in by_batch] == [3, 3, 2, 2, 1, 1]
    by_metric = places(experiment.list_checkpoints("weight", OrderBy.ASCENDING, 2))
    assert [steps for _, steps in by_metric] == [1, 1]
    uuids = [one.uuid for one in experiment.list_checkpoints(CheckpointSortBy.UUID)]
    assert uuids == sorted(uuids)
    assert places([experiment.top_checkpoint("weight", smaller_is_better=True)])[0][1] == 1


def test_the_checkpoints_of_a_trial_are_its_own(known: None) -> None:
    trial = client.get_trial(1)
    assert places(trial.list_checkpoints()) == [(1, 2), (1, 1), (1, 3)]
    assert places([trial.top_checkpoint()]) == [(1, 2)]
    assert places([trial.select_checkpoint(best=True)]) == [(1, 2)]
    assert places([trial.select_checkpoint(latest=True)]) == [(1, 3)]
    first = trial.list_checkpoints(CheckpointSortBy.BATCH_NUMBER)[0]
    assert trial.select_checkpoint(uuid=first.uuid[:8]).uuid == first.uuid


def test_a_checkpoint_tells_how_it_came_about(known: None) -> None:
    checkpoint = client.get_experiment(1).top_checkpoint()
    assert checkpoint.state is CheckpointState.COMPLETED
    assert checkpoint.training.trial_id == 2
    assert checkpoint.training.hparams["losses"] == LOSSES[0]
    assert checkpoint.training.experiment_config["name"] == "search"
    assert checkpoint.training.validation_metrics["avgMetrics"]["validation_loss"] == 1.0
    assert [one.metrics["weight"] for one in checkpoint.get_metrics("validation")] == [2.5]
    assert {one.group for one in checkpoint.get_metrics()} == {"training", "validation"}
    assert checkpoint.metadata["steps_completed"] == 2
    assert "state_dict.pth" in checkpoint.resources
    assert client.get_checkpoint(checkpoint.uuid[:8]).uuid == checkpoint.uuid


def test_a_checkpoint_can_be_downloaded(known: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = client.get_experiment(1).top_checkpoint()
    assert checkpoint.download() == str(tmp_path / "checkpoints" / checkpoint.uuid)
    assert checkpoint.download() == str(tmp_path / "checkpoints" / checkpoint.uuid)
    chosen = pathlib.Path(checkpoint.download(tmp_path / "chosen", mode=client.DownloadMode.MASTER))
    assert json.loads((chosen / "metadata.json").read_text())["steps_completed"] == 2


def test_a_checkpoint_can_be_loaded(known: None, tmp_path: pathlib.Path) -> None:
    checkpoint = client.get_experiment(1).top_checkpoint()
    assert checkpoint.load().model.weight.item() == 2.5  # type: ignore[attr-defined]  # of the trial's own class
    folder = checkpoint.download(tmp_path / "copy")
    loaded = client.Checkpoint.load_from_path(folder)
    assert loaded.model.weight.item() == 2.5  # type: ignore[attr-defined]  # of the trial's own class


def test_experiments_can_be_filtered(known: None) -> None:
    def found(**options: object) -> list[int]:
        return [one.id for one in client.list_experiments(**options)]  # type: ignore[arg-type]  # one call for all

    assert found() == found(name="sear") == found(labels=["first"]) == found(experiment_ids=[1, 2]) == [1]
    assert found(states=[ExperimentState.COMPLETED]) == found(sort_by=ExperimentSortBy.START_TIME) == [1]
    assert found(name="other") == found(labels=["first", "second"]) == found(experiment_ids=[2]) == []
    assert found(states=[ExperimentState.ERROR]) == found(states=[]) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: client.get_experiment(77), "there is no experiment 77"),
        (lambda: client.get_trial(77), "there is no trial 77"),
        (lambda: client.get_checkpoint("nope"), "there is no checkpoint 'nope'"),
        (lambda: client.get_model("nope"), "there is no model 'nope'"),
        (lambda: client.get_experiment(1).list_checkpoints("weight"), "whether a smaller 'weight' is better"),
        (lambda: client.get_experiment(1).list_checkpoints(max_results=0), "max_results=0"),
        (lambda: client.get_experiment(1).list_checkpoints(order_by="asc"), r"pass one of client\.OrderBy\.ASC"),
        (lambda: client.get_experiment(1).list_checkpoints(sort_by=3), r"client\.CheckpointSortBy\.UUID"),
        (lambda: client.get_experiment(1).list_trials(sort_by="id"), r"client\.TrialSortBy\.ID"),
        (lambda: client.list_experiments(labels="first"), r"labels='first'\): pass a list of strings"),
        (lambda: client.list_experiments(states=["COMPLETED"]), r"client\.ExperimentState\.ACTIVE"),
        (lambda: client.get_experiment(1).set_labels("first"), "pass a list of strings"),
        (lambda: client.get_experiment(1).top_n_checkpoints(0), "limit=0"),
        (lambda: client.get_experiment(1).top_checkpoint("none", True), "has no best checkpoint"),
        (lambda: client.get_trial(1).select_checkpoint(), "exactly one of the three"),
        (
            lambda: client.get_trial(1).select_checkpoint(uuid=client.get_trial(2).top_checkpoint().uuid),
            "belongs to trial 2",
        ),
        (lambda: client.get_trial(1).kill(), "it has ended"),
        (lambda: client.get_experiment(1).pause(), "it has ended"),
        (lambda: client.get_experiment(1).activate(), "it has ended"),
        (lambda: client.get_experiment(1).cancel(), "it has ended"),
        (lambda: client.get_experiment(1).kill(), "it has ended"),
        (lambda: client.get_experiment(1).continue_(), "all trials of experiment 1 have completed"),
        (lambda: client.create_experiment(3), "pass a dict, a string of YAML, or the path"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: client.create_experiment("no/such.yaml"), "it cannot be read"),
        (lambda: client.create_experiment("searcher: {name: singel}"), "single"),
        (lambda: client.create_experiment(settings(), "no/such/folder"), "no/such/folder"),
        (lambda: client.create_experiment(settings(), includes="utils.py"), r"pass a list .* \['utils.py'\]"),
        (lambda: client.create_experiment(settings(), project_id=12), "projects are labels here"),  # type: ignore[arg-type]  # as on a cluster
        (lambda: client.get_workspace(""), "at least one character"),
        (lambda: client.get_trial(1).top_checkpoint().download(mode="fast"), "'fast' is not a valid DownloadMode"),
    ],
)
def test_mistakes_are_explained(known: None, wrong: object, words: str) -> None:
    with pytest.raises((errors.DeterminedException, ValueError, TypeError), match=words):
        wrong()  # type: ignore[operator]  # a call without arguments
    assert len(client.list_experiments()) == 1


# Old programs


def test_logging_in_is_for_old_programs(known: None) -> None:
    with pytest.warns(UserWarning, match=r"login\(\) has no effect"):
        client.login(master="http://localhost:8080", user="determined", password="")


def test_old_programs_construct_what_offers_the_same_calls(known: None) -> None:
    with pytest.warns(UserWarning, match="needs no master"):
        determined = Determined(master="localhost", user="determined")
    assert determined.get_experiment(1).id == determined.get_trial(1).experiment_id == 1
    assert [one.id for one in Determined().list_experiments()] == [1]
    calls = [name for name in dir(Determined) if not name.startswith("_")]
    assert sorted(calls) == sorted(set(calls) & set(client.__all__))


# Changing


def test_people_can_say_what_they_like_of_an_experiment(workshop: Workshop) -> None:
    workshop.create(settings(labels=["a"]), paused=True)
    experiment = client.get_experiment(1)
    experiment.set_name("new name")
    experiment.set_description("new words")
    experiment.set_notes("noted")
    experiment.add_label("b")
    experiment.remove_label("a")
    again = client.get_experiment(1)
    assert (again.name, again.description, again.notes, again.labels) == ("new name", "new words", "noted", {"b"})
    assert (experiment.name, experiment.labels) == (again.name, again.labels)
    again.set_labels({"x", "y"})
    assert experiment.reload().labels == {"x", "y"}
    with pytest.raises(errors.TrackingException, match="has no label 'a'"):
        experiment.remove_label("a")


def test_projects_of_workspaces_are_labels(workshop: Workshop) -> None:
    project = client.create_workspace("vision").create_project("digits")
    made = client.create_experiment(settings(), workshop.code, project_id=project.id, paused=True)
    assert (made.config["workspace"], made.config["project"], made.project_id) == ("vision", "digits", "vision/digits")
    client.create_experiment(settings(), workshop.code, paused=True)
    assert [one.id for one in client.list_experiments(project_id=project.id)] == [1]
    assert [one.name for one in client.list_workspaces()] == ["vision"]
    assert client.get_workspace("vision").list_projects() == [project]
    assert client.get_workspace("vision").get_project("digits") == project


def test_files_and_folders_can_be_included(workshop: Workshop, tmp_path: pathlib.Path) -> None:
    (tmp_path / "utils").mkdir()
    for name in ("utils/tools.py", "data.csv"):
        (tmp_path / name).write_text(name)
    client.create_experiment(settings(), workshop.code, [tmp_path / "utils", tmp_path / "data.csv"], paused=True)
    copy = workshop.home.code(1)
    assert [(copy / name).read_text() for name in ("utils/tools.py", "data.csv")] == ["utils/tools.py", "data.csv"]


def test_an_archived_experiment_is_not_listed(workshop: Workshop) -> None:
    workshop.create(settings(), paused=True)
    experiment = client.get_experiment(1)
    experiment.archive()
    assert experiment.archived
    assert client.list_experiments() == []
    assert len(client.list_experiments(include_archived=True)) == 1
    experiment.unarchive()
    assert len(client.list_experiments()) == 1


def test_a_deleted_experiment_is_gone(workshop: Workshop) -> None:
    workshop.run(settings(1))
    client.get_experiment(1).delete()
    assert client.list_experiments() == []


def test_an_experiment_that_nobody_runs_is_not_waited_for(workshop: Workshop) -> None:
    workshop.create(settings(), paused=True)
    experiment = client.get_experiment(1)
    with pytest.raises(errors.TrackingException, match="nobody runs it"):
        experiment.wait()
    with pytest.raises(errors.TrackingException, match="has no trial and no runner"):
        experiment.await_first_trial()


def test_the_metadata_of_a_checkpoint_can_change(workshop: Workshop) -> None:
    workshop.run(settings(1))
    checkpoint = client.get_trial(1).top_checkpoint()
    checkpoint.add_metadata({"stage": "production", "score": 0.9})
    assert client.get_checkpoint(checkpoint.uuid).metadata["stage"] == checkpoint.metadata["stage"] == "production"
    checkpoint.remove_metadata(["stage"])
    assert "stage" not in client.get_checkpoint(checkpoint.uuid).metadata
    assert checkpoint.metadata["steps_completed"] == 1
    with pytest.raises(errors.TrackingException, match=r"has no metadata \['stage'\]"):
        checkpoint.remove_metadata(["stage"])


def test_a_deleted_checkpoint_cannot_be_used(workshop: Workshop, tmp_path: pathlib.Path) -> None:
    workshop.run(settings(1))
    checkpoint = client.get_trial(1).top_checkpoint()
    checkpoint.delete()
    assert checkpoint.state is CheckpointState.DELETED
    assert client.get_trial(1).list_checkpoints() == []
    for use in (lambda: checkpoint.download(tmp_path / "copy"), checkpoint.load, checkpoint.delete):
        with pytest.raises(errors.DeterminedException, match="was deleted"):
            use()


# Models


def test_a_model_has_versions(workshop: Workshop) -> None:
    workshop.run(settings(2, **KEEP_ALL))
    first, second = client.get_trial(1).list_checkpoints(CheckpointSortBy.BATCH_NUMBER)
    model = client.create_model("line", "a line", {"for": "tests"}, ["small"])
    assert model.get_version() is None
    assert model.register_version(first.uuid, name="v1", comment="the first").model_version == 1
    assert model.register_version(second).model_version == 2
    versions = client.get_model("line").list_versions()
    assert [(one.model_version, one.checkpoint.uuid) for one in versions] == [(2, second.uuid), (1, first.uuid)]
    assert [one.model_version for one in model.get_versions(OrderBy.ASCENDING)] == [1, 2]
    newest, oldest = model.get_version(), model.get_version(1)
    assert newest is not None
    assert oldest is not None
    assert (newest.model_version, oldest.name, oldest.comment) == (2, "v1", "the first")
    with pytest.raises(errors.TrackingException, match="there is no version 3"):
        model.get_version(3)


def test_a_version_keeps_its_checkpoint(workshop: Workshop) -> None:
    workshop.run(settings(1))
    checkpoint = client.get_trial(1).top_checkpoint()
    version = client.create_model("line").register_version(checkpoint.uuid)
    with pytest.raises(errors.TrackingException, match="it is a version of a model"):
        checkpoint.delete()
    with pytest.raises(errors.TrackingException, match="version 1 of model 'line'"):
        client.get_experiment(1).delete()
    version.delete()
    checkpoint.delete()


def test_people_can_say_what_they_like_of_models(workshop: Workshop) -> None:
    workshop.run(settings(1))
    model = client.create_model("line", metadata={"a": 1})
    model.set_description("words")
    model.set_labels(["x"])
    model.add_metadata({"b": 2})
    model.remove_metadata(["a"])
    version = model.register_version(client.get_trial(1).top_checkpoint().uuid)
    version.set_name("final")
    version.set_notes("noted")
    again = client.get_model(model.model_id)
    assert (again.description, again.labels, again.metadata) == ("words", ["x"], {"b": 2})
    found = again.get_version(1)
    assert found is not None
    assert (found.name, found.notes, found.model_name) == ("final", "noted", "line")
    with pytest.raises(errors.TrackingException, match="has no metadata"):
        model.remove_metadata(["a"])


def test_models_are_listed(workshop: Workshop) -> None:
    for name in ("b", "a", "c"):
        client.create_model(name, f"the letter {name}")
    client.get_model("c").archive()
    assert [model.name for model in client.list_models()] == ["a", "b"]
    by_time = client.list_models(ModelSortBy.CREATION_TIME, OrderBy.DESCENDING, include_archived=True)
    assert [model.name for model in by_time] == ["c", "a", "b"]
    assert [model.name for model in client.list_models(description="letter b")] == ["b"]
    client.get_model("a").delete()
    assert [model.name for model in client.list_models(name="a")] == []
    with pytest.raises(errors.TrackingException, match="there is a model named 'b' already"):
        client.create_model("b")


# Running


SCRIPT = """
import determined as det
x = det.get_cluster_info().trial.hparams["x"]
with det.core.init() as core:
    for step in (1, 2, 3):
        core.train.report_validation_metrics(step, {"validation_loss": x / step})
        with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "file").write_text(str(step))
    print("done with", x)
"""


@pytest.fixture
def own_processes() -> Iterator[None]:
    """Let no process of the test's home folder outlive it."""
    yield
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_own = process.environ().get("DET_HOME") == os.environ["DET_HOME"]
            if is_own and process.pid != os.getpid():
                process.kill()


running = pytest.mark.usefixtures("own_processes")


@running
def test_an_experiment_is_created_and_runs_by_itself(tmp_path: pathlib.Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "script.py").write_text(SCRIPT)
    text = (
        "name: mine\n"
        "entrypoint: python3 script.py\n"
        "hyperparameters: {x: {type: categorical, vals: [6, 3]}}\n"
        "searcher: {name: grid, metric: validation_loss}\n"
    )
    experiment = client.create_experiment(text, tmp_path / "code", slots=2)
    assert experiment.wait(timeout=100) is ExperimentState.COMPLETED
    trials = {trial.hparams["x"]: trial for trial in experiment.list_trials()}
    assert list(trials[3].iter_logs(follow=True)) == ["done with 3\n"]
    assert places(experiment.list_checkpoints()) == [(trials[3].id, 3), (trials[6].id, 3)]
    folder = experiment.top_checkpoint().download(tmp_path / "best")
    assert pathlib.Path(folder, "file").read_text() == "3"


@running
def test_an_experiment_is_controlled_from_another_process(tmp_path: pathlib.Path) -> None:
    config = {"entrypoint": "echo started; exec sleep 1000", "searcher": {"name": "single", "metric": "loss"}}
    experiment = client.create_experiment(config)
    trial = experiment.await_first_trial()
    assert next(trial.iter_logs(follow=True)) == "started\n"
    with pytest.raises(TimeoutError, match="still ACTIVE"):
        experiment.wait(timeout=0.1)
    with pytest.raises(errors.TrackingException, match="is at work on it"):
        experiment.delete()
    trial.kill()
    assert experiment.wait(timeout=60) is ExperimentState.CANCELED
    assert trial.reload().state is TrialState.CANCELED


@pytest.mark.thorough
@running
def test_a_paused_experiment_waits_for_its_activation(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{entrypoint: 'true', searcher: {name: single, metric: loss}, environment: {image: some/thing}}")
    with pytest.warns(UserWarning, match=r"environment\.image"):
        experiment = client.create_experiment(path, paused=True)
    assert experiment.state is ExperimentState.PAUSED
    with ExperimentStore.open(pathlib.Path(tmp_path / "det-home" / "tracking.db"), experiment.id) as store:
        assert store.runner() is None
    experiment.activate()
    assert experiment.wait(timeout=60) is ExperimentState.COMPLETED


def test_importing_the_client_costs_no_torch() -> None:
    program = "import sys; from determined.experimental import client, Determined; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
