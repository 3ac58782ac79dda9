"""Runs as jobs of Slurm: start and stop them, and learn how they ended from their files and from Slurm."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from determined import errors
from determined._home import make_private, private_opener
from determined.experiment.executors._base import EndReason, Handle, RunExit, RunSpec
from determined.experiment.executors._exit_file import read_exit, read_json, write_json
from determined.experiment.executors.slurm._job import KILL, STOP
from determined.experiment.executors.slurm._outcome import GOING, exit_without_file, is_over, settled_exit
from determined.experiment.executors.slurm._queue import JobQueue, QueueRefused, QueueUnavailable
from determined.tracking import lacks_room

logger = logging.getLogger("determined.experiment")

_LOOK_S = 0.3
"""Seconds between two looks at the files of runs."""
_ASK_S = 5.0
"""Seconds between two questions to Slurm."""
_URGENT_ASK_S = 1.0
"""The same while a run waits for the answer."""
_KILL_TIMEOUT_S = 15.0
"""Seconds that a job has to kill its run, before Slurm kills the job."""


@dataclasses.dataclass(eq=False, slots=True)
class _Run:
    """A run, and what is known of its job."""

    spec: RunSpec
    job: str | None = None
    is_adopted: bool = False
    """Whether it may have a job that is not on record."""
    is_busy: bool = False
    """Whether its job is being submitted or looked for."""
    submit_at: float = 0.0
    shim: Mapping[str, Any] | None = None
    """Which process supervises it; None as long as its job waits in the queue."""
    wanted: EndReason | None = None
    overdue_at: float = 0.0
    """When Slurm is to kill it."""
    exit: RunExit | None = None
    """What is in its exit file, while Slurm is asked why it was interrupted."""
    times_gone: int = 0
    """How many answers of Slurm in a row say that it has ended, without an exit file."""

    @property
    def is_urgent(self) -> bool:
        """Whether Slurm's next answer decides about it."""
        return self.exit is not None or self.times_gone > 0 or (self.wanted is not None and self.shim is None)


