"""Wherever a process dies while it saves or deletes a checkpoint, only whole checkpoints are left to be found."""

from __future__ import annotations

import json
import os
import pathlib

import findings
import pytest
from sweep import NEW, OLD, Call, Sweep, why_not
from training import RunExit
from training import train as run_program

import forking
from determined import tracking

PROGRAM = pathlib.Path(__file__).with_name("core_program.py")
ARGUMENTS = ["--length=7", "--aggregation=4"]  # two checkpoints, the first with gradients in it

pytestmark = pytest.mark.process

STAGED = ("staged", "filled", "synced", "manifested")
"""Points at which the checkpoint is not yet under its name."""

NAMED = ("renamed", "committed", "recorded")
"""Points at which it is."""


@pytest.fixture
def home() -> pathlib.Path:
    return pathlib.Path(os.environ["DET_HOME"])


def train(home: pathlib.Path, die_at: str = "") -> RunExit:
    environment = {"DET_HOME": str(home), "DET_DIE_AT": die_at}
    return run_program(ARGUMENTS, environment, home.with_suffix(".log"))


def digest(ended: RunExit) -> str:
    lines = [line for line in ended.output.splitlines() if line.startswith("digest ")]
    assert len(lines) == 1, ended.output
    return str(json.loads(lines[0].removeprefix("digest "))["all"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(train(tmp_path_factory.mktemp("reference") / "home"))


def core_program(command: str, checkpoint_id: str, **environment: str) -> forking.Process:
    environment = {**os.environ, **environment}
    return forking.start(
        [str(PROGRAM), command, checkpoint_id], env=environment, stdin=forking.PIPE, stdout=forking.PIPE
    )


def finish(process: forking.Process) -> int:
    with process:
        process.communicate(timeout=60)
    return process.wait()


@pytest.mark.parametrize("time", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("point", [*STAGED, *NAMED])
def test_training_that_dies_at_a_crash_point_goes_on_exactly(
    point: str, time: int, home: pathlib.Path, expected: str
) -> None:
    assert train(home, f"{point}:{time}").was_killed
    assert findings.unreadable(home) == []
    assert len(findings.leftovers(home)) == (point in STAGED)
    assert len(findings.store_of(home).list()) == (time if point in NAMED else time - 1)
    assert digest(train(home)) == expected
    assert findings.leftovers(home) == []


def test_checkpoint_that_died_before_it_was_recorded_is_gone_on_from(home: pathlib.Path) -> None:
    train(home, "committed:2")
    (unrecorded,) = set(findings.store_of(home).list()) - {one.uuid for one in findings.checkpoints(home)}
    train(home)
    assert tracking.TrackingReader(home / "tracking.db").trial(2).source_checkpoint == unrecorded


def test_next_run_leaves_alone_what_a_living_process_saves(home: pathlib.Path) -> None:
    living = core_program("hold", NEW)
    assert living.stdout is not None
    assert living.stdout.readline() == "holding\n"
    assert train(home, "staged").was_killed
    assert len(findings.leftovers(home)) == 2
    assert train(home).code == 0
    assert findings.leftovers(home) == [f"{NEW}.partial"]
    assert finish(living) == 0
    findings.store_of(home).open(NEW).verify()


def test_deletion_that_dies_after_the_record_leaves_nothing_listed(home: pathlib.Path) -> None:
    assert finish(core_program("save", OLD)) == 0
    assert finish(core_program("delete", OLD, DET_DIE_AT="to_delete")) == -9
    assert findings.store_of(home).list() == []
    assert [one.state for one in findings.checkpoints(home)] == [tracking.CheckpointState.DELETED]
    assert findings.store_of(home).clear_leftovers() == [f"{OLD}.partial"]


def sample(calls: list[Call]) -> list[Call]:
    """Return the first call of each kind on the checkpoints, and one on the database."""
    on_database = [call for call in calls if call.name == "fdatasync" and "tracking.db" in call.path]
    on_checkpoints = {call.name: call for call in reversed(calls) if "/checkpoints" in call.path}
    return [*on_database[-1:], *on_checkpoints.values()]


@pytest.mark.thorough  # beside the crash points above
@pytest.mark.parametrize(("command", "checkpoint_id"), [("save", NEW), ("delete", OLD)])
def test_process_killed_at_a_system_call_leaves_whole_checkpoints(
    command: str, checkpoint_id: str, tmp_path: pathlib.Path
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    sweep = Sweep(tmp_path, command, checkpoint_id)
    for call in sample(sweep.calls()):
        assert sweep.interrupt(call), call
        assert sweep.faults() == [], call
