"""Runs within this process, one after the other: for debugging, and for tests."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator

from determined import errors
from determined._home import make_private
from determined._import import import_from_path
from determined.experiment.executors._base import EndReason, Handle, RunExit, RunSpec
from determined.experiment.executors._environment import base_environment, import_path, run_environment
from determined.experiment.executors._exit_file import read_exit, summary, write_json
from determined.experiment.executors._hook import run_hook
from determined.tracking import RunProcess

_STOPPED = (130, 143)
_LAST_LINES = 20


class InlineExecutor:
    """Runs trial classes in this process, each when `poll` is called, so that a debugger can follow them.

    Output goes where this process writes. A run cannot be stopped from outside while it goes on, only before.
    """

    def __init__(self) -> None:
        self._base = base_environment(os.environ)
        self._waiting: dict[int, RunSpec] = {}
        self._exits: list[RunExit] = []

    def start(self, spec: RunSpec) -> None:
        """Queue a run; `poll` runs it."""
        if spec.trial_id in self._waiting:
            raise errors.MisuseError(f"Trial {spec.trial_id} has a run already; start another when it has ended.")
        if not spec.is_class or spec.ranks != 1:
            what = f"{spec.entrypoint!r} with {spec.ranks} rank(s)"
            message = f"{what} cannot run within one process; only a class, module:Class, with one rank can"
            self._exits.append(RunExit.of(spec, EndReason.NOT_STARTED, message))
        else:
            self._waiting[spec.trial_id] = spec

    def stop(self, trial_id: int) -> None:
        self._cancel(trial_id, EndReason.STOPPED)

    def kill(self, trial_id: int) -> None:
        self._cancel(trial_id, EndReason.KILLED)

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        """Run the next one of the queue to its end; return what has ended since the last call."""
        if not self._exits and self._waiting:
            spec = next(iter(self._waiting.values()))
            exit = self._run(spec)
            del self._waiting[spec.trial_id]
            with contextlib.suppress(OSError):
                write_json(spec.files.exit, exit.to_json())
            self._exits.append(exit)
        elif not self._exits and timeout_s:
            time.sleep(timeout_s)
        exits, self._exits = self._exits, []
        return exits

    def adopt(self, spec: RunSpec, handle: Handle | None = None) -> None:
        """Let `poll` report how a run of an earlier process has ended; one without an end died with that process."""
        self._exits.append(read_exit(spec) or RunExit.of(spec, EndReason.KILLED, "its process was gone"))

    def handle(self, trial_id: int) -> Handle | None:
        """Return this process, for a run in the queue."""
        return RunProcess.current().to_json() if trial_id in self._waiting else None

    def close(self) -> None:
        self._waiting.clear()

    def _cancel(self, trial_id: int, reason: EndReason) -> None:
        if (spec := self._waiting.pop(trial_id, None)) is not None:
            self._exits.append(RunExit.of(spec, reason, "before it had begun"))

    def _run(self, spec: RunSpec) -> RunExit:
        from determined.launch import load_class, train

        started = time.time()
        entrypoint = str(spec.entrypoint)
        status, begun, trace = 0, False, ""
        try:
            make_private(spec.folder)
            environment = run_hook(spec, run_environment(self._base, spec))
            with _as_if_started(spec, environment):
                load_class(entrypoint)
                begun = True
                train(entrypoint)
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except Exception:
            status, trace = 1, traceback.format_exc()
            traceback.print_exc()
        return _exit_of(spec, status, begun, trace, started)


def _exit_of(spec: RunSpec, status: int, begun: bool, trace: str, started: float) -> RunExit:
    lines = trace.splitlines()
    message = summary(lines)
    if not begun:
        reason = EndReason.NOT_STARTED
    elif spec.files.invalid_hp.exists():
        reason, message = EndReason.INVALID_HP, spec.files.invalid_hp.read_text(encoding="utf-8")
    elif status in _STOPPED:
        reason = EndReason.STOPPED
    else:
        reason = EndReason.FAILED if status else EndReason.COMPLETED
    return RunExit.of(spec, reason, message, status=status, last_lines=tuple(lines[-_LAST_LINES:]), started=started)


@contextlib.contextmanager
def _as_if_started(spec: RunSpec, environment: dict[str, str]) -> Iterator[None]:
    """Let the block see the folder, modules and environment of a run; all is as before afterwards."""
    variables, folder, words, path = dict(os.environ), os.getcwd(), sys.argv, list(sys.path)
    main = vars(sys.modules["__main__"])
    missing = object()
    file = main.get("__file__", missing)
    # Those of GPUs and threads are what they are in a process that may have used both.
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(spec.code)
    sys.path[:] = import_path(str(spec.code), environment.get("PYTHONPATH", ""))
    try:
        with import_from_path(spec.code):
            yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv, sys.path[:] = words, path
        if file is missing:
            main.pop("__file__", None)
        else:
            main["__file__"] = file
