"""The agent of an experiment on one node: an actor that runs there what the runner tells it, by a local executor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import os
import pathlib
import queue
import shutil
import socket
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from determined._home import HOME_VARIABLE, make_private
from determined.experiment.executors._base import EndReason, RunExit, RunSpec
from determined.experiment.executors.local import LocalExecutor
from determined.experiment.executors.ray._leftovers import remove_leftovers, runner_lives
from determined.experiment.executors.ray._ray import end_this_actor
from determined.experiment.executors.ray._relay import Relay
from determined.tracking import RELAY_VARIABLE

logger = logging.getLogger("determined.experiment")

ORPHAN_TIMEOUT_S = 120.0
"""Seconds without a runner after which an agent stops its runs and ends."""
_NEWS_TIMEOUT_S = 5.0
_LOG_INTERVAL_S = 0.1
_MAX_LOG_BYTES = 4 << 20
_TICK_S = 1.0
# What belongs to a node, whatever the runner has.
_OF_NODE = frozenset(
    {"HOME", "HOSTNAME", "LD_LIBRARY_PATH", "LOGNAME", "PWD", "OLDPWD", "SHELL", "SHLVL", "TMPDIR", "USER"}
)
# What Ray sets for its own workers.
_OF_WORKERS = frozenset({"PYTHONBREAKPOINT", "OMP_NUM_THREADS", "SPT_NOENV"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent has to know of its experiment."""

    name: str
    environment: Mapping[str, str]
    """The variables of the runner."""
    is_home: bool
    """Whether the home folder is on this node, with the database if that is a file."""
    home: str
    probe: str
    """A file of the home folder, which is there if the node sees that folder."""
    needs_home: bool
    """Whether checkpoints are kept below the home folder."""
    records: str
    """The name of the actor that writes to the database; empty if trials connect to a server themselves."""


class LogChunk(NamedTuple):
    """A piece of the output of a rank."""

    trial_id: int
    run_id: int
    rank: int
    offset: int
    data: bytes


class News(NamedTuple):
    """What has happened on a node."""

    exits: list[dict[str, Any]]
    logs: list[LogChunk]


@dataclasses.dataclass(eq=False, slots=True)
class _Run:
    spec: RunSpec
    placement: Mapping[str, Any]
    """That of the whole run, on all nodes."""
    is_direct: bool
    """Whether it writes into the home folder itself."""
    sent: dict[int, int] = dataclasses.field(default_factory=dict)
    """How much of each rank's log has been sent."""
    exit: RunExit | None = None


