"""Stopping and killing runs, and what they must not leave behind."""

from __future__ import annotations

import json
import pathlib
import shlex
import signal
import sys
import time
from typing import Any

import pytest
from executor_runs import Runs, await_none, environment, lives, members

from determined.experiment.executors import EndReason, LocalExecutor, RunSpec

pytestmark = pytest.mark.process

SAVES = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"
STUBBORN = "trap '' TERM INT HUP; echo up; while :; do sleep 0.01; done"

# A program that keeps one child in its session and one that has left it, both deaf to requests.
FAMILY = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN) if "deaf" in sys.argv else None
reader, writer = os.pipe()
for leaves in (False, True):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if leaves:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(1, b"child %d\n" % os.getpid())
        os.write(writer, b".")
        time.sleep(600)
    os.read(reader, 1)
os.write(1, b"up\n")
if "leave" not in sys.argv:
    time.sleep(600)
"""


def started(runs: Runs, script: str, text: str = "up", **changes: Any) -> RunSpec:
    spec = runs.start(runs.spec(script, **changes))
    runs.await_text(spec, text)
    return spec


def family(runs: Runs, *words: str) -> RunSpec:
    runs.write(FAMILY, "family.py")
    spec = runs.start(runs.spec([sys.executable, "family.py", *words]))
    runs.await_text(spec, "up")
    return spec


def children(runs: Runs, spec: RunSpec) -> list[int]:
    return [int(line.split()[1]) for line in runs.text(spec).splitlines() if line.startswith("child")]


def test_stopped_run_may_save(runs: Runs) -> None:
    spec = started(runs, SAVES)
    runs.executor.stop(spec.trial_id)
    ended = runs.end(spec)
    assert (ended.reason, ended.status, ended.runner_gone) == (EndReason.STOPPED, 0, False)
    assert "saved" in runs.text(spec)


def test_run_that_dies_of_the_request_was_stopped(runs: Runs) -> None:
    spec = started(runs, "echo up; exec sleep 600")
    runs.executor.stop(spec.trial_id)
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.STOPPED, 128 + signal.SIGTERM)


def test_run_that_fails_when_stopped_has_failed(runs: Runs) -> None:
    spec = started(runs, "trap 'echo no room >&2; exit 9' TERM; echo up; while :; do sleep 0.01; done")
    runs.executor.stop(spec.trial_id)
    ended = runs.end(spec)
    assert (ended.reason, ended.message) == (EndReason.FAILED, "no room")


def test_run_is_killed_when_its_grace_period_is_over(runs: Runs) -> None:
    spec = started(runs, STUBBORN, grace_period=0.2)
    runs.executor.stop(spec.trial_id)
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.KILLED, 137)
    assert ended.message == "it did not end within 0.2 s of being asked to"


def test_killed_run_has_no_time_to_save(runs: Runs) -> None:
    spec = started(runs, SAVES)
    runs.executor.kill(spec.trial_id)
    assert runs.end(spec).reason is EndReason.KILLED
    assert "saved" not in runs.text(spec)


def test_run_can_be_killed_while_it_stops(runs: Runs) -> None:
    spec = started(runs, STUBBORN)
    runs.executor.stop(spec.trial_id)
    runs.executor.kill(spec.trial_id)
    assert runs.end(spec).reason is EndReason.KILLED


@pytest.mark.parametrize("order", ["stop", "kill"])
def test_order_that_comes_with_the_start_counts(order: str, runs: Runs) -> None:
    spec = runs.start(runs.spec("exec sleep 600"))
    getattr(runs.executor, order)(spec.trial_id)
    expected = EndReason.STOPPED if order == "stop" else EndReason.KILLED
    assert runs.end(spec).reason is expected


def test_training_behind_a_shell_may_save(runs: Runs) -> None:
    runs.write(
        """
        import signal, sys, time
        def save(*_):
            time.sleep(2.3)  # longer than what a run leaves behind may take otherwise
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(600)
        """,
        "train.py",
    )
    spec = started(runs, f"cd . && {sys.executable} train.py; echo never")
    runs.executor.stop(spec.trial_id)
    assert runs.end(spec).reason is EndReason.STOPPED
    assert runs.text(spec).split() == ["up", "saved"]


def test_training_behind_a_shell_is_killed_when_its_grace_period_is_over(runs: Runs) -> None:
    spec = started(runs, f"sh -c {shlex.quote(STUBBORN)}; echo never", grace_period=0.3)
    runs.executor.stop(spec.trial_id)
    assert runs.end(spec).reason is EndReason.KILLED
    assert runs.text(spec) == "up\n"


def test_request_reaches_the_program_alone_not_its_workers(runs: Runs) -> None:
    runs.write(
        """
        import os, signal, sys, time
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
        def save(*_):
            time.sleep(0.2)
            print("worker", os.waitpid(worker, os.WNOHANG), flush=True)
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(600)
        """,
        "train.py",
    )
    spec = started(runs, f"exec {sys.executable} train.py")
    runs.executor.stop(spec.trial_id)
    runs.end(spec)
    assert "worker (0, 0)" in runs.text(spec)


def test_nothing_outlives_a_killed_run(runs: Runs) -> None:
    spec = family(runs)
    runs.executor.kill(spec.trial_id)
    runs.end(spec)
    assert not any(map(lives, children(runs, spec)))


def test_nothing_outlives_a_run_that_was_killed_by_somebody(runs: Runs) -> None:
    spec = family(runs)
    runs.rank(spec).kill()
    assert runs.end(spec).reason is EndReason.FAILED
    assert not any(map(lives, children(runs, spec)))


def test_nothing_outlives_a_run_that_ended(runs: Runs) -> None:
    spec = family(runs, "leave")
    assert runs.end(spec).reason is EndReason.COMPLETED
    assert not any(map(lives, children(runs, spec)))


def test_nothing_outlives_a_killed_shim(runs: Runs) -> None:
    spec = family(runs, "deaf")
    runs.shim(spec).kill()
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.KILLED, None)
    assert "its shim was killed" in ended.message
    assert not any(map(lives, children(runs, spec)))


def test_nothing_outlives_a_shim_that_is_killed_after_its_server(own_runs: Runs) -> None:
    spec = family(own_runs, "deaf")
    shim = own_runs.shim(spec)
    own_runs.server(spec).kill()
    shim.kill()
    assert own_runs.end(spec).reason is EndReason.KILLED
    assert not any(map(lives, children(own_runs, spec)))


def test_end_of_a_killed_shim_is_told_when_its_run_is_gone(runs: Runs) -> None:
    spec = family(runs, "deaf")
    runs.shim(spec).kill()
    runs.end(spec)
    assert not members(runs.folder)


def test_process_that_has_left_all_behind_is_gone_with_the_shim(runs: Runs) -> None:
    daemon = "setsid env -i sh -c 'echo child $$; exec sleep 600' & "
    spec = started(runs, f"{daemon} echo up; wait", "child")
    runs.shim(spec).kill()
    runs.end(spec)
    (pid,) = children(runs, spec)
    deadline = time.monotonic() + 20
    while lives(pid):  # until the process that the shim was forked from has seen to it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_frozen_shim_is_killed_with_its_run(own_runs: Runs) -> None:
    with LocalExecutor(environment(own_runs.folder), kill_timeout_s=0.3) as executor:
        own_runs.executor = executor
        spec = started(own_runs, SAVES)
        own_runs.shim(spec).suspend()
        executor.kill(spec.trial_id)
        assert own_runs.end(spec).reason is EndReason.KILLED
    await_none(own_runs.folder)


def test_runs_go_on_without_the_forkserver(own_runs: Runs) -> None:
    spec = started(own_runs, SAVES)
    own_runs.server(spec).kill()
    again = started(own_runs, SAVES)  # from a new one
    for one in (spec, again):
        own_runs.executor.stop(one.trial_id)
        assert own_runs.end(one).reason is EndReason.STOPPED


def test_run_that_the_forkserver_had_not_begun_begins_in_the_next(own_runs: Runs) -> None:
    first = started(own_runs, SAVES)
    server = own_runs.server(first)
    server.suspend()
    spec = own_runs.start(own_runs.spec("echo once"))
    server.kill()
    assert own_runs.end(spec).reason is EndReason.COMPLETED
    assert own_runs.text(spec) == "once\n"


def test_forkserver_that_is_killed_each_time_fails_the_run_which_may_be_started_again(own_runs: Runs) -> None:
    (own_runs.folder / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)")
    ended = own_runs.run(own_runs.spec("true", environment={"PYTHONPATH": str(own_runs.folder)}))
    assert ended.reason is EndReason.FAILED
    assert "killed again and again" in ended.message


def test_forkserver_ends_with_its_executor(own_runs: Runs) -> None:
    spec = started(own_runs, SAVES)
    server = own_runs.server(spec)
    own_runs.executor.kill(spec.trial_id)
    own_runs.end(spec)
    own_runs.executor.close()
    server.wait(20)


def test_shim_file_names_the_shim(runs: Runs) -> None:
    spec = started(runs, SAVES)
    written = json.loads(spec.files.shim.read_text())
    stat = pathlib.Path(f"/proc/{written['pid']}/stat").read_text()
    assert written["identity"]["start"] == int(stat.rpartition(")")[2].split()[19])
    assert written["identity"]["boot"] == pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    runs.executor.kill(spec.trial_id)
    runs.end(spec)
