"""Experiments on a Ray cluster of three nodes: the same as on one machine."""

from __future__ import annotations

import importlib.util
import pathlib
import time
from collections.abc import Iterator

import pytest
from ray_cluster import RayCluster, RayExperiments, ray_cluster, ray_experiments

from determined import errors
from determined.experiment import config as configs
from determined.experiment import control, create
from determined.experiment.executors import follow_logs, read_logs
from determined.tracking import RunState
from driven import Experiments, config, eventually, experiments

# Not imported here: Ray reads some of its variables when it is loaded, and the cluster sets them.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.timeout(280),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray, an extra, is not installed"),
]
SLOW = {"seconds": 0.1}
LR = {"type": "double", "minval": 0.05, "maxval": 0.3, "count": 6}
GRID = {"name": "grid", "metric": "validation_loss", "max_length": {"batches": 4}}
LONG = {"name": "single", "metric": "validation_loss", "max_length": {"batches": 200}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3) as made:
        yield made


@pytest.fixture
def lab(tmp_path: pathlib.Path, cluster: RayCluster) -> Iterator[RayExperiments]:
    with ray_experiments(tmp_path) as made:
        yield made


@pytest.fixture
def local_lab(tmp_path: pathlib.Path) -> Iterator[Experiments]:
    with experiments(tmp_path / "local") as made:
        yield made


