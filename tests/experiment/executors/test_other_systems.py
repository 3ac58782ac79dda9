"""Runs on systems without what only Linux has, as far as Linux can stand for one."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Iterator

import pytest
from executor_runs import TRIAL, Runs, await_none, environment

from determined._home import Home
from determined.experiment import config as configs
from determined.experiment import create
from determined.experiment.executors import EndReason, LocalExecutor

pytestmark = pytest.mark.process

WITHOUT_LINUX = """
import pathlib
import determined._processes
import determined.processes._linux
determined.processes._linux.ENABLED = False
determined._processes._BOOT_ID = pathlib.Path("/nowhere")
"""


@pytest.fixture
def elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Runs of an executor that has no processes of Linux, neither here nor in what it starts."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_LINUX)
    monkeypatch.setattr("determined.processes._linux.ENABLED", False)
    monkeypatch.setattr("determined._processes._BOOT_ID", pathlib.Path("/nowhere"))
    variables = environment(tmp_path)
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), variables["PYTHONPATH"]])
    with LocalExecutor(variables) as executor:
        runs = Runs(tmp_path, executor)
        yield runs
        runs.kill_all()
        runs.executor.close()


def test_trial_trains_in_a_process_of_its_own(elsewhere: Runs) -> None:
    elsewhere.write(TRIAL)
    assert elsewhere.run(elsewhere.trial()).reason is EndReason.COMPLETED


def test_run_is_stopped_and_killed(elsewhere: Runs) -> None:
    stopped = elsewhere.start(elsewhere.spec("echo up; exec sleep 600"))
    killed = elsewhere.start(elsewhere.spec("trap '' TERM; echo up; sleep 600 & wait; sleep 600"))
    for spec in (stopped, killed):
        elsewhere.await_text(spec, "up")
    handle = elsewhere.executor.handle(killed.trial_id)
    assert handle is not None
    assert handle["identity"] is None
    elsewhere.executor.stop(stopped.trial_id)
    elsewhere.executor.kill(killed.trial_id)
    assert elsewhere.end(stopped).reason is EndReason.STOPPED
    assert elsewhere.end(killed).reason is EndReason.KILLED
    await_none(elsewhere.folder)


def test_run_of_an_earlier_runner_is_adopted(elsewhere: Runs) -> None:
    spec = elsewhere.start(elsewhere.spec("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"))
    elsewhere.await_text(spec, "up")
    elsewhere.executor.close()
    elsewhere.going.clear()
    with LocalExecutor(environment(elsewhere.folder)) as later:
        later.adopt(spec)
        (exit,) = later.poll(60)
    assert (exit.reason, exit.runner_gone) == (EndReason.STOPPED, True)
    elsewhere.executor = LocalExecutor(environment(elsewhere.folder))


@pytest.mark.parametrize("is_linux", [True, False])
def test_creating_an_experiment_says_what_is_missing(
    is_linux: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("determined.processes._linux.ENABLED", is_linux)
    (tmp_path / "code").mkdir()
    settings = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    with caplog.at_level(logging.WARNING):
        create(configs.from_map(settings), tmp_path / "code", at=Home(tmp_path / "home"))
    assert ("may go on after the trial" in caplog.text) is not is_linux
