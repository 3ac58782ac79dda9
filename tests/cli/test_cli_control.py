"""Experiments that run, controlled from another process as people do."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
from command_lab import Lab, eventually

from cases import every
from determined import tracking

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def runner(lab: Lab, id: int) -> psutil.Process:
    process = lab.records.experiment(id).runner
    assert process is not None
    return psutil.Process(process.pid)


def test_an_experiment_is_paused_and_goes_on(lab: Lab) -> None:
    id = lab.create()
    lab.await_reports(id)
    assert "activate" in lab.succeeds("e", "pause", id)
    eventually(lambda: lab.state(id) == "PAUSED")
    assert "PAUSED" in lab.succeeds("e", "list")
    lab.go.touch()
    output = lab.succeeds("e", "create", "--resume", id, "--follow")
    assert f"Experiment {id} is COMPLETED." in output
    assert lab.records.trials(id)[0].run_id == 2


def test_an_experiment_whose_runner_was_killed_shows_it_and_goes_on(lab: Lab) -> None:
    id = lab.create()
    lab.await_reports(id)
    process = runner(lab, id)
    process.send_signal(signal.SIGKILL)
    psutil.wait_procs([process], timeout=10)
    assert "ACTIVE (no runner)" in lab.succeeds("e", "list")
    assert f"det experiment activate {id}" in lab.succeeds("e", "describe", id)
    waiting = lab.det("e", "wait", id)
    assert (waiting.exit_code, f"det experiment activate {id}" in waiting.stderr) == (1, True)
    lab.go.touch()
    output = lab.succeeds("e", "activate", id)
    assert output == f"Experiment {id} runs. Its runner is process {runner(lab, id).pid}.\n"
    assert "COMPLETED" in lab.succeeds("e", "wait", id, "--timeout", 90)


@pytest.mark.thorough
def test_an_experiment_of_a_machine_that_is_gone_is_taken_over_by_force(lab: Lab) -> None:
    id = lab.create("--paused")
    with tracking.ExperimentStore.open(lab.home / "tracking.db", id) as store:
        store.claim(tracking.RunProcess(pid=4242, host="elsewhere"))
    refused = lab.det("e", "delete", id, "--yes")
    assert (refused.exit_code, "process 4242 on 'elsewhere'" in refused.stderr) == (1, True)
    assert "--force" in refused.stderr
    lab.go.touch()
    lab.succeeds("e", "activate", id, "--force")
    assert "COMPLETED" in lab.succeeds("e", "wait", id, "--timeout", 90)


@pytest.mark.thorough
def test_following_notices_that_the_runner_is_gone(lab: Lab) -> None:
    id = lab.create()
    lab.await_reports(id)
    runner(lab, id).send_signal(signal.SIGKILL)
    # Not through `activate`, which would start another one.
    from determined.cli._follow import follow

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(lab.home))
        assert follow(id) == 1


@pytest.mark.parametrize("command", every(2, ["kill", "cancel"]))
def test_an_experiment_is_ended(lab: Lab, command: str) -> None:
    id = lab.create()
    lab.await_reports(id)
    said = lab.succeeds("e", command, id)
    assert ("is being killed" in said) == (command == "kill")
    assert f"`det experiment wait {id}`" in said
    assert lab.succeeds("e", "wait", id, "--timeout", 90) == f"Experiment {id} is CANCELED.\n"


def test_waiting_gives_up_in_time(lab: Lab) -> None:
    id = lab.create()
    result = lab.det("e", "wait", id, "--timeout", 0.1)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "still ACTIVE" in result.stderr


def test_a_failed_experiment_has_status_1_and_says_why_and_can_be_continued(lab: Lab) -> None:
    lab.go.touch()
    id = lab.create(hyperparameters={"x": -1.0})
    waited = lab.det("e", "wait", id)
    assert (waited.exit_code, waited.stdout) == (1, f"Experiment {id} is ERROR.\n")
    assert "ValueError: x is negative" in lab.succeeds("e", "logs", id, "--tail", 5)
    assert "x is negative" in lab.succeeds("t", "describe", lab.records.trials(id)[0].id)
    again = lab.det("e", "continue", id, "--follow")
    assert again.exit_code == 1
    assert "continues with trial" in again.stdout
    assert f"det experiment continue {id}" in again.stdout
    assert lab.records.trials(id)[0].run_id == 2


@pytest.mark.thorough
def test_a_trial_is_killed_and_its_experiment_goes_on(lab: Lab) -> None:
    searcher = {"name": "grid", "metric": "loss", "max_concurrent_trials": 1}
    id = lab.create(hyperparameters={"x": {"type": "categorical", "vals": [1.0, 2.0]}}, searcher=searcher)
    first = lab.await_reports(id)
    lab.succeeds("t", "kill", first.id)
    eventually(lambda: lab.records.trial(first.id).state.value == "CANCELED")
    lab.go.touch()
    assert "COMPLETED" in lab.succeeds("e", "wait", id)
    assert sorted(trial.state.value for trial in lab.records.trials(id)) == ["CANCELED", "COMPLETED"]


def test_a_trial_that_nobody_drives_is_not_called_killed(lab: Lab) -> None:
    id = lab.create("--paused")
    with tracking.ExperimentStore.open(lab.home / "tracking.db", id) as store:
        store.claim()
        new = tracking.NewTrial(request_id="a", hparams={}, seed=1, entrypoint="train.py")
        (trial_id,) = store.commit(tracking.Changeset(new_trials=[new]))
        assert "is being killed" in lab.succeeds("t", "kill", trial_id)
        store.release()
    said = lab.succeeds("t", "kill", trial_id)
    assert "is being killed" not in said
    assert f"`det experiment activate {id}`" in said


def test_logs_are_followed_to_the_end(lab: Lab) -> None:
    lab.go.touch()
    id = lab.create()
    lines = lab.succeeds("e", "logs", id, "--follow").splitlines()
    assert [line.split("] ")[1] for line in lines] == [f"step {step} with x = 1.0" for step in (1, 2, 3)]


def test_more_slots_are_refused_than_there_are_until_there_are(lab: Lab) -> None:
    path = lab.config(resources={"slots_per_trial": 2})
    refused = lab.det("e", "create", path, lab.code, "--slots", 1)
    assert (refused.exit_code, "--slots 2" in refused.stderr) == (1, True)
    lab.succeeds("e", "create", path, lab.code, "--slots", 2, "--paused")
    refused = lab.det("e", "activate", 1, "--slots", 1)
    assert (refused.exit_code, "--slots 2" in refused.stderr) == (1, True)
    assert lab.state(1) == "PAUSED"


@pytest.mark.thorough
def test_several_experiments_are_handled_at_once_and_a_failure_does_not_stop_the_rest(lab: Lab) -> None:
    first, second = lab.create("--paused"), lab.create("--paused")
    result = lab.det("e", "cancel", first, 99, second)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    for id in (first, second):
        assert "CANCELED" in lab.succeeds("e", "wait", id)


def test_a_runner_that_cannot_start_is_told(lab: Lab) -> None:
    id = lab.create("--paused")
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_SLOTS", "many")
        result = lab.det("e", "activate", id)
    assert (result.exit_code, "DET_SLOTS='many'" in result.stderr) == (1, True)
    assert time.monotonic() - began < 30