def test_a_trial_spans_nodes_and_leaves_nothing_on_the_cluster(lab: RayExperiments, cluster: RayCluster) -> None:
    """Three ranks on nodes of two slots: on one of them the record goes through the actor beside the database."""
    program = lab.code / "program.py"
    program.write_text(program.read_text() + "\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    id = lab.create(config(hyperparameters={"global_batch_size": 3}, resources={"slots_per_trial": 3}))
    assert control.wait(id, 200, lab.home) is RunState.COMPLETED
    (trial,) = lab.records.trials(id)
    assert [report.steps_completed for report in lab.records.metrics(trial.id, "validation")] == [2, 4, 6, 8]
    said = {(line.rank, line.text) for line in read_logs(lab.home.trial(id, trial.id)) if line.text.startswith("rank ")}
    assert said == {(rank, f"rank {rank} of 3") for rank in range(3)}
    with lab.store(id) as store:
        handle = store.runs(trial.id)[0].handle
    assert handle is not None
    assert sorted(len(node["slots"]) for node in handle["placement"]["nodes"]) == [1, 2]
    with cluster.joined():
        cluster.wait_until_empty()


@pytest.mark.thorough
def test_a_script_starts_its_ranks_on_all_nodes(lab: RayExperiments) -> None:
    program = lab.code / "program.py"
    program.write_text(program.read_text() + "\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    command = "python3 -m determined.launch.torch_distributed --trial program:Quick"
    settings = config(
        entrypoint=command, hyperparameters={"global_batch_size": 3}, resources={"slots_per_trial": 3}, max_restarts=0
    )
    id = lab.create(settings)
    state = control.wait(id, 200, lab.home)
    said = [line.text for line in read_logs(lab.home.experiment(id))]
    assert state is RunState.COMPLETED, said
    (trial,) = lab.records.trials(id)
    assert trial.steps_completed == 8
    assert {f"[rank={rank}] rank {rank} of 3" for rank in range(3)} <= set(said)


@pytest.mark.thorough
def test_an_elastic_trial_takes_the_slots_that_are_free(lab: RayExperiments) -> None:
    settings = config(hyperparameters={"global_batch_size": 4}, resources={"slots_per_trial": {"min": 2, "max": 4}})
    id = lab.create(settings)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    with lab.store(id) as store:
        handle = store.runs(lab.records.trials(id)[0].id)[0].handle
    assert handle is not None
    assert sum(len(node["slots"]) for node in handle["placement"]["nodes"]) == 4


@pytest.mark.thorough
def test_a_search_is_the_same_as_on_one_machine(lab: RayExperiments, local_lab: Experiments) -> None:
    searcher = {
        "name": "async_halving",
        "metric": "validation_loss",
        "max_length": {"batches": 8},
        "max_trials": 30,
        "num_rungs": 3,
        "divisor": 2,
        "max_concurrent_trials": 1,
    }
    settings = config(hyperparameters={"lr": {**LR, "type": "double"}}, searcher=searcher)
    settings["hyperparameters"]["lr"].pop("count")
    on_ray, here = lab.create(settings), local_lab.create(settings)
    for id, made in ((on_ray, lab), (here, local_lab)):
        assert control.wait(id, 250, made.home) is RunState.COMPLETED
    pairs = list(zip(lab.outcome(on_ray), local_lab.outcome(here), strict=True))
    assert len(pairs) == 30
    for (*theirs, their_history), (*ours, our_history) in pairs:
        assert theirs == ours
        # A trial that the search stops may have trained a few batches more until it hears of it.
        common = min(len(their_history), len(our_history))
        assert common >= 1
        assert their_history[:common] == our_history[:common]
    assert max(len(history) for *_, history in lab.outcome(on_ray)) == 4


@pytest.mark.thorough
def test_logs_of_all_nodes_come_while_trials_run(lab: RayExperiments) -> None:
    id = lab.create(config(hyperparameters={**SLOW, "lr": LR}, searcher={**GRID, "max_length": {"batches": 60}}))
    lab.running(id)
    seen = set()
    deadline = time.monotonic() + 30
    for line in follow_logs(lab.home.experiment(id), lambda: time.monotonic() > deadline):
        seen.add(line.trial)
        if len(seen) == 6:
            break
    assert len(seen) == 6
    assert lab.state(id) is RunState.ACTIVE


@pytest.mark.thorough
def test_pausing_going_on_and_killing(lab: RayExperiments, cluster: RayCluster) -> None:
    id = lab.create(config(hyperparameters=SLOW, searcher=LONG))
    (trial,) = lab.running(id)
    control.pause(id, lab.home)
    eventually(lambda: lab.state(id) is RunState.PAUSED and not control.is_run(id, lab.home), 30)
    with cluster.joined():
        cluster.wait_until_empty()
    steps = lab.records.trial(trial).steps_completed
    control.activate(id, lab.home)
    eventually(lambda: lab.records.trial(trial).steps_completed > steps, 60)
    with lab.store(id) as store:
        assert (store.runs(trial)[-1].started_from_step or 0) > 0
    control.kill(id, lab.home)
    assert control.wait(id, 60, lab.home) is RunState.CANCELED


@pytest.mark.thorough
def test_the_killed_actor_of_a_runner_starts_again_and_goes_on_with_its_runs(
    lab: RayExperiments, cluster: RayCluster
) -> None:
    id = lab.create(config(hyperparameters={**SLOW, "lr": LR}, searcher={**GRID, "max_length": {"batches": 120}}))
    lab.running(id, count=6)
    before = lab.runner(id).pid
    with cluster.joined() as ray:
        (name,) = [name for name in cluster.actors() if name.endswith("runner")]
        ray.kill(ray.get_actor(name), no_restart=False)
    eventually(lambda: control.is_run(id, lab.home) and lab.runner(id).pid != before, 60)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    with lab.store(id) as store:
        assert [len(store.runs(trial.id)) for trial in lab.records.trials(id)] == [1] * 6
    for trial in lab.records.trials(id):
        reports = lab.records.metrics(trial.id, "validation")
        assert [one.steps_completed for one in reports] == list(range(2, 121, 2))


@pytest.mark.thorough
def test_the_record_is_whole_when_the_actor_that_writes_it_is_killed(lab: RayExperiments, cluster: RayCluster) -> None:
    id = lab.create(config(hyperparameters={**SLOW, "lr": LR}, searcher={**GRID, "max_length": {"batches": 100}}))
    lab.running(id, count=6)
    with cluster.joined() as ray:
        (name,) = [name for name in cluster.actors() if name.endswith("records")]
        for _ in range(3):
            ray.kill(ray.get_actor(name), no_restart=False)
            time.sleep(1.0)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    for trial in lab.records.trials(id):
        reports = lab.records.metrics(trial.id, "validation")
        assert [one.steps_completed for one in reports] == list(range(2, 101, 2))


@pytest.mark.thorough
def test_the_first_failure_of_a_trial_on_several_nodes_is_its_reason(lab: RayExperiments) -> None:
    program = lab.code / "program.py"
    program.write_text(
        program.read_text().replace(
            "batch_idx == hparams.get(",
            "self.context.distributed.rank == 2 and batch_idx == hparams.get(",
        )
    )
    settings = config(
        hyperparameters={"global_batch_size": 3, "fails_at": 3}, resources={"slots_per_trial": 3}, max_restarts=0
    )
    id = lab.create(settings)
    assert control.wait(id, 120, lab.home) is RunState.ERROR
    (trial,) = lab.records.trials(id)
    assert "rank 2: RuntimeError: batch 3 is a bad one" in (trial.reason or "")


def test_what_cannot_run_is_refused(tmp_path: pathlib.Path, lab: RayExperiments) -> None:
    too_large = config(hyperparameters={"global_batch_size": 7}, resources={"slots_per_trial": 7})
    with pytest.raises(errors.InvalidExperimentException, match=r"slots_per_trial=7, but the Ray cluster has 6 CPUs"):
        lab.create(too_large)
    with pytest.raises(errors.InvalidExperimentException, match=r"no Ray cluster at '127.0.0.1:1'.*ray start --head"):
        create(configs.from_map(config()), lab.code, at=lab.home, on="ray:127.0.0.1:1")
    with pytest.raises(errors.InvalidExperimentException, match=r"DET_DATABASE=postgresql://"):
        create(configs.from_map(config()), lab.code, at=lab.home, on="ray://head.example:10001")
    assert not lab.records.experiments()
