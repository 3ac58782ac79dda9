"""Runs as jobs, with submitit's executors for this machine in the place of Slurm; the real one is in test_slurm.py."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import psutil
import pytest
from executor_runs import TRIAL, Runs

from determined import errors
from determined.experiment.executors import EndReason, RunSpec
from determined.experiment.executors.slurm import JobQueue, QueueRefused, QueueUnavailable, SlurmExecutor, run_job

submitit = pytest.importorskip("submitit", reason="the extra slurm is not installed")
pytestmark = pytest.mark.process

# submitit's debug executor leaves its log files to the garbage collection.
debug = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file")
NOBODY = 2**22 + 1
"""Larger than any process id."""

SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(100)
"""


class LocalJobs:
    """Jobs as processes of this machine, by submitit's local executor."""

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}

    def submit(self, spec: RunSpec) -> str:
        executor = submitit.LocalExecutor(spec.files.job_files)
        executor.update_parameters(timeout_min=10)
        job = executor.submit(run_job, str(spec.folder))
        self.jobs[job.job_id] = job
        return str(job.job_id)

    def find(self, spec: RunSpec) -> str | None:
        return None

    def states(self, jobs: Collection[str]) -> Mapping[str, str]:
        names = {"RUNNING": "RUNNING", "FINISHED": "COMPLETED", "INTERRUPTED": "CANCELLED"}
        return {id: names[self.jobs[id].state] for id in jobs if id in self.jobs}

    def cancel_waiting(self, jobs: Collection[str]) -> None:
        pass

    def kill(self, jobs: Collection[str]) -> None:
        for id in jobs:
            self.jobs[id].cancel()

    def close(self) -> None:
        """Wait until the processes of all jobs have ended, after their runs."""
        while any(job.state == "RUNNING" for job in self.jobs.values()):
            time.sleep(0.05)


class DebugJobs(LocalJobs):
    """Jobs within this process, by submitit's debug executor, which runs one when its result is asked for."""

    def submit(self, spec: RunSpec) -> str:
        job = submitit.DebugExecutor(spec.files.job_files).submit(run_job, str(spec.folder))
        self.jobs["1"] = job
        return "1"

    def states(self, jobs: Collection[str]) -> Mapping[str, str]:
        return {"1": "COMPLETED"}


class PlayedJobs:
    """Jobs that never run: Slurm accepts them, or says why not, and tells what the test lets it tell."""

    def __init__(self, state: str | None = "PENDING", *problems: Exception) -> None:
        self.state = state
        self.problems = list(problems)
        self.submitted = 0
        self.canceled: set[str] = set()

    def submit(self, spec: RunSpec) -> str:
        if self.problems:
            raise self.problems.pop(0)
        self.submitted += 1
        return str(self.submitted)

    def find(self, spec: RunSpec) -> str | None:
        return "1" if self.submitted else None

    def states(self, jobs: Collection[str]) -> Mapping[str, str]:
        if self.problems:
            raise self.problems.pop(0)
        state = "CANCELLED" if self.canceled else self.state
        return {} if state is None else dict.fromkeys(jobs, state)

    def cancel_waiting(self, jobs: Collection[str]) -> None:
        self.canceled.update(jobs if self.state == "PENDING" else ())

    def kill(self, jobs: Collection[str]) -> None:
        self.canceled.update(jobs)


@contextlib.contextmanager
def jobs(folder: pathlib.Path, queue: JobQueue) -> Iterator[Runs]:
    """Give runs as jobs of a queue; none may outlive the block."""
    executor = SlurmExecutor(queue)
    runs = Runs(folder, executor)
    try:
        yield runs
        runs.kill_all()
    finally:
        executor.close()


@pytest.fixture
def local(tmp_path: pathlib.Path) -> Iterator[Runs]:
    with jobs(tmp_path, queue := LocalJobs()) as runs:
        yield runs
    queue.close()


def job_of(spec: RunSpec) -> psutil.Process:
    """Return the process of a job."""
    return next(one for one in psutil.process_iter() if _is_job(one, spec))


def _is_job(process: psutil.Process, spec: RunSpec) -> bool:
    try:
        return "submitit.core._submit" in process.cmdline() and str(spec.files.job_files) in process.cmdline()
    except psutil.Error:
        return False


def test_a_class_trains_in_a_job_as_it_does_here(local: Runs) -> None:
    local.write(TRIAL + "\n    def begin(self):\n        print('hello from a job')\n")
    spec = local.trial()
    exit = local.run(spec)
    assert (exit.reason, exit.status) == (EndReason.COMPLETED, 0)
    assert "hello from a job" in [line.text for line in local.lines(spec)]
    assert local.records().trial(spec.trial_id).steps_completed == 2


def test_an_order_reaches_a_job_through_its_folder(local: Runs) -> None:
    local.write(SAVES, "script.py")
    stopped, killed = (local.start(local.spec("exec python3 script.py")) for _ in range(2))
    for spec in (stopped, killed):
        local.await_text(spec, "begun")
    local.executor.stop(stopped.trial_id)
    local.executor.kill(killed.trial_id)
    assert local.end(stopped).reason is EndReason.STOPPED
    assert "saved" in local.text(stopped)
    assert local.end(killed).reason is EndReason.KILLED
    assert "saved" not in local.text(killed)


