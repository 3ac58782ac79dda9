"""Experiments on a real Slurm: jobs of its queue in the place of processes of this machine."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from determined.experiment import control
from determined.experiment.executors import read_logs
from determined.experiment.wording import state_text
from determined.tracking import RunRecord, RunState
from driven import Experiments, config, eventually, experiments
from slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.thorough, pytest.mark.timeout(280)]
SLOW = {"seconds": 0.2}


@pytest.fixture
def lab(tmp_path: pathlib.Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Experiments]:
    monkeypatch.setenv("DET_HOME", str(tmp_path / "home"))
    with experiments(tmp_path) as made:
        yield made
        slurm.end_jobs()


def long(batches: int = 60, **changes: Any) -> dict[str, Any]:
    searcher = {"name": "single", "metric": "validation_loss", "max_length": {"batches": batches}}
    return config(hyperparameters=SLOW, searcher=searcher, **changes)


def steps(lab: Experiments, id: int) -> int:
    trials = lab.records.trials(id)
    return trials[0].steps_completed if trials else 0


def runs(lab: Experiments, id: int) -> list[RunRecord]:
    with lab.store(id) as store:
        return [run for trial in store.trials() for run in store.runs(trial.id)]


def job(lab: Experiments, id: int) -> str:
    """Return the job of the latest run of the only trial, once it trains."""
    handle = eventually(lambda: (found := runs(lab, id)) and found[-1].handle)
    return str(handle["job"])


def test_a_trial_runs_as_a_job(lab: Experiments) -> None:
    id = lab.run(config(), on="slurm")
    (trial,) = lab.records.trials(id)
    assert (lab.state(id), trial.state) == (RunState.COMPLETED, RunState.COMPLETED)
    assert lab.records.experiment(id).cluster == "slurm"
    assert json.loads(lab.home.run(id, trial.id, 1).job.read_text())["job"].isdigit()
    assert list(read_logs(lab.home.trial(id, trial.id)))


def test_ranks_on_two_nodes_meet_on_the_first_and_save_when_they_are_asked_to(lab: Experiments, slurm: Slurm) -> None:
    settings = long(40, resources={"slots_per_trial": 4}, slurm={"slots_per_node": 2})
    settings["hyperparameters"]["global_batch_size"] = 4
    id = lab.create(settings, on="slurm")
    first = job(lab, id)
    assert "NumNodes=2" in slurm.run("scontrol", "show", "job", first)
    eventually(lambda: steps(lab, id) >= 4)
    control.pause(id, lab.home)
    eventually(lambda: lab.state(id) is RunState.PAUSED)
    control.activate(id, lab.home)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    paused, last = runs(lab, id)
    assert (paused.reason, last.reason) == ("stopped", "completed")
    assert last.started_from_step >= 4


def test_a_paused_trial_goes_on_where_it_was(lab: Experiments, slurm: Slurm) -> None:
    id = lab.create(long(), on="slurm")
    eventually(lambda: steps(lab, id) >= 4)
    control.pause(id, lab.home)
    eventually(lambda: lab.state(id) is RunState.PAUSED)
    control.activate(id, lab.home)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    first, second = runs(lab, id)
    assert second.started_from_step >= 4
    assert first.reason == "stopped"


@pytest.mark.parametrize("how", ["requeue", "warning", "preemption"])
def test_an_interrupted_job_saves_and_the_trial_goes_on(lab: Experiments, slurm: Slurm, how: str) -> None:
    id = lab.create(long(min_checkpoint_period={"batches": 1000}, max_restarts=0), on="slurm")
    first = job(lab, id)
    eventually(lambda: steps(lab, id) >= 4)
    command = {
        "requeue": ["scontrol", "requeue", first],
        "warning": ["scancel", "--batch", "--signal=USR1", first],
        "preemption": ["scancel", "--full", "--signal=TERM", first],
    }
    slurm.run(*command[how])
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    interrupted, last = runs(lab, id)
    assert "Slurm interrupted it" in str(interrupted.reason)
    assert last.started_from_step >= 4
    assert lab.records.trials(id)[0].restarts == 0
    assert first not in slurm.jobs()


def test_workers_of_data_loaders_do_not_die_of_a_signal_to_all_processes(lab: Experiments, slurm: Slurm) -> None:
    program = lab.code / "program.py"
    program.write_text(program.read_text().replace("shuffle=True", "shuffle=True, num_workers=2"))
    id = lab.create(long(min_checkpoint_period={"batches": 1000}), on="slurm")
    first = job(lab, id)
    eventually(lambda: steps(lab, id) >= 4)
    slurm.run("scontrol", "requeue", first)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    assert runs(lab, id)[1].started_from_step >= 4


def test_a_job_canceled_by_hand_counts_as_a_killed_run(lab: Experiments, slurm: Slurm) -> None:
    id = lab.create(long(max_restarts=0), on="slurm")
    first = job(lab, id)
    eventually(lambda: steps(lab, id) >= 4)
    slurm.run("scancel", first)
    assert control.wait(id, 60, lab.home) is RunState.ERROR
    assert "killed: its job was canceled" in str(runs(lab, id)[0].reason)


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_an_experiment_can_be_ended_early(lab: Experiments, slurm: Slurm, how: str) -> None:
    id = lab.create(long(), on="slurm")
    eventually(lambda: steps(lab, id) >= 4)
    (control.cancel if how == "cancel" else control.kill)(id, lab.home)
    assert control.wait(id, 60, lab.home) is RunState.CANCELED
    eventually(lambda: not slurm.jobs())


def test_a_job_in_the_queue_is_shown_as_queued_and_can_be_killed(lab: Experiments, slurm: Slurm) -> None:
    id = lab.create(long(slurm={"sbatch_args": ["--begin=now+1hour"]}), on="slurm")
    (waiting,) = eventually(slurm.jobs)
    assert slurm.jobs()[waiting] == "PENDING"
    (trial,) = eventually(lambda: [one for one in lab.records.trials(id) if one.run_id])
    assert state_text(trial) == "ACTIVE (queued)"
    control.kill(id, lab.home)
    assert control.wait(id, 60, lab.home) is RunState.CANCELED
    eventually(lambda: not slurm.jobs())


def test_a_job_goes_on_without_its_runner_and_the_next_one_adopts_it(lab: Experiments) -> None:
    id = lab.create(long(100), on="slurm")
    job(lab, id)
    eventually(lambda: steps(lab, id) >= 4)
    lab.kill_runner(id)
    before = steps(lab, id)
    eventually(lambda: steps(lab, id) >= before + 4)
    control.activate(id, lab.home)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
    (only,) = runs(lab, id)
    assert only.reason == "completed"


@pytest.mark.torture
def test_a_controller_that_is_away_ends_nothing(lab: Experiments, slurm: Slurm) -> None:
    id = lab.create(long(), on="slurm")
    job(lab, id)
    slurm.stop_controller()
    try:
        before = steps(lab, id)
        eventually(lambda: steps(lab, id) >= before + 4)
        control.pause(id, lab.home)  # the order goes by the shared folder
        eventually(lambda: lab.state(id) is RunState.PAUSED)
    finally:
        slurm.start_controller()
    control.activate(id, lab.home)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED


def test_a_search_gives_the_same_as_on_this_machine(lab: Experiments, tmp_path: pathlib.Path) -> None:
    lr = {"type": "double", "minval": 0.1, "maxval": 0.3, "count": 3}
    searcher = {"name": "grid", "metric": "validation_loss", "max_length": {"batches": 4}}
    settings = config(hyperparameters={"lr": lr}, searcher=searcher)
    there = lab.run(settings, on="slurm", timeout=200)
    here = lab.run(settings, slots=2, timeout=200)
    assert lab.outcome(there) == lab.outcome(here)
