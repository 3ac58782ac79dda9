"""Runs whose runner is gone, and the next runner that finds them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from executor_runs import Runs, await_none, environment, lives, members

from determined.experiment.executors import EndReason, LocalExecutor, RunExit, RunSpec, read_logs

pytestmark = pytest.mark.process

SAVES = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"
SLOW = "trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"
STUBBORN = "trap '' TERM INT HUP; echo up; while :; do sleep 0.01; done"

RUNNER = """
import json, sys
from determined.experiment.executors import LocalExecutor, RunSpec
executor = LocalExecutor()
for text in sys.argv[1:]:
    executor.start(RunSpec.from_json(json.loads(text)))
while True:
    executor.poll(60)
"""


@contextlib.contextmanager
def runner(runs: Runs, *specs: RunSpec) -> Iterator[psutil.Process]:
    """Give a process that runs these, when they are up."""
    words = [json.dumps(spec.to_json()) for spec in specs]
    variables = environment(runs.folder)
    with subprocess.Popen([sys.executable, "-c", RUNNER, *words], env=variables) as process:
        try:
            for spec in specs:
                await_text(spec, "up")
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def text_of(spec: RunSpec) -> str:
    return "".join(f"{line.text}\n" for line in read_logs(spec.folder.parent))


def await_text(spec: RunSpec, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in text_of(spec):
        assert time.monotonic() < deadline, text_of(spec)
        time.sleep(0.01)


def adopted(spec: RunSpec) -> RunExit:
    with LocalExecutor() as later:
        later.adopt(spec)
        (ended,) = later.poll(60)
    return ended


def test_run_saves_and_ends_when_its_runner_is_killed(own_runs: Runs) -> None:
    spec = own_runs.spec(SAVES)
    with runner(own_runs, spec) as process:
        process.kill()
    ended = adopted(spec)
    assert (ended.reason, ended.runner_gone, ended.status) == (EndReason.STOPPED, True, 0)
    assert "saved" in text_of(spec)
    await_none(own_runs.folder)


def test_every_run_of_a_killed_runner_ends(own_runs: Runs) -> None:
    specs = [own_runs.spec(SAVES) for _ in range(4)]
    with runner(own_runs, *specs) as process:
        process.kill()
    assert [adopted(spec).reason for spec in specs] == [EndReason.STOPPED] * 4
    await_none(own_runs.folder)


def test_next_runner_waits_for_a_run_that_still_saves(own_runs: Runs) -> None:
    spec = own_runs.spec(SLOW)
    with runner(own_runs, spec) as process:
        process.kill()
        process.wait()
    assert not spec.files.exit.exists()
    assert adopted(spec).reason is EndReason.STOPPED
    assert "saved" in text_of(spec)


def test_run_that_does_not_end_is_killed_in_the_end(own_runs: Runs) -> None:
    spec = own_runs.spec(STUBBORN, grace_period=0.3)
    with runner(own_runs, spec) as process:
        process.kill()
    assert adopted(spec).reason is EndReason.KILLED
    await_none(own_runs.folder)


def test_next_runner_kills_a_run_that_does_not_end(own_runs: Runs) -> None:
    spec = own_runs.spec(STUBBORN, grace_period=1000)
    with runner(own_runs, spec) as process, LocalExecutor() as later:
        process.kill()
        process.wait()
        later.adopt(spec)
        assert later.poll(0.1) == []
        later.kill(spec.trial_id)
        (ended,) = later.poll(60)
    assert ended.reason is EndReason.KILLED
    await_none(own_runs.folder)


def test_rank_dies_with_its_shim_when_nobody_else_is_left(own_runs: Runs) -> None:
    spec = own_runs.spec(STUBBORN)
    with runner(own_runs, spec) as process:
        shim, rank = own_runs.shim(spec), own_runs.rank(spec)
        for victim in (shim.parent(), process, shim):
            victim.kill()
    deadline = time.monotonic() + 20
    while lives(rank.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert adopted(spec).reason is EndReason.KILLED


def test_next_runner_ends_what_nobody_else_could(own_runs: Runs) -> None:
    # A rank that has gone, and left a process behind when nobody was there to see to it.
    spec = own_runs.spec("setsid sh -c 'trap : TERM; echo up; while :; do sleep 0.01; done' & sleep 600")
    with runner(own_runs, spec) as process:
        shim = own_runs.shim(spec)
        for victim in (shim.parent(), process, shim):
            victim.kill()
    ended = adopted(spec)
    assert (ended.reason, ended.status) == (EndReason.KILLED, None)
    assert not members(own_runs.folder)


def test_interrupt_at_the_terminal_does_not_reach_runs(own_runs: Runs) -> None:
    spec = own_runs.spec("echo session $(ps -o sid= -p $$); echo up; exec sleep 600")
    with runner(own_runs, spec) as process:
        session = int(text_of(spec).split()[1])
        assert session == own_runs.shim(spec).pid != os.getsid(process.pid)
        assert os.getsid(own_runs.shim(spec).parent().pid) != os.getsid(process.pid)
        process.kill()
    adopted(spec)


def test_run_that_never_was_counts_as_killed(own_runs: Runs) -> None:
    assert adopted(own_runs.spec("true")).reason is EndReason.KILLED


def test_run_without_a_shim_was_killed(own_runs: Runs, tmp_path: pathlib.Path) -> None:
    spec = own_runs.spec("true")
    assert own_runs.run(spec).reason is EndReason.COMPLETED
    spec.files.exit.unlink()
    assert adopted(spec).reason is EndReason.KILLED


def test_trial_that_had_given_up_stays_invalid_without_a_shim(own_runs: Runs) -> None:
    spec = own_runs.spec("echo no such layer > $DET_RUN_FOLDER/invalid_hp; kill -9 $PPID")
    ended = own_runs.run(spec)
    assert (ended.reason, ended.message.strip()) == (EndReason.INVALID_HP, "no such layer")


@pytest.mark.parametrize("change", [{"start": 1}, {"boot": "before"}])
def test_process_that_has_the_id_of_a_shim_by_chance_is_left_alone(change: dict[str, object], own_runs: Runs) -> None:
    spec = own_runs.spec("true")
    own_runs.run(spec)
    spec.files.exit.unlink()
    written = json.loads(spec.files.shim.read_text())
    stranger = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    # With all that marks a process of the run but its own environment: a session of that number, and its server's.
    variables = {**os.environ, "DET_FORKSERVER": written["forkserver"]}
    with subprocess.Popen(stranger, stdout=subprocess.PIPE, start_new_session=True, env=variables) as process:
        try:
            process.stdout.readline()
            own_start = int(pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
            identity = {**written["identity"], "pid": process.pid, "start": own_start, **change}
            found = {**written, "pid": process.pid, "identity": identity}
            spec.files.shim.write_text(json.dumps(found))
            assert adopted(spec).reason is EndReason.KILLED
            assert process.poll() is None
        finally:
            spec.files.shim.unlink()
            process.kill()


BAD_PID = '{"pid": "x", "started": 0, "host": "h", "identity": null, "forkserver": "s"}'


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", BAD_PID])
def test_damaged_files_of_a_run_mean_that_it_was_killed(text: str, own_runs: Runs) -> None:
    spec = own_runs.spec("true")
    own_runs.run(spec)
    spec.files.exit.write_text(text)
    spec.files.shim.write_text(text)
    ended = adopted(spec)
    spec.files.shim.unlink()
    assert ended.reason is EndReason.KILLED
