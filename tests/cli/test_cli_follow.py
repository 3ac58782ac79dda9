"""`--follow` in a terminal."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
from command_lab import Lab
from command_lab import lab as lab_in
from terminal import terminal

import forking

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ASHA = {
    "name": "async_halving",
    "metric": "loss",
    "time_metric": "epochs",
    "max_time": 4,
    "num_rungs": 2,
    "max_trials": 2,
    "divisor": 2,
    "max_concurrent_trials": 2,
}
RANGE = {"x": {"type": "categorical", "vals": [1.0, 1.5]}, "steps": 4}
CTRL_C = "\x03"
QUESTION = "[d] detach"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""How the cursor vanishes and comes back."""


def test_the_live_view_shows_the_search_and_ctrl_c_asks_then_pauses(lab: Lab) -> None:
    path = lab.config(hyperparameters=RANGE, searcher=ASHA)
    with terminal(lab.home, "e", "create", path, lab.code, "--follow") as screen:
        screen.expect("Created experiment 1, scripts (async_halving).")
        screen.expect("with x =")  # the log
        for part in ("running", "scripts experiment 1, async_halving, ACTIVE", "trials: 1 running, 1 waiting, 0 ended"):
            assert part in screen.drawn
        screen.expect("slots in use: 1")
        screen.expect("best loss 1")
        screen.expect("to 2")  # its next rung
        screen.expect("bracket 0  epochs  2: 0 (+2)  4: 0")
        screen.type(CTRL_C)
        screen.expect(QUESTION)
        screen.type("\r")
        screen.expect("scripts experiment 1, async_halving, ACTIVE")
        screen.type(CTRL_C)
        screen.expect(QUESTION)
        screen.expect("> ")
        screen.type(CTRL_C)
        screen.expect("Experiment 1 is PAUSED.")
        screen.expect("det experiment activate 1")
        assert screen.end() == 0
    assert lab.state(1) == "PAUSED"
    assert lab.processes() == []


@pytest.mark.thorough
def test_two_interrupts_at_once_pause_without_a_question(lab: Lab) -> None:
    lab.create()
    with terminal(lab.home, "e", "activate", 1, "-f") as screen:
        screen.expect("step 1 with x")
        screen.process.send_signal(signal.SIGINT)
        time.sleep(0.01)  # two that come before the first is heard are one
        screen.process.send_signal(signal.SIGINT)
        screen.expect("Experiment 1 is PAUSED.")
        assert screen.end() == 0
    assert lab.state(1) == "PAUSED"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with one experiment that runs for as long as these tests, which watch it and leave it alone."""
    with lab_in(tmp_path_factory.mktemp("held") / "lab") as made:
        searcher = {"name": "random", "metric": "loss", "max_trials": 40, "max_concurrent_trials": 40}
        made.create("--slots", 1, searcher=searcher, hyperparameters={"x": {"type": "int", "minval": 1, "maxval": 999}})
        made.await_reports(1)
        yield made


@pytest.mark.thorough
def test_detaching_leaves_the_experiment_running(held: Lab) -> None:
    with terminal(held.home, "e", "activate", 1, "-f") as screen:
        screen.expect("step 1 with x")
        screen.type(CTRL_C)
        screen.expect(QUESTION)
        screen.type("d\r")
        screen.expect("Experiment 1 keeps running in the background.")
        assert screen.end() == 0
    assert held.state(1) == "ACTIVE"


def test_a_request_to_end_restores_the_cursor_and_leaves_the_experiment_alone(held: Lab) -> None:
    with terminal(held.home, "e", "activate", 1, "-f") as screen:
        screen.expect("step 1 with x")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.end() == 128 + signal.SIGTERM
    assert (screen.raw.count(HIDDEN), screen.raw.count(SHOWN)) == (1, 1)
    assert held.state(1) == "ACTIVE"


def test_the_view_fits_a_small_terminal(held: Lab) -> None:
    with terminal(held.home, "e", "activate", 1, "-f", rows=12, columns=40) as screen:
        screen.expect("and 35 more")
        screen.expect("Ctrl-C")
        screen.expect("Ctrl-C")
    picture = screen.drawn.split("scripts experiment")[1].replace("\r", "").split("\n")
    assert len(picture) <= 12
    assert max(map(len, picture)) <= 40


def test_the_view_shows_what_runs_before_what_waits_and_only_hyperparameters_that_differ(held: Lab) -> None:
    with terminal(held.home, "e", "activate", 1, "-f", rows=40, columns=120) as screen:
        screen.expect("trial  state")
        lines = screen.expect("Ctrl-C").replace("\r", "").split("\n")[1:]
    states = [line.split()[1] for line in lines if line.split()[1:2] in (["running"], ["waiting"])]
    assert states[:2] == ["running", "waiting"]
    assert len(states) > 20
    assert all(line.rstrip().rpartition("  ")[2].startswith("x ") for line in lines if " waiting " in line)


def test_without_a_terminal_an_interrupt_detaches(held: Lab) -> None:
    command = ["-m", "determined.cli", "e", "activate", "1", "-f"]
    environment = {**os.environ, "DET_HOME": str(held.home)}
    with forking.start(command, stdin=forking.DEVNULL, stdout=forking.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            told = ""
            while "best so far" not in told:
                told += process.stdout.readline() or pytest.fail(f"it ended: {told}")
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert "experiment 1 ACTIVE\n" in told
    assert re.findall(r"trial \d+ running: x \d+\n", told)
    assert " at step " not in told  # what is older than the command
    assert "keeps running in the background" in rest
    assert held.state(1) == "ACTIVE"


def test_the_view_ends_with_the_experiment_and_each_picture_is_drawn_at_once(lab: Lab) -> None:
    lab.create()
    with terminal(lab.home, "e", "activate", 1, "-f") as screen:
        screen.expect("step 1 with x")
        lab.go.touch()
        screen.expect("best trial")
        screen.expect("Experiment 1 is COMPLETED.")
        assert screen.end() == 0
    assert screen.raw.count(HIDDEN) == screen.raw.count(SHOWN) > 0
    assert screen.raw.count("\x1b[?2026h") == screen.raw.count("\x1b[?2026l") > 0
