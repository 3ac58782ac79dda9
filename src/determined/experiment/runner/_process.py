"""The process that runs one experiment: what it does, and how it is started."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from determined import _home, errors
from determined._home import Home
from determined.experiment import config as configs
from determined.experiment._cleanup import conclude
from determined.experiment._source import source_checkpoint
from determined.experiment.executors import Cluster, Executor, Job, RunnerProcess, connect
from determined.experiment.executors._environment import base_environment
from determined.experiment.runner._run_specs import CheckpointFinder, RunSpecs
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._state import Rules
from determined.experiment.runner.driver import Driver
from determined.tracking import Desired, ExperimentStore, RunState, TrackingReader, when_available

logger = logging.getLogger("determined.experiment")

RENEWAL_PERIOD_S = 10.0
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02


def drive(experiment_id: int, at: Home | None = None, executor: Executor | None = None) -> RunState:
    """Run an experiment until it ends or is paused; returns the state in which it is left.

    Trials run on the cluster of the experiment, by its executor unless one is given, which stays open.
    """
    home = at or _home.home()
    record = TrackingReader(home.database).experiment(experiment_id)
    config = configs.from_map(record.config or {})
    with contextlib.ExitStack() as claimed:
        store = claimed.enter_context(ExperimentStore.open(home.database, experiment_id))
        when_available(store.claim)
        claimed.callback(store.release)  # after the cleanup, so that others can wait for that too
        claimed.enter_context(_renewing(store))
        state = _run(config, record.cluster, store, home, executor)
        if state.is_final:
            _clean_up(experiment_id, config, home)
    _clean_up_after_others(home)
    return state


def _run(
    config: configs.ExperimentConfig, on: str | None, store: ExperimentStore, home: Home, given: Executor | None
) -> RunState:
    id, source = store.experiment_id, source_checkpoint(config, home)
    with connect(on).open(Job(experiment_id=id, config=config, home=home)) as (allocator, executor):
        while True:
            driver = Driver(
                rules=Rules.of(config, allocator.capacity),
                store=store,
                search=SearchReplay(config, store, home.code(id)),
                allocator=allocator,
                executor=given or executor,
                specs=RunSpecs(id, config, home, allocator.device, source),
                finder=CheckpointFinder(id, home),
            )
            with _leaving_on_signals(driver):
                state = driver.run()
            # Whoever activates an experiment just before it is PAUSED relies on the runner that it still has.
            is_wanted = state is RunState.PAUSED and when_available(store.control).desired is Desired.ACTIVE
            if driver.asked_to_leave or not is_wanted:
                return state


@contextlib.contextmanager
def _renewing(store: ExperimentStore) -> Iterator[None]:
    """Renew the claim of this process regularly during the block."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(RENEWAL_PERIOD_S):
            with contextlib.suppress(errors.TrackingException):  # a claim that is lost for good fails the next commit
                store.renew()

    thread = threading.Thread(target=renew, name="renews the claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def _leaving_on_signals(driver: Driver) -> Iterator[None]:
    """Pause the experiment when this process is asked to end."""

    def leave(signum: int, frame: FrameType | None) -> None:
        driver.leave()

    before = {which: signal.signal(which, leave) for which in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _clean_up(experiment_id: int, config: configs.ExperimentConfig, home: Home) -> None:
    try:
        when_available(lambda: conclude(experiment_id, config, home))
    except (errors.TrackingException, errors.StorageException, OSError) as error:
        # The experiment has ended and is on record; files that stay too long do not make it fail.
        logger.warning("not all files that have expired could be deleted: %s", error)


def _clean_up_after_others(home: Home) -> None:
    """Clean up after runners of this machine that were killed after the end of their experiments."""
    for left in TrackingReader(home.database).experiments(include_archived=True):
        if left.state.is_final and left.runner is not None and left.runner.is_gone:
            with ExperimentStore.open(home.database, left.id) as store:
                try:
                    config = configs.from_map(left.config or {})
                    store.claim()
                except (errors.InvalidConfig, errors.TrackingException):
                    continue  # this version cannot do it, or another runner does
                _clean_up(left.id, config, home)
                store.release()


def main(experiment_id: int) -> int:
    """Run an experiment as a process of its own; returns the exit status."""
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("determined").setLevel(logging.INFO)
    try:
        drive(experiment_id)
    except errors.DeterminedException as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("The runner of experiment %d failed; `det experiment activate` goes on.", experiment_id)
        return 1
    return 0


# Starting it


def start(experiment_id: int, at: Home | None = None, slots: int | None = None) -> int | None:
    """Start the process that runs an experiment, and return its id once it does; None if it has ended already.

    If another process has claimed the experiment meanwhile, the id of that process is returned.
    """
    home = at or _home.home()
    record = TrackingReader(home.database).experiment(experiment_id)
    cluster, job = (
        connect(record.cluster, slots),
        Job(experiment_id=experiment_id, config=configs.from_map(record.config or {}), home=home),
    )
    with ExperimentStore.open(home.database, experiment_id) as store:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            started = _Started.now(cluster, job)
            was_taken = _wait_for_claim(started, store, deadline)
            runner = when_available(store.runner)
            if runner is not None and not runner.is_gone:
                return runner.pid
            if started.process.poll() == 0:
                return None
            if not was_taken or time.monotonic() > deadline:
                raise errors.InternalException(
                    f"The process that runs experiment {experiment_id} did not start: {started.output}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class _Started:
    """A process that was started to run an experiment, and where its output begins in the log."""

    process: RunnerProcess
    log: pathlib.Path
    log_offset: int

    @classmethod
    def now(cls, cluster: Cluster, job: Job) -> _Started:
        """Start one."""
        log = job.home.runner_log(job.experiment_id)
        _home.make_private(log.parent)
        log_offset = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", "determined.experiment", str(job.experiment_id)]
        return cls(cluster.start_runner(command, runner_environment(job.home), job), log, log_offset)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_bytes()[self.log_offset :].decode(errors="replace").strip() or "it printed nothing"


def _wait_for_claim(started: _Started, store: ExperimentStore, deadline: float) -> bool:
    """Wait until a process runs the experiment or has ended; returns whether another one had claimed it meanwhile."""
    was_taken = False
    while time.monotonic() < deadline:
        runner = when_available(store.runner)
        if runner is not None and runner.pid == started.process.pid:
            break
        was_taken |= runner is not None and not runner.is_gone
        if started.process.poll() is not None:
            break
        time.sleep(_POLL_S)
    return was_taken


def runner_environment(home: Home) -> dict[str, str]:
    """Return the variables of a runner, without those of a training that this process may be part of."""
    own = base_environment(os.environ)
    if paths := own.get("PYTHONPATH"):
        own["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep))
    # A search computes with one thread: the cores are for the trials, whose number of threads is set for each.
    return {**own, **home.variables, "OMP_NUM_THREADS": "1"}
