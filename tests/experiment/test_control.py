"""Experiments that are controlled while a runner in this process drives them."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import pytest

from det_command import run_det
from determined import errors
from determined.experiment import control, wording
from determined.tracking import ExperimentStore, RunProcess, RunState
from told import Workshop, settings


@pytest.fixture
def workshop(tmp_path: pathlib.Path) -> Workshop:
    return Workshop(tmp_path)


@contextlib.contextmanager
def when_logged(actions: dict[str, Callable[[], object]]) -> Iterator[None]:
    """Do something, once each, at the moment at which the runner logs a line that contains a key."""

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for words in [words for words in actions if words in record.getMessage()]:
                actions.pop(words)()

    ear, logger = Ear(), logging.getLogger("determined.experiment")
    before = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(ear)
        logger.setLevel(before)
    assert not actions


def test_an_experiment_that_is_activated_at_the_moment_of_its_pause_runs_on(workshop: Workshop) -> None:
    id = workshop.create(settings(1))
    drivers: list[int | None] = []
    moments = {
        "trial 1: created": lambda: control.pause(id, workshop.home),
        "the experiment is PAUSED": lambda: drivers.append(control.activate(id, workshop.home)),
    }
    with when_logged(moments):
        assert workshop.drive(id) is RunState.COMPLETED
    assert drivers == [os.getpid()]


# Runners of containers and machines that cannot be asked from here

ELSEWHERE = RunProcess(pid=4242, host="elsewhere")


def claim(workshop: Workshop, id: int, seconds_ago: float) -> None:
    """Let a runner in a container that is gone have claimed an experiment."""
    with pytest.MonkeyPatch.context() as patch, ExperimentStore.open(workshop.home.database, id) as store:
        then = time.time() - seconds_ago
        patch.setattr(time, "time", lambda: then)
        store.claim(ELSEWHERE)


@pytest.mark.usefixtures("on_a_file")
def test_an_experiment_whose_container_is_gone_goes_on_without_force(workshop: Workshop) -> None:
    id = workshop.create(settings(1))
    claim(workshop, id, seconds_ago=300)
    assert wording.lacks_runner(workshop.records.experiment(id))
    assert not control.is_run(id, workshop.home)
    assert workshop.drive(id) is RunState.COMPLETED


@pytest.mark.usefixtures("on_a_file")
def test_an_experiment_whose_container_is_gone_is_deleted_without_force(workshop: Workshop) -> None:
    id = workshop.create(settings(1))
    claim(workshop, id, seconds_ago=300)
    control.delete(id, workshop.home)
    assert workshop.records.experiments() == []


def test_an_experiment_of_a_container_that_was_heard_of_just_now_is_left_to_it(workshop: Workshop) -> None:
    id = workshop.create(settings(1))
    claim(workshop, id, seconds_ago=30)
    assert control.is_run(id, workshop.home)
    with pytest.raises(errors.TrackingException, match=r"process 4242 on 'elsewhere'.*--force"):
        workshop.drive(id)


def test_a_runner_renews_its_claim(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("determined.experiment.runner._process.RENEWAL_PERIOD_S", 0.01)
    id = workshop.create(settings(1))
    until: list[float] = []

    def note() -> None:
        runner = workshop.records.experiment(id).runner
        assert runner is not None
        assert runner.alive_until is not None
        until.append(runner.alive_until)

    def wait_for_renewal() -> None:
        note()
        while until[-1] <= until[0]:
            time.sleep(0.01)
            note()

    with when_logged({"trial 1: run 1 starts": wait_for_renewal}):
        assert workshop.drive(id) is RunState.COMPLETED


def test_activating_an_experiment_that_may_run_elsewhere_promises_nothing(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    id = workshop.create(settings(1))
    claim(workshop, id, seconds_ago=30)
    result = run_det("experiment", "activate", id)
    assert result.exit_code == 0
    assert f"Experiment {id} was asked to run. Its runner is process 4242 on elsewhere" in result.stdout
    assert "repeat the command in two minutes" in caplog.text