def test_a_warning_of_slurm_is_a_stop_that_is_no_failure(local: Runs) -> None:
    local.write(SAVES, "script.py")
    spec = local.start(local.spec("exec python3 script.py"))
    local.await_text(spec, "begun")
    job_of(spec).send_signal(signal.SIGUSR1)
    exit = local.end(spec)
    assert exit.reason is EndReason.INTERRUPTED
    assert "saved" in local.text(spec)


@debug
def test_a_job_within_this_process(tmp_path: pathlib.Path) -> None:
    with jobs(tmp_path, queue := DebugJobs()) as runs:
        spec = started(runs)
        queue.jobs["1"].results()
        assert runs.end(spec).reason is EndReason.COMPLETED
        assert runs.text(spec) == "done\n"


@debug
@pytest.mark.parametrize("sign", ["shim", "exit"])
def test_a_job_that_slurm_has_requeued_runs_nothing_twice(tmp_path: pathlib.Path, sign: str) -> None:
    with jobs(tmp_path, queue := DebugJobs()) as runs:
        spec = started(runs)
        if sign == "exit":
            queue.jobs["1"].results()
        else:  # the node was lost after its run had begun there
            spec.files.shim.write_text(json.dumps({"pid": NOBODY}))
        before = runs.text(spec)
        run_job(str(spec.folder))
        exit = runs.end(spec)
        assert runs.text(spec) == before
        assert exit.reason is (EndReason.INTERRUPTED if sign == "shim" else EndReason.COMPLETED)


@pytest.mark.parametrize(
    ("state", "reason", "message"),
    [
        ("CANCELLED", EndReason.KILLED, "canceled, as by scancel"),
        ("NODE_FAIL", EndReason.INTERRUPTED, "NODE_FAIL"),
        (None, EndReason.INTERRUPTED, "unknown to Slurm"),
        ("TIMEOUT", EndReason.FAILED, "--time=.*--signal=B:USR1"),
        ("OUT_OF_MEMORY", EndReason.FAILED, "--mem="),
        ("FAILED", EndReason.FAILED, "ended as FAILED: no such python"),
    ],
)
def test_a_job_that_ends_without_an_exit_file(
    tmp_path: pathlib.Path, state: str | None, reason: EndReason, message: str
) -> None:
    with jobs(tmp_path, PlayedJobs(state)) as runs:
        spec = started(runs)
        (spec.files.job_files / "1_0_log.err").write_text("no such python\n")
        exit = runs.end(spec)
        assert exit.reason is reason
        assert re.search(message, exit.message)


def test_what_slurm_refuses_is_not_started(tmp_path: pathlib.Path) -> None:
    with jobs(tmp_path, PlayedJobs("PENDING", QueueRefused("invalid account"))) as runs:
        exit = runs.run(runs.spec("echo done"))
        assert exit.reason is EndReason.NOT_STARTED
        assert "invalid account" in exit.message


@pytest.mark.thorough  # it takes as long as the pause before the next try
def test_a_slurm_that_is_away_is_asked_again(tmp_path: pathlib.Path) -> None:
    away = [QueueUnavailable("Unable to contact slurm controller")] * 2
    with jobs(tmp_path, queue := PlayedJobs("COMPLETED", *away)) as runs:
        spec = started(runs)
        assert runs.end(spec).reason is EndReason.FAILED
        assert queue.submitted == 1


def test_a_job_in_the_queue_ends_at_once_and_has_no_handle(tmp_path: pathlib.Path) -> None:
    with jobs(tmp_path, queue := PlayedJobs()) as runs:
        spec = started(runs)
        assert runs.executor.handle(spec.trial_id) is None
        runs.executor.stop(spec.trial_id)
        assert runs.end(spec).message == "before it had begun"
        assert queue.canceled == {"1"}


@pytest.mark.parametrize("loses", ["nothing", "its id"])
def test_the_next_runner_adopts_a_job(tmp_path: pathlib.Path, loses: str) -> None:
    with jobs(tmp_path, queue := PlayedJobs("NODE_FAIL")) as runs:
        spec = started(runs)
        if loses == "its id":
            spec.files.job.unlink()
        executor = SlurmExecutor(queue)
        executor.adopt(spec, None)
        (exit,) = executor.poll(60.0)
        executor.close()
        assert (exit.trial_id, exit.reason) == (spec.trial_id, EndReason.INTERRUPTED)
        assert runs.end(spec).reason is EndReason.INTERRUPTED


def test_a_run_whose_job_was_never_submitted_counts_as_killed(tmp_path: pathlib.Path) -> None:
    with jobs(tmp_path, PlayedJobs("PENDING")) as runs:
        runs.executor.adopt(spec := runs.spec("echo done"), None)
        assert runs.end(spec).reason is EndReason.KILLED


def test_a_trial_has_one_run_at_a_time(tmp_path: pathlib.Path) -> None:
    with jobs(tmp_path, PlayedJobs()) as runs:
        spec = started(runs)
        with pytest.raises(errors.MisuseError, match=f"Trial {spec.trial_id} has a run already"):
            runs.executor.start(spec)


def started(runs: Runs) -> RunSpec:
    """Return a run whose job has been submitted."""
    spec = runs.start(runs.spec("echo done"))
    while not spec.files.job.exists():
        runs.collect(0.01)
    return spec