class Agent:
    """Starts runs on its node, and keeps their output and exits until the runner has them."""

    def __init__(self, settings: AgentSettings, code: bytes | None) -> None:
        self._settings = settings
        self._prefix = settings.name.rpartition("node-")[0]
        self._folder = pathlib.Path(tempfile.gettempdir()) / f"resolute-{os.getuid()}" / settings.name
        make_private(self._folder)
        self._sees_home = settings.is_home or os.path.exists(settings.probe)
        if code is not None:
            _unpack(code, self._folder / "code")
        self._relay = Relay(self._folder / "relay", settings.records) if settings.records else None
        self._executor = LocalExecutor(self._environment())
        self._runs: dict[int, _Run] = {}
        self._orders = queue.SimpleQueue[Callable[[], object]]()
        self._news = threading.Condition()
        self._heard = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="runs trials", daemon=True)
        self._thread.start()

    # Called by the runner

    def start(self, spec: Mapping[str, Any], placement: Mapping[str, Any]) -> None:
        """Begin a run, or the part of one that is on this node."""
        self._put(functools.partial(self._begin, RunSpec.from_json(spec), placement, adopts=False))

    def adopt(self, spec: Mapping[str, Any], placement: Mapping[str, Any], received: Mapping[int, int]) -> None:
        """Go on with a run; `received` says how much of its ranks' logs the runner has."""

        def go_on() -> None:
            known = self._begin(RunSpec.from_json(spec), placement, adopts=True)
            known.sent = dict(received)

        self._put(go_on)

    def stop(self, trial_id: int) -> None:
        """Ask a run to save and end."""
        self._put(lambda: self._executor.stop(trial_id))

    def kill(self, trial_id: int) -> None:
        """End a run at once."""
        self._put(lambda: self._executor.kill(trial_id))

    def placement(self, trial_id: int, run_id: int) -> Mapping[str, Any] | None:
        """Return where a run is that this agent has a part of."""
        run = self._runs.get(trial_id)
        return run.placement if run is not None and run.spec.run_id == run_id else None

    def free_port(self, address: str) -> int:
        """Return a port of this node that nobody uses now."""
        with socket.create_server((address, 0)) as door:
            return int(door.getsockname()[1])

    def poll(self, known: list[tuple[int, int]]) -> News:
        """Return what is new, when there is something, or after some seconds.

        `known` are the trials and runs whose exits the runner has stored.
        """
        self._heard = time.monotonic()
        if known:
            done = set(known)
            self._put(lambda: self._forget(done))
        deadline = time.monotonic() + _NEWS_TIMEOUT_S
        with self._news:
            while (
                not (news := self._collect(set(known))) and time.monotonic() < deadline and not self._is_over.is_set()
            ):
                has_logs = any(not run.is_direct for run in self._runs.values())
                self._news.wait(_LOG_INTERVAL_S if has_logs else deadline - time.monotonic())
        self._heard = time.monotonic()
        return news or News([], [])

    def leave(self) -> None:
        """Release everything, since the experiment ends here or has been paused."""
        self._is_over.set()
        self._executor.wake()
        self._thread.join()

    # Runs, on the thread of this object

    def _put(self, order: Callable[[], object]) -> None:
        self._orders.put(order)
        self._executor.wake()

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                while not self._orders.empty():
                    self._orders.get()()
                exits = self._executor.poll(_TICK_S)
            except Exception:
                logger.exception("the agent of a node failed")
                end_this_actor()
                return
            self._take(exits)
            if time.monotonic() - self._heard > ORPHAN_TIMEOUT_S:
                if runner_lives(self._prefix):  # it waits, as for a database that is away
                    self._heard = time.monotonic()
                else:
                    self._end_as_orphan()
        self._executor.close()
        if self._relay is not None:
            self._relay.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, spec: RunSpec, placement: Mapping[str, Any], *, adopts: bool) -> _Run:
        known = self._runs.get(spec.trial_id)
        if known is not None and known.spec.run_id == spec.run_id:
            return known
        is_direct = self._settings.is_home and spec.group is None
        here = self._localized(spec, is_direct=is_direct)
        run = self._runs[spec.trial_id] = _Run(here, placement, is_direct)
        if self._settings.needs_home and not self._sees_home:
            self._take([RunExit.of(here, EndReason.NOT_STARTED, self._cannot_save())])
        elif adopts:
            self._executor.adopt(here, None)
        else:
            self._executor.start(here)
        return run

    def _localized(self, spec: RunSpec, *, is_direct: bool) -> RunSpec:
        """Return a run as it is on this node."""
        if is_direct:
            return spec
        environment = dict(spec.environment)
        environment.pop("PATH", None)  # that of the runner's node
        if not self._sees_home:
            environment[HOME_VARIABLE] = str(self._folder / "home")
        if self._relay is not None and not self._settings.is_home:
            environment[RELAY_VARIABLE] = str(self._relay.address)
        folder = self._folder / f"trial-{spec.trial_id}" / f"run-{spec.run_id}"
        code = spec.code if self._settings.is_home else self._folder / "code"
        return dataclasses.replace(spec, environment=environment, folder=folder, code=code)

    def _cannot_save(self) -> str:
        return (
            f"node {os.uname().nodename} does not see the home folder {self._settings.home}, where the checkpoints are "
            "to be kept; give checkpoint_storage a URL or a folder that all nodes share, or set DET_HOME to one"
        )

    def _take(self, exits: list[RunExit]) -> None:
        with self._news:
            for exit in exits:
                run = self._runs.get(exit.trial_id)
                if run is not None and run.spec.run_id == exit.run_id:
                    run.exit = exit
            self._news.notify_all()

    def _forget(self, done: set[tuple[int, int]]) -> None:
        for trial_id, run_id in done:
            run = self._runs.get(trial_id)
            if run is not None and run.spec.run_id == run_id and run.exit is not None:
                del self._runs[trial_id]
                if not run.is_direct:
                    shutil.rmtree(run.spec.folder.parent, ignore_errors=True)

    def _end_as_orphan(self) -> None:
        """Stop the runs of a runner that does not come back, and end when they have."""
        living = [run for run in self._runs.values() if run.exit is None]
        for run in living:
            self._executor.stop(run.spec.trial_id)
        if not living:
            self._is_over.set()
            remove_leftovers(self._prefix, but=self._settings.name)
            threading.Timer(_TICK_S, end_this_actor).start()

    # News

    def _collect(self, known: set[tuple[int, int]]) -> News | None:
        logs: list[LogChunk] = []
        exits: list[dict[str, Any]] = []
        left = _MAX_LOG_BYTES
        for run in list(self._runs.values()):
            exit = run.exit  # read before the logs: nothing is written after it
            for chunk in () if run.is_direct else _new_output(run):
                logs.append(chunk)
                left -= len(chunk.data)
                if left <= 0:
                    return News(exits, logs)
            if exit is not None and (exit.trial_id, exit.run_id) not in known:
                exits.append(exit.to_json())
        return News(exits, logs) if exits or logs else None

    def _environment(self) -> dict[str, str]:
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in _OF_WORKERS and (not name.startswith("RAY_") or name == "RAY_ADDRESS")
        }
        theirs = {name: value for name, value in self._settings.environment.items() if not name.startswith("RAY_")}
        if not self._settings.is_home:
            theirs = {name: value for name, value in theirs.items() if name not in _OF_NODE}
        both = {**own, **theirs}
        path = both.get("PATH", os.defpath) if self._settings.is_home else own.get("PATH", os.defpath)
        # So that `python3` is this Python without an activated environment.
        return {**both, "PATH": os.pathsep.join([os.path.dirname(sys.executable), path])}


def _new_output(run: _Run) -> Any:
    """Yield what the ranks of a run have written since the last call."""
    for rank, path in run.spec.files.logs().items():
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(begin := run.sent.get(rank, 0))
            while data := file.read(1 << 20):
                run.sent[rank] = begin + len(data)
                yield LogChunk(run.spec.trial_id, run.spec.run_id, rank, begin, data)
                begin += len(data)


def packed(folder: pathlib.Path) -> bytes:
    """Return a folder as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()


def _unpack(archive: bytes, folder: pathlib.Path) -> None:
    if folder.exists():  # of an agent before this one
        return
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(aside, filter="tar")
    aside.rename(folder)
