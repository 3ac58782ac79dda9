"""Nodes, actors and whole clusters that are lost in the middle of an experiment."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray_cluster import RayExperiments, ray_cluster, ray_experiments

from determined.experiment import control
from determined.tracking import RunState
from driven import config, eventually, experiments

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.timeout(290),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray, an extra, is not installed"),
]
BATCHES = 40
SETTINGS: dict[str, Any] = {
    "hyperparameters": {"lr": {"type": "double", "minval": 0.05, "maxval": 0.3, "count": 6}, "seconds": 0.1},
    "searcher": {"name": "grid", "metric": "validation_loss", "max_length": {"batches": BATCHES}},
    "min_checkpoint_period": {"batches": 4},
    "max_restarts": 0,
}


@pytest.fixture
def lab(tmp_path: pathlib.Path) -> Iterator[RayExperiments]:
    with ray_experiments(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the same experiment comes to on this machine, undisturbed."""
    with experiments(tmp_path_factory.mktemp("undisturbed")) as made:
        id = made.run(config(**SETTINGS), slots=6)
        return made.outcome(id)


def outlive_a_node(lab: RayExperiments, seconds: float, expected: list[Any]) -> None:
    """Kill a node with trials some time after they have begun; no trial is lost, or counts as failed."""
    with ray_cluster(3) as cluster:
        id = lab.create(config(**SETTINGS))
        lab.running(id, count=3)
        time.sleep(seconds)
        node = random.choice(cluster.worker_nodes())
        victims = [trial.id for trial in lab.records.trials(id) if lab.node_of(id, trial.id) == node]
        cluster.kill_node(node)
        assert control.wait(id, 200, lab.home) is RunState.COMPLETED
        assert lab.outcome(id) == expected
        trials = lab.records.trials(id)
        assert all(trial.restarts == 0 for trial in trials)
        with lab.store(id) as store:
            runs = {trial.id: store.runs(trial.id) for trial in trials}
        assert {id for id, of_trial in runs.items() if len(of_trial) > 1} <= set(victims)
        for of_trial in runs.values():
            assert all("lost" in (run.reason or "") for run in of_trial[:-1])


@pytest.mark.thorough
def test_the_trials_of_a_lost_node_go_on_elsewhere(lab: RayExperiments, expected: list[Any]) -> None:
    outlive_a_node(lab, 1.0, expected)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(int(os.environ.get("DET_NODE_KILLS", "2"))))
def test_nodes_may_be_lost_at_any_moment(lab: RayExperiments, expected: list[Any], seed: int) -> None:
    random.seed(seed)
    outlive_a_node(lab, random.uniform(0.0, 4.0), expected)


@pytest.mark.thorough
def test_an_experiment_outlives_its_cluster(lab: RayExperiments, expected: list[Any]) -> None:
    """The head is gone, and with it the cluster; `activate` goes on with another one, from the record."""
    with ray_cluster(1):
        id = lab.create(config(**SETTINGS))
        lab.running(id, count=2)
    eventually(lambda: not control.is_run(id, lab.home), 60)
    assert lab.state(id) is RunState.ACTIVE
    with ray_cluster(3):
        control.activate(id, lab.home)
        assert control.wait(id, 200, lab.home) is RunState.COMPLETED
        assert lab.outcome(id) == expected


@pytest.mark.thorough
def test_a_new_agent_takes_over_the_node_of_a_killed_one(lab: RayExperiments, expected: list[Any]) -> None:
    with ray_cluster(2) as cluster:
        id = lab.create(config(**SETTINGS))
        lab.running(id, count=2)
        with cluster.joined() as ray:
            for name in [name for name in cluster.actors() if "-node-" in name]:
                ray.kill(ray.get_actor(name))
        assert control.wait(id, 200, lab.home) is RunState.COMPLETED
        assert lab.outcome(id) == expected
        assert all(trial.restarts == 0 for trial in lab.records.trials(id))


@pytest.mark.thorough
def test_trials_get_the_gpus_that_ray_assigns(lab: RayExperiments) -> None:
    """The GPUs are declared only: what is checked is which of them trials are told to use."""
    program = lab.code / "program.py"
    program.write_text(program.read_text() + "\nprint('GPUs', os.environ['CUDA_VISIBLE_DEVICES'])\ntime.sleep(1)\n")
    with ray_cluster(1, num_gpus=2) as cluster:
        searcher = {**SETTINGS["searcher"], "max_length": {"batches": 4}}
        lr = {**SETTINGS["hyperparameters"]["lr"], "count": 2}
        id = lab.create(config(searcher=searcher, hyperparameters={"lr": lr, "seconds": 0.2}))
        assert control.wait(id, 100, lab.home) is RunState.COMPLETED
        from determined.experiment.executors import read_logs

        said = sorted(line.text for line in read_logs(lab.home.experiment(id)) if line.text.startswith("GPUs"))
        assert said == ["GPUs 0", "GPUs 1"]
        assert cluster.address
