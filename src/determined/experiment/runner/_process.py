"""The process that drives one experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from determined import errors
from determined._home import Home, home, make_private, private_opener
from determined._info import ClusterInfo, TrialInfo
from determined.experiment import config as configs
from determined.experiment._machine import SLOTS_VARIABLE, this_machine
from determined.experiment._pool import LocalAllocator
from determined.experiment._results import conclude, source_checkpoint
from determined.experiment.executors import Executor, LocalExecutor
from determined.experiment.runner._disk_space import when_there_is_room
from determined.experiment.runner._run_specs import Runs
from determined.experiment.runner._runner import Runner
from determined.experiment.runner._search_replay import SearchReplay
from determined.tracking import Desired, ExperimentStore, RunState, Slots, TrackingReader

logger = logging.getLogger("determined.experiment")

RENEWED_EVERY_S = 10.0
_STARTING = 60.0
_LOOKING = 0.02


def drive(experiment_id: int, at: Home | None = None, executor: Executor | None = None) -> RunState:
    """Run an experiment on this machine until it ends or is paused; returns the state in which it is left.

    Trials run in processes of their own, unless an executor is given, which stays open.
    """
    place = at or home()
    config = configs.from_map(TrackingReader(place.database).experiment(experiment_id).config or {})
    with contextlib.ExitStack() as claimed:
        ledger = claimed.enter_context(ExperimentStore.open(place.database, experiment_id))
        when_there_is_room(ledger.claim)
        claimed.callback(ledger.release)  # after the tidying up, so that others can wait for that too
        claimed.enter_context(_renewing(ledger))
        state = _run(config, ledger, place, executor)
        if state.is_final:
            _tidy_up(experiment_id, config, place)
    _tidy_up_after_others(place)
    return state


def _run(config: configs.ExperimentConfig, ledger: ExperimentStore, place: Home, given: Executor | None) -> RunState:
    experiment_id, machine = ledger.experiment_id, this_machine()
    with contextlib.ExitStack() as stack:
        slots = stack.enter_context(Slots(place.database))
        executor = given or stack.enter_context(LocalExecutor())
        allocator = LocalAllocator(slots, machine, experiment_id, config.resources.slots_per_trial)
        runs = Runs(experiment_id, config, place, allocator.device)
        runs.start_from(source_checkpoint(config, place))
        while True:
            searching = SearchReplay(config, ledger, place.code(experiment_id))
            runner = Runner(config, ledger, searching, allocator, executor, runs)
            with _leaving_on_signals(runner):
                state = runner.run()
            # Whoever activates an experiment just before it is PAUSED relies on the runner that it still has.
            is_wanted = state is RunState.PAUSED and ledger.control().desired is Desired.ACTIVE
            if runner.asked_to_leave or not is_wanted:
                return state


@contextlib.contextmanager
def _renewing(ledger: ExperimentStore) -> Iterator[None]:
    """Renew the claim of this process again and again, whatever else it is doing."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(RENEWED_EVERY_S):
            with contextlib.suppress(errors.TrackingException):  # what is lost for good, the next commit tells
                ledger.renew()

    thread = threading.Thread(target=renew, name="renews the claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _tidy_up(experiment_id: int, config: configs.ExperimentConfig, place: Home) -> None:
    try:
        conclude(experiment_id, config, place)
    except (errors.TrackingException, errors.StorageException, OSError) as error:
        # The experiment is done and on record; what stays too long is no reason to call it failed.
        logger.warning("not all that need not stay could be deleted: %s", error)


def _tidy_up_after_others(place: Home) -> None:
    """Do what runners of this machine did not come to, because they were killed after the end of their experiments."""
    for left in TrackingReader(place.database).experiments(include_archived=True):
        if left.state.is_final and left.runner is not None and left.runner.is_gone:
            with ExperimentStore.open(place.database, left.id) as ledger:
                try:
                    config = configs.from_map(left.config or {})
                    ledger.claim()
                except (errors.InvalidConfig, errors.TrackingException):
                    continue  # this version cannot do it, or another runner does
                _tidy_up(left.id, config, place)
                ledger.release()


def start(experiment_id: int, at: Home | None = None, slots: int | None = None) -> int | None:
    """Start the process that drives an experiment, and return its id once it does; None if it is done already.

    If another process has taken over meanwhile, that one drives it, and its id is returned.
    """
    place = at or home()
    with ExperimentStore.open(place.database, experiment_id) as ledger:
        deadline = time.monotonic() + _STARTING
        while True:
            started = _started(experiment_id, place, slots)
            was_taken = _awaited(started, ledger, deadline)
            runner = ledger.runner()
            if runner is not None and not runner.is_gone:
                return runner.pid
            if started.process.poll() == 0:
                return None
            if not was_taken or time.monotonic() > deadline:
                raise errors.InternalException(
                    f"The process that drives experiment {experiment_id} did not start: {started.said}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class _Started:
    """A process that was started to drive an experiment, and where its output begins in the log."""

    process: subprocess.Popen[bytes]
    log: pathlib.Path
    began: int

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.log.read_bytes()[self.began :].decode(errors="replace").strip() or "it said nothing"


def _started(experiment_id: int, place: Home, slots: int | None) -> _Started:
    log = place.runner_log(experiment_id)
    make_private(log.parent)
    with open(log, "ab", opener=private_opener) as output:
        began = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "determined.experiment", str(experiment_id)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=runner_environment(place, slots),
            cwd=place.path,
            start_new_session=True,  # it outlives the terminal
        )
    # Somebody must take note of its end as long as this process lives.
    threading.Thread(target=process.wait, name=f"runner of experiment {experiment_id}", daemon=True).start()
    return _Started(process, log, began)


def _awaited(started: _Started, ledger: ExperimentStore, deadline: float) -> bool:
    """Wait until a process drives the experiment or has ended; returns whether another one did drive it meanwhile."""
    was_taken = False
    while time.monotonic() < deadline:
        runner = ledger.runner()
        if runner is not None and runner.pid == started.process.pid:
            break
        was_taken |= runner is not None and not runner.is_gone
        if started.process.poll() is not None:
            break
        time.sleep(_LOOKING)
    return was_taken


def main(experiment_id: int) -> int:
    """Drive an experiment as a process of its own; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        drive(experiment_id)
    except errors.DeterminedException as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("The runner of experiment %d failed; `det experiment activate` goes on.", experiment_id)
        return 1
    return 0


@contextlib.contextmanager
def _leaving_on_signals(runner: Runner) -> Iterator[None]:
    """Pause the experiment when this process is asked to end."""

    def leave(signum: int, frame: FrameType | None) -> None:
        runner.leave()

    before = {which: signal.signal(which, leave) for which in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def runner_environment(place: Home, slots: int | None = None) -> dict[str, str]:
    """Return the variables of a runner: none of a training that this process may be part of."""
    trial = TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams={}, _config={})
    of_trial = ClusterInfo(trial=trial, latest_checkpoint="any").to_environment().keys()
    own = {name: value for name, value in os.environ.items() if name not in of_trial}
    if paths := own.get("PYTHONPATH"):
        own["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep))
    chosen = {} if slots is None else {SLOTS_VARIABLE: str(slots)}
    # One thread for what a search computes: the cores are for the trials, whose own number of threads is set for each.
    return {**own, "DET_HOME": str(place.path), "OMP_NUM_THREADS": "1", **chosen}
