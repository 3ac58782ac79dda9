"""`startup-hook.sh` of a program: it runs before each run of a trial, and prepares what the trial needs."""

from __future__ import annotations

import sys

import pytest
from executor_runs import TRIAL, Runs

from determined.experiment.executors import EndReason, InlineExecutor

pytestmark = pytest.mark.process

INSTALL = "mkdir packages; echo 'color = 7' > packages/colors.py; export PYTHONPATH=$PWD/packages:$PYTHONPATH\n"


def test_hook_runs_in_the_code_folder_before_the_trial_and_its_output_is_in_the_log(runs: Runs) -> None:
    runs.write("echo hook of trial $DET_TRIAL_ID; touch prepared\n", "startup-hook.sh")
    spec = runs.trial("echo trial; rm prepared")
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert [line.text for line in runs.lines(spec)] == [f"hook of trial {spec.trial_id}", "trial"]


@pytest.mark.thorough
def test_hook_runs_once_and_all_ranks_of_a_class_find_what_it_installed_and_exported(runs: Runs) -> None:
    runs.write(f"echo hooked; {INSTALL}", "startup-hook.sh")
    runs.write(TRIAL.replace("import torch\n", "import colors\nimport torch\n", 1))
    spec = runs.trial(ranks=2, slot_ids=[0, 1])
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert [line.text for line in runs.lines(spec)].count("hooked") == 1


def test_hook_that_ends_early_with_success_lets_the_trial_begin(runs: Runs) -> None:
    runs.write("cd /; export COLOR=red; exit 0\n", "startup-hook.sh")
    spec = runs.spec("echo $COLOR in $PWD")
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert runs.text(spec) == f"red in {runs.code}\n"


def test_failure_of_the_hook_is_named_and_the_trial_does_not_begin(runs: Runs) -> None:
    fails = f"{sys.executable} -c '1 / 0'; exit 3\n"
    runs.write(fails, "startup-hook.sh")
    spec = runs.spec("echo trial")
    ended = runs.run(spec)
    assert (ended.reason, ended.message) == (EndReason.FAILED, "RuntimeError: startup-hook.sh exited with status 3")
    assert "ZeroDivisionError" in runs.text(spec)
    assert "trial" not in runs.text(spec).split()


def test_stop_ends_a_hook(runs: Runs) -> None:
    runs.write("echo waiting; sleep 600\n", "startup-hook.sh")
    spec = runs.start(runs.spec("echo trial"))
    runs.await_text(spec, "waiting")
    runs.executor.stop(spec.trial_id)
    assert runs.end(spec).reason is EndReason.STOPPED
    assert runs.text(spec) == "waiting\n"


def test_hooks_of_two_trials_run_one_after_the_other(runs: Runs) -> None:
    runs.write("mkdir installing && sleep 0.2 && rmdir installing\n", "startup-hook.sh")
    specs = [runs.start(runs.spec("echo trial")) for _ in range(3)]
    assert {runs.end(spec).reason for spec in specs} == {EndReason.COMPLETED}


def test_trial_within_this_process_finds_what_the_hook_exported(runs: Runs) -> None:
    runs.write(f"{INSTALL}export COLOR=red\n", "startup-hook.sh")
    begin = "import colors, os; assert os.environ['COLOR'] == 'red'"
    runs.write(TRIAL.replace("self.begin()", begin))
    before = list(sys.path)
    executor = InlineExecutor()
    executor.start(runs.trial())
    (ended,) = executor.poll(0.0)
    executor.close()
    assert ended.reason is EndReason.COMPLETED, ended.message
    assert sys.path == before
