"""Runs as processes of this machine."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Self

from determined import errors
from determined._processes import ProcessIdentity
from determined.experiment.executors._base import EndReason, Handle, RunExit, RunSpec
from determined.experiment.executors._ends import end_without_keeper, keeper_of_earlier
from determined.experiment.executors._environment import base_environment, run_environment, shared_environment
from determined.experiment.executors._libraries import libraries_of
from determined.experiment.executors._processes import Identity
from determined.experiment.executors._warm import WarmProcess
from determined.launch._line import Line

_ATTEMPTS = 3
_PARTING = 1.0


@dataclasses.dataclass(eq=False, slots=True)
class _Run:
    """A run, and the connection to its keeper."""

    spec: RunSpec
    server: WarmProcess
    line: Line
    attempt: int
    keeper: Identity | None = None
    refused: str = ""
    end: RunExit | None = None
    wanted_end: EndReason | None = None
    kill_at: float | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Adopted:
    """A run of an earlier runner that is still stopping."""

    spec: RunSpec
    keeper: Identity
    server: str
    pidfd: int
    """Is readable when the keeper has ended."""


class LocalExecutor:
    """Runs each trial in processes of its own on this machine, each run under a keeper.

    Class entrypoints are forked from a warm process that has torch imported. When this process ends, however it does,
    nothing stays behind: trials are asked to save and stop, and killed if they do not. A keeper that has not killed its
    run within `kill_timeout_s` seconds is killed itself.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, kill_timeout_s: float = 15.0) -> None:
        if sys.platform != "linux":
            raise errors.InternalException(
                f"Trials cannot run in processes of their own on {sys.platform!r}, only on Linux; use InlineExecutor."
            )
        self._kill_timeout_s = kill_timeout_s
        self._base = base_environment(os.environ if environment is None else environment)
        self._events = selectors.EpollSelector()
        self._server: WarmProcess | None = None
        self._runs: dict[int, _Run] = {}
        self._adopted: dict[int, _Adopted] = {}
        self._over: list[RunExit] = []

    def start(self, spec: RunSpec) -> None:
        """Begin a run; returns at once. Whatever goes wrong is told by its end."""
        if spec.trial_id in self._runs or spec.trial_id in self._adopted:
            raise errors.MisuseError(f"Trial {spec.trial_id} has a run already; start another when it has ended.")
        self._begin(spec, 1)

    def stop(self, trial_id: int) -> None:
        """Ask a run to save and end; it is killed after its grace period. Ignores a trial without a run.

        A run that was adopted has been asked by the end of its runner.
        """
        if (run := self._runs.get(trial_id)) is not None:
            run.wanted_end = run.wanted_end or EndReason.STOPPED
            run.line.tell({"order": "stop"})

    def kill(self, trial_id: int) -> None:
        """End a run at once. Ignores a trial without a run."""
        if (run := self._runs.get(trial_id)) is not None:
            run.wanted_end = EndReason.KILLED
            run.kill_at = run.kill_at or time.monotonic() + self._kill_timeout_s
            run.line.tell({"order": "kill"})
        elif (adopted := self._adopted.get(trial_id)) is not None:
            adopted.keeper.send(signal.SIGKILL)

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        """Return the runs that have ended since the last call; waits up to `timeout_s` seconds for one."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for key, _ in self._events.select(0.0 if self._over else self._until(deadline)):
                key.data()
            self._kill_overdue()
            is_late = deadline is not None and time.monotonic() >= deadline
            if self._over or is_late or (deadline is None and not self._has_runs):
                over, self._over = self._over, []
                return over

    def adopt(self, spec: RunSpec, handle: Handle | None = None) -> None:
        """Take over a run that an earlier runner started; `poll` reports its exit.

        It stops by itself, since its runner is gone. One that was never started counts as killed. Its folder says more
        than the handle, which may not have been stored.
        """
        found = keeper_of_earlier(spec)
        if isinstance(found, RunExit):
            self._over.append(found)
            return
        keeper, server = found
        if (pidfd := keeper.open()) is None:
            self._over.append(end_without_keeper(spec, keeper, server))
            return
        run = self._adopted[spec.trial_id] = _Adopted(spec, keeper, server, pidfd)
        self._events.register(pidfd, selectors.EVENT_READ, lambda: self._on_adopted_gone(run))

    def _on_adopted_gone(self, run: _Adopted) -> None:
        self._events.unregister(run.pidfd)
        os.close(run.pidfd)
        del self._adopted[run.spec.trial_id]
        self._over.append(end_without_keeper(run.spec, run.keeper, run.server))

    def handle(self, trial_id: int) -> Handle | None:
        """Return the keeper of a run; None if there is none, or none yet."""
        run = self._runs.get(trial_id)
        if run is None or run.keeper is None:
            return None
        from determined.tracking import RunProcess

        identity = ProcessIdentity.from_json(run.keeper.to_json())
        return RunProcess(pid=identity.pid, host=socket.gethostname(), identity=identity).to_json()

    def close(self) -> None:
        """Let go of everything; runs that still go on are asked to stop, as if this process had ended."""
        for run in self._runs.values():
            run.line.link.close()
        if self._server is not None:
            self._server.close(0.0 if self._runs else _PARTING)
        for adopted in self._adopted.values():
            os.close(adopted.pidfd)
        self._events.close()
        self._runs.clear()
        self._adopted.clear()
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting

    def _begin(self, spec: RunSpec, attempt: int) -> None:
        environment = run_environment(self._base, spec)
        link, theirs = socket.socketpair()
        try:
            with theirs:
                server = self._have_forked(theirs, spec, shared_environment(environment))
        except OSError as error:
            link.close()
            self._over.append(RunExit.of(spec, EndReason.NOT_STARTED, f"no process can be started: {error}"))
            return
        run = self._runs[spec.trial_id] = _Run(spec, server, Line(link), attempt)
        self._events.register(link, selectors.EVENT_READ, lambda: self._hear(run))
        run.line.tell({"spec": spec.to_json(), "environment": environment, "server": server.token})

    def _have_forked(self, link: socket.socket, spec: RunSpec, environment: dict[str, str]) -> WarmProcess:
        while True:
            if self._server is None or self._server.environment != environment:
                self._let_go_of_server()
                self._server = server = WarmProcess(environment, libraries_of(spec.code))
                self._events.register(server.control, selectors.EVENT_READ, self._let_go_of_server)
            try:
                self._server.fork_keeper(link, of_class=spec.is_class and not spec.has_startup_hook)
            except ConnectionError:  # it was killed
                self._let_go_of_server()
            else:
                return self._server

    def _let_go_of_server(self) -> None:
        if self._server is not None:
            self._events.unregister(self._server.control)
            self._server.close()
            self._server = None

    # What keepers say

    def _hear(self, run: _Run) -> None:
        messages = run.line.hear()
        if messages is None:
            self._on_keeper_gone(run)
            return
        for message in messages:
            if "keeper" in message:
                run.keeper = Identity.from_json(message["keeper"])
            elif "ended" in message:
                run.end = RunExit.from_json(message["ended"])
            else:
                run.refused = message["refused"]

    def _on_keeper_gone(self, run: _Run) -> None:
        self._events.unregister(run.line.link)
        run.line.link.close()
        del self._runs[run.spec.trial_id]
        if run.end is not None:
            self._over.append(run.end)
        elif run.keeper is not None:
            self._over.append(end_without_keeper(run.spec, run.keeper, run.server.token))
        elif run.wanted_end is not None:
            self._over.append(RunExit.of(run.spec, run.wanted_end, "before it had begun"))
        elif run.attempt < _ATTEMPTS:
            self._begin(run.spec, run.attempt + 1)
        else:
            why = run.refused or run.server.last_words or "the process that starts runs was killed again and again"
            self._over.append(RunExit.of(run.spec, EndReason.NOT_STARTED, why))

    # Waiting

    def _until(self, deadline: float | None) -> float | None:
        overdue = (run.kill_at for run in self._runs.values() if run.keeper is not None)
        times = [at for at in (deadline, *overdue) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else (None if self._has_runs else 0.0)

    @property
    def _has_runs(self) -> bool:
        return bool(self._runs or self._adopted)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for run in self._runs.values():
            if run.kill_at is not None and run.kill_at <= now and run.keeper is not None:
                run.kill_at = now + self._kill_timeout_s
                run.keeper.send(signal.SIGKILL)
