"""The runs whose shim is gone or belongs to an earlier runner: who supervises them, and how they ended."""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

import psutil

from determined._home import RUN_FOLDER_VARIABLE
from determined.experiment.executors._base import EndReason, Handle, RunExit, RunSpec
from determined.experiment.executors._environment import FORKSERVER_VARIABLE
from determined.experiment.executors._exit_file import read_exit, read_json
from determined.tracking import RunProcess

_SWEEP_TIMEOUT_S = 5.0


class Shim(NamedTuple):
    """The process that supervises a run, and the token of the forkserver that it comes from."""

    process: RunProcess
    forkserver: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs here."""
        return self.process.is_here and not self.process.is_gone

    def kill(self) -> None:
        """Kill this very process, if it is there."""
        if self.is_alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.process.pid).kill()


def find_shim(spec: RunSpec, handle: Handle | None) -> Shim | RunExit:
    """Return the shim of a run of an earlier runner, or how that run has ended.

    A run that was never started, or whose shim is unknown, counts as killed.
    """
    if (exit := read_exit(spec)) is not None:
        return exit
    if not spec.files.shim.exists():
        if handle is None:
            return RunExit.of(spec, EndReason.KILLED, "before it had begun")
        return Shim(RunProcess.from_json(handle))
    try:
        found = read_json(spec.files.shim) or {}
        return Shim(RunProcess.from_json(found), str(found["forkserver"]))
    except (KeyError, TypeError, ValueError):
        return RunExit.of(spec, EndReason.KILLED, f"{spec.files.shim} is damaged, so nobody knows its shim")


def exit_without_shim(spec: RunSpec, shim: Shim) -> RunExit:
    """Return the exit of a run whose shim is gone; kills what it may have left first."""
    if (exit := read_exit(spec)) is not None:
        return exit
    _sweep(shim, str(spec.folder.absolute()))
    with contextlib.suppress(OSError):
        reason = spec.files.invalid_hp.read_text(encoding="utf-8", errors="replace")
        return RunExit.of(spec, EndReason.INVALID_HP, reason)
    return RunExit.of(spec, EndReason.KILLED, "its shim was killed, and the run with it")


def _sweep(shim: Shim, folder: str) -> None:
    """Kill whatever is left of a run whose shim is gone, and wait until it is gone too."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT_S
    pid = shim.process.pid
    # Another process with the shim's id would lead a session of the same number.
    with contextlib.suppress(ProcessLookupError):
        if not shim.process.is_here or not RunProcess.of(pid).is_same(shim.process):
            pid = -1
    while found := [one for one in psutil.process_iter() if _is_member(one, folder, shim.forkserver, pid)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() > deadline:  # as one that waits for a disk that does not answer
            return
        time.sleep(0.01)


def _is_member(process: psutil.Process, folder: str, forkserver: str, session: int) -> bool:
    """Return whether a process belongs to a run: it has the folder in its environment, or is a fork in the session.

    Other runs have forks of the same forkserver too, so its token counts within the session only. A process that is
    about to be gone has no environment any more.
    """
    try:
        if process.pid == os.getpid() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        variables = _environment(process)
        is_in_session = os.getsid(process.pid) == session
    except (psutil.Error, ProcessLookupError, PermissionError):
        return False
    is_fork = not variables or variables.get(FORKSERVER_VARIABLE) == forkserver != ""
    return variables.get(RUN_FOLDER_VARIABLE) == folder or (is_in_session and is_fork)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.NoSuchProcess:  # it has no memory any more, but may be there for a moment
        return {}