class SlurmExecutor:
    """Runs each run of a trial as a job. One thread talks to Slurm, which may be away for as long as it likes.

    A runner that ends leaves its jobs alone; the next one adopts them by their ids.
    """

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="talks to Slurm")
        self._news = threading.Event()
        self._answers: collections.deque[Callable[[], None]] = collections.deque()
        self._runs: dict[int, _Run] = {}
        self._exits: list[RunExit] = []
        self._left: set[str] = set()
        """The jobs of ended runs, which Slurm may have requeued."""
        self._look_at = self._ask_at = 0.0
        self._is_asking = self._is_away = False

    def start(self, spec: RunSpec) -> None:
        if spec.trial_id in self._runs:
            raise errors.MisuseError(f"Trial {spec.trial_id} has a run already; start another when it has ended.")
        self._runs[spec.trial_id] = _Run(spec)

    def handle(self, trial_id: int) -> Handle | None:
        """Return the job of a run, and its process on the first node; None as long as the job waits in the queue."""
        run = self._runs.get(trial_id)
        return None if run is None or run.shim is None or run.job is None else {**run.shim, "job": run.job}

    def stop(self, trial_id: int) -> None:
        self._end(trial_id, EndReason.STOPPED)

    def kill(self, trial_id: int) -> None:
        self._end(trial_id, EndReason.KILLED)

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._news.clear()
            self._step(time.monotonic())
            left = _LOOK_S if deadline is None else deadline - time.monotonic()
            if self._exits or left <= 0 or (deadline is None and not self._runs):
                exits, self._exits = self._exits, []
                return exits
            self._news.wait(min(left, _LOOK_S))

    def adopt(self, spec: RunSpec, handle: Handle | None) -> None:
        """Go on with a run of an earlier runner. Its job may have been submitted without being on record."""
        run = self._runs[spec.trial_id] = _Run(spec)
        found = (read_json(spec.files.job) or handle or {}).get("job")
        if found is not None:
            run.job = str(found)
        elif spec.files.spec.exists():
            run.is_adopted = True
        else:
            self._finish(run, RunExit.of(spec, EndReason.KILLED, "before it had begun"))

    def close(self) -> None:
        """End the thread that talks to Slurm. Jobs that still go on do so, for the next runner."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # Steps

    def _step(self, now: float) -> None:
        while self._answers:
            self._answers.popleft()()
        for run in list(self._runs.values()):
            if run.job is None and not run.is_busy and run.submit_at <= now:
                run.is_busy = True
                self._find(run) if run.is_adopted else self._submit(run)
        if now >= self._look_at:
            for run in list(self._runs.values()):
                self._look(run)
            self._look_at = time.monotonic() + _LOOK_S
        if now >= self._ask_at and not self._is_asking:
            self._ask(now)

    def _look(self, run: _Run) -> None:
        """Look for the files that a run leaves when it begins and ends."""
        with contextlib.suppress(OSError):
            os.listdir(run.spec.folder)  # so that an NFS client forgets which files were not there
        run.shim = run.shim or read_json(run.spec.files.shim)
        if run.exit is not None or (exit := read_exit(run.spec)) is None:
            return
        if run.wanted is None and run.job is not None and run.spec.files.interrupted.exists():
            run.exit = exit  # only Slurm knows whether the job was canceled or comes back
            self._ask_at = 0.0
        else:
            self._finish(run, exit)

    def _finish(self, run: _Run, exit: RunExit) -> None:
        if self._runs.get(run.spec.trial_id) is not run:
            return  # its exit came before Slurm's answer
        del self._runs[run.spec.trial_id]
        if run.job is not None and run.spec.files.interrupted.exists():
            self._left.add(run.job)
        self._exits.append(exit)

    def _end(self, trial_id: int, wanted: EndReason) -> None:
        run = self._runs.get(trial_id)
        if run is None or run.wanted is wanted or run.wanted is EndReason.KILLED:
            return
        run.wanted = wanted
        grace_period = 0.0 if wanted is EndReason.KILLED else run.spec.grace_period
        run.overdue_at = time.monotonic() + _KILL_TIMEOUT_S + grace_period
        self._tell(run)
        if run.job is None and not run.is_busy and not run.is_adopted:
            self._finish(run, RunExit.of(run.spec, wanted, "before it had begun"))

    def _tell(self, run: _Run) -> None:
        """Let a job know what is wanted of it, or end it before it has begun."""
        with contextlib.suppress(OSError):  # a full disk: Slurm kills it when it is overdue
            _order(run.spec, KILL if run.wanted is EndReason.KILLED else STOP)
        self._ask_at = 0.0

    # Talking to Slurm, on the thread

    def _call(self, function: Callable[[], Any], answer: Callable[[Future[Any]], None]) -> None:
        def done(future: Future[Any]) -> None:
            self._answers.append(lambda: answer(future))
            self._news.set()

        self._thread.submit(function).add_done_callback(done)

    def _submit(self, run: _Run) -> None:
        def submit() -> str:
            _prepare(run.spec)
            job = self._queue.submit(run.spec)
            with contextlib.suppress(OSError):  # a full disk: its handle and its name say it too
                write_json(run.spec.files.job, {"job": job})
            return job

        self._call(submit, lambda future: self._on_submitted(run, future))

    def _find(self, run: _Run) -> None:
        self._call(lambda: self._queue.find(run.spec), lambda future: self._on_found(run, future))

    def _on_submitted(self, run: _Run, future: Future[str]) -> None:
        run.is_busy = False
        try:
            run.job = future.result()
        except QueueUnavailable as error:
            self._retry(run, error)
            if run.wanted is not None:
                self._finish(run, RunExit.of(run.spec, run.wanted, "before it had begun"))
        except (QueueRefused, OSError) as error:
            self._finish(run, RunExit.of(run.spec, EndReason.NOT_STARTED, f"its job cannot be submitted: {error}"))
        else:
            logger.info("trial %d: run %d is job %s of Slurm", run.spec.trial_id, run.spec.run_id, run.job)
            if run.wanted is not None:
                self._tell(run)

    def _on_found(self, run: _Run, future: Future[str | None]) -> None:
        run.is_busy = False
        try:
            run.job = future.result()
        except QueueUnavailable as error:
            self._retry(run, error)
        else:
            if run.job is None and read_exit(run.spec) is None:
                _order(run.spec, KILL)  # should it be on its way nevertheless
                self._finish(run, RunExit.of(run.spec, EndReason.KILLED, "before it had begun"))

    def _ask(self, now: float) -> None:
        runs = {run.job: run for run in self._runs.values() if run.job is not None}
        jobs = {*runs, *self._left}
        if not jobs:
            return
        self._is_asking = True
        unwanted = [job for job, run in runs.items() if run.wanted is not None and run.shim is None]
        overdue = [job for job, run in runs.items() if run.wanted is not None and run.overdue_at <= now]
        waiting = [*unwanted, *self._left]

        def ask() -> Mapping[str, str]:
            if waiting:
                self._queue.cancel_waiting(waiting)
            if overdue:
                self._queue.kill(overdue)
            return self._queue.states(jobs)

        self._call(ask, lambda future: self._on_states(runs, future))

    def _on_states(self, runs: Mapping[str, _Run], future: Future[Mapping[str, str]]) -> None:
        self._is_asking = False
        try:
            states = future.result()
        except QueueUnavailable as error:
            self._note_absence(error)
        else:
            if self._is_away:
                logger.info("Slurm takes requests again")
            self._is_away = False
            self._left = {job for job in self._left if states.get(job, "") in GOING}
            for job, run in runs.items():
                if self._runs.get(run.spec.trial_id) is run:
                    self._judge(run, states.get(job, ""))
        is_urgent = any(run.is_urgent for run in self._runs.values())
        self._ask_at = time.monotonic() + (_URGENT_ASK_S if is_urgent else _ASK_S)

    def _judge(self, run: _Run, state: str) -> None:
        """End a run whose job has ended, or was requeued after it had begun."""
        if run.exit is not None:
            if state not in ("RUNNING", "COMPLETING"):
                self._finish(run, settled_exit(run.exit, state))
            return
        run.times_gone = run.times_gone + 1 if is_over(state, run.shim is not None) else 0
        # The file of its exit may come a moment later.
        if run.times_gone > 1 and read_exit(run.spec) is None:
            self._left.add(str(run.job))
            self._finish(run, exit_without_file(run.spec, str(run.job), state, run.wanted))

    def _retry(self, run: _Run, error: Exception) -> None:
        self._note_absence(error)
        run.submit_at = time.monotonic() + _ASK_S

    def _note_absence(self, error: Exception) -> None:
        if not self._is_away:
            logger.warning("Slurm does not take requests now; runs go on, and the runner asks again: %s", error)
        self._is_away = True


def _prepare(spec: RunSpec) -> None:
    """Write what a job needs; raises `QueueUnavailable` while the disk is full."""
    try:
        make_private(spec.files.job_files)
        write_json(spec.files.spec, spec.to_json())
        _order(spec, "")
    except OSError as error:
        if lacks_room(error):
            raise QueueUnavailable(str(error)) from error
        raise


def _order(spec: RunSpec, word: str) -> None:
    # The same file, not a new one: opening it shows what is in it, also where a file server is asked.
    with open(spec.files.orders, "a", encoding="utf-8", opener=private_opener) as file:
        file.write(f"{word}\n")
