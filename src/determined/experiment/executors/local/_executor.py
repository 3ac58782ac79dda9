"""Runs as processes of this machine."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import time
from collections.abc import Mapping
from typing import Self

from determined import errors
from determined.experiment.executors._base import EndReason, Handle, RunExit, RunSpec
from determined.experiment.executors._environment import GPU_VARIABLE, base_environment, run_environment
from determined.experiment.executors.local._forkserver import ForkServer
from determined.experiment.executors.local._program import libraries_of
from determined.experiment.executors.local._sweep import Shim, exit_without_shim, find_shim
from determined.processes import Channel, EventLoop
from determined.tracking import RunProcess

_MAX_ATTEMPTS = 3
_CLOSE_TIMEOUT_S = 1.0
_ADOPTED_INTERVAL_S = 0.05
"""Seconds between two looks at the runs of an earlier runner."""


@dataclasses.dataclass(eq=False, slots=True)
class _Run:
    """A run, and the connection to its shim."""

    spec: RunSpec
    forkserver: ForkServer
    channel: Channel
    attempt: int
    shim: Shim | None = None
    refused: str = ""
    exit: RunExit | None = None
    wanted: EndReason | None = None


class LocalExecutor:
    """Runs each trial in processes of its own on this machine, each run under a shim.

    Class entrypoints are forked from a process that has torch imported. When this process ends, however it does,
    nothing stays behind: trials are asked to save and stop, and killed if they do not. A shim that has not killed its
    run within `kill_timeout_s` seconds is killed itself.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, kill_timeout_s: float = 15.0) -> None:
        self._kill_timeout_s = kill_timeout_s
        self._base = base_environment(os.environ if environment is None else environment)
        self._events = EventLoop()
        self._forkserver: ForkServer | None = None
        self._runs: dict[int, _Run] = {}
        self._adopted: dict[int, tuple[RunSpec, Shim]] = {}
        self._exits: list[RunExit] = []
        self._wakes, self._waker = socket.socketpair()
        self._events.watch(self._wakes, self._wake_up)
        self._is_woken = False

    def start(self, spec: RunSpec) -> None:
        if spec.trial_id in self._runs or spec.trial_id in self._adopted:
            raise errors.MisuseError(f"Trial {spec.trial_id} has a run already; start another when it has ended.")
        self._begin(spec, 1)

    def handle(self, trial_id: int) -> Handle | None:
        run = self._runs.get(trial_id)
        return None if run is None or run.shim is None else run.shim.process.to_json()

    def stop(self, trial_id: int) -> None:
        """Ask a run to save and end. One that was adopted has been asked by the end of its runner."""
        if (run := self._runs.get(trial_id)) is not None:
            run.wanted = run.wanted or EndReason.STOPPED
            run.channel.send({"order": "stop"})

    def kill(self, trial_id: int) -> None:
        if (run := self._runs.get(trial_id)) is not None:
            if run.wanted is not EndReason.KILLED:
                self._events.after(self._kill_timeout_s, functools.partial(self._kill_shim, run))
            run.wanted = EndReason.KILLED
            run.channel.send({"order": "kill"})
        elif trial_id in self._adopted:
            self._adopted[trial_id][1].kill()

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            is_idle = not self._runs and not self._adopted
            self._events.run_once(0.0 if self._exits or (is_idle and left is None) else left)
            if self._exits or self._is_woken or left == 0.0 or (is_idle and left is None):
                exits, self._exits, self._is_woken = self._exits, [], False
                return exits

    def wake(self) -> None:
        """Let `poll` return now. Any thread may call this."""
        self._waker.send(b"\0")

    def adopt(self, spec: RunSpec, handle: Handle | None = None) -> None:
        """Take over a run of an earlier runner, which stops by itself, since that runner is gone.

        The folder of the run says more than the handle, which may not have been stored.
        """
        found = find_shim(spec, handle)
        if isinstance(found, RunExit):
            self._exits.append(found)
        else:
            self._adopted[spec.trial_id] = spec, found
            self._check_adopted()

    def close(self) -> None:
        """Release everything; runs that still go on are asked to stop, as if this process had ended."""
        for run in self._runs.values():
            run.channel.close()
        if self._forkserver is not None:
            self._forkserver.close(0.0 if self._runs else _CLOSE_TIMEOUT_S)
        self._events.close()
        self._wakes.close()
        self._waker.close()
        self._runs.clear()
        self._adopted.clear()
        self._forkserver = None

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
                forkserver = self._fork_shim(theirs, spec, _shared(environment))
        except OSError as error:  # as where memory or processes are short, which may pass
            link.close()
            self._exits.append(RunExit.of(spec, EndReason.FAILED, f"no process can be started: {error}"))
            return
        run = self._runs[spec.trial_id] = _Run(spec, forkserver, Channel(link), attempt)
        self._events.watch(run.channel, lambda: self._receive(run))
        run.channel.send({"spec": spec.to_json(), "environment": environment, "forkserver": forkserver.token})

    def _fork_shim(self, link: socket.socket, spec: RunSpec, environment: dict[str, str]) -> ForkServer:
        while True:
            if self._forkserver is None or self._forkserver.environment != environment:
                self._release_forkserver()
                self._forkserver = ForkServer(environment, libraries_of(spec.code))
                self._events.watch(self._forkserver.control, self._release_forkserver)
            try:
                self._forkserver.fork_shim(link, of_class=spec.is_class and not spec.has_startup_hook)
            except ConnectionError:  # it was killed
                self._release_forkserver()
            else:
                return self._forkserver

    def _release_forkserver(self) -> None:
        if self._forkserver is not None:
            self._events.unwatch(self._forkserver.control)
            self._forkserver.close()
            self._forkserver = None

    def _wake_up(self) -> None:
        self._wakes.recv(4096)
        self._is_woken = True

    # What shims say

    def _receive(self, run: _Run) -> None:
        messages = run.channel.receive()
        if messages is None:
            self._on_shim_gone(run)
            return
        for message in messages:
            if "shim" in message:
                run.shim = Shim(RunProcess.from_json(message["shim"]), run.forkserver.token)
            elif "exit" in message:
                run.exit = RunExit.from_json(message["exit"])
            else:
                run.refused = message["refused"]

    def _on_shim_gone(self, run: _Run) -> None:
        self._events.unwatch(run.channel)
        run.channel.close()
        del self._runs[run.spec.trial_id]
        if run.exit is not None:
            self._exits.append(run.exit)
        elif run.shim is not None:
            self._exits.append(exit_without_shim(run.spec, run.shim))
        elif run.wanted is not None:
            self._exits.append(RunExit.of(run.spec, run.wanted, "before it had begun"))
        elif run.attempt < _MAX_ATTEMPTS:
            self._begin(run.spec, run.attempt + 1)
        else:
            why = run.refused or run.forkserver.last_line or "the process that starts runs was killed again and again"
            # One that was killed, or could not fork, may do better the next time.
            is_hopeless = not run.refused and run.forkserver.has_failed
            reason = EndReason.NOT_STARTED if is_hopeless else EndReason.FAILED
            self._exits.append(RunExit.of(run.spec, reason, why))

    def _kill_shim(self, run: _Run) -> None:
        """Kill a shim that does not do what it was told."""
        if self._runs.get(run.spec.trial_id) is run:
            if run.shim is not None:
                run.shim.kill()
            self._events.after(self._kill_timeout_s, functools.partial(self._kill_shim, run))

    def _check_adopted(self) -> None:
        for spec, shim in list(self._adopted.values()):
            if not shim.is_alive:
                del self._adopted[spec.trial_id]
                self._exits.append(exit_without_shim(spec, shim))
        if self._adopted:
            self._events.after(_ADOPTED_INTERVAL_S, self._check_adopted)


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of a run that matter already when libraries are loaded."""
    return {name: value for name, value in environment.items() if not name.startswith("DET_") and name != GPU_VARIABLE}
