"""Experiments that are controlled while a runner in this process drives them."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

from determined.experiment import control
from determined.tracking import RunState
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
