"""The forkserver: forks the shims of runs, with torch, this library and some that the program needs imported.

It never imports a user's module, never touches CUDA, and runs no threads, so that what is forked from it is as good as
newly started. Shims go on without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
import weakref
from collections.abc import Mapping, Sequence

from determined.experiment.executors._environment import FORKSERVER_VARIABLE
from determined.experiment.executors.local import _run_shim
from determined.launch import HARNESS
from determined.processes import (
    Channel,
    EventLoop,
    SignalPipe,
    adopt_orphans,
    call_arguments,
    children,
    end_with_parent,
    outlive_parent,
    reset_signals,
    set_name,
    signals_blocked,
    use_huge_pages,
)

PRELOADED = (
    HARNESS,
    "determined.tracking._writer",
    "sqlalchemy.dialects.sqlite",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes a second
)
_SCRIPT, _CLASS = b"s", b"c"
_HUNT_INTERVAL_S = 0.05
_HUGE_PAGES_AFTER = 4
"""Runs after which more are likely to follow: moving the memory takes as long as it saves in fifteen of them."""
_MAX_OUTPUT = 4096
_EXIT_TIMEOUT_S = 1.0
# Whatever library may ask for GPUs there gets an answer for which CUDA, which no fork survives, is left alone.
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class ForkServer:
    """The runner's side. The forkserver ends by itself when this process does, or closes this."""

    def __init__(self, environment: Mapping[str, str], libraries: Sequence[str] = ()) -> None:
        self.environment = dict(environment)
        """The environment in which libraries were loaded there."""
        self.token = uuid.uuid4().hex
        self._last_line = ""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", *call_arguments(__name__, str(theirs.fileno()), str(os.getpid()), *libraries)],
                env={**self.environment, **_NO_CUDA, FORKSERVER_VARIABLE: self.token},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork_shim(self, link: socket.socket, *, of_class: bool) -> None:
        """Have a shim forked that holds `link`; raises OSError if the process is gone."""
        socket.send_fds(self.control, [_CLASS if of_class else _SCRIPT], [link.fileno()])

    @property
    def last_line(self) -> str:
        """The last line that it wrote, which says why it could not work."""
        if not self._output.closed:
            # At an offset: the position of the file is where the other process writes.
            file = self._output.fileno()
            text = os.pread(file, _MAX_OUTPUT, max(0, os.fstat(file).st_size - _MAX_OUTPUT))
            lines = text.decode(errors="replace").split("\n")
            self._last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return self._last_line

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by itself, as it does where it cannot work."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # When the last of its sockets is closed, it is not quite gone yet.
            return self._process.wait(_EXIT_TIMEOUT_S) > 0
        return False

    def close(self, timeout_s: float = 0.0) -> None:
        """Let it end, as it does when its last shim has ended; wait up to `timeout_s` seconds for that."""
        self._last_line = self.last_line
        self.control.close()
        self._output.close()
        waiting = threading.Thread(target=self._process.wait, daemon=True)  # so that it is no zombie afterwards
        waiting.start()
        waiting.join(timeout_s)


class _Server:
    """Forks a shim for each request, until nobody can send any more and all shims have ended."""

    def __init__(self, control: socket.socket, parent: int, libraries: Sequence[str]) -> None:
        self._control = control
        self._parent = parent
        self._libraries = libraries
        self._events = EventLoop()
        self._events.watch(control, self._on_request)
        self._signals = SignalPipe([signal.SIGCHLD])
        self._events.watch(self._signals, self._on_child)
        self._shims: set[int] = set()
        self._is_open = True
        self._class_runs = 0
        self._hunts = False

    def run(self) -> None:
        while self._is_open or self._shims or self._hunts:
            self._events.run_once()

    def _on_request(self) -> None:
        kind, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not kind:
            self._events.unwatch(self._control)
            self._is_open = False
            return
        self._class_runs += kind == _CLASS
        if kind == _CLASS and self._class_runs == 1:
            end_with_parent(self._parent)  # which it could not notice during the imports
            _import_libraries(self._libraries)
            outlive_parent()
        self._fork(socket.socket(fileno=fds[0]))
        if kind == _CLASS and self._class_runs == _HUGE_PAGES_AFTER:
            use_huge_pages()

    def _fork(self, link: socket.socket) -> None:
        try:
            with signals_blocked():
                pid = os.fork()
                if pid == 0:
                    self._become_shim(link)
        except OSError as error:
            Channel(link).send({"refused": f"no process could be forked: {error.strerror}"})
        else:
            self._shims.add(pid)
        link.close()

    def _become_shim(self, link: socket.socket) -> None:
        try:
            self._control.close()
            self._events.close()
            reset_signals()
            _run_shim.main(link)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _on_child(self) -> None:
        self._signals.read()
        self._reap()

    def _reap(self) -> None:
        while self._shims or self._hunts:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._shims:
                self._shims.remove(pid)
                if status and not self._hunts:  # one that ends by itself leaves nobody behind
                    self._hunts = True
                    self._events.after(0.0, self._hunt)

    def _hunt(self) -> None:
        """Kill what a shim that was killed has left; each generation is adopted when the one before is gone."""
        self._reap()
        orphans = children() - self._shims
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)  # a child, so the id is nobody else's
        self._hunts = bool(orphans)
        if orphans:
            self._events.after(_HUNT_INTERVAL_S, self._hunt)


def _import_libraries(libraries: Sequence[str]) -> None:
    """Import what trials need. Where that fails, each trial is started by itself and shows the reason in its output."""
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except Exception:  # not all libraries have to be there
            traceback.print_exc()
    for name in libraries:
        with contextlib.suppress(Exception):  # not there, no module, or broken: the trial will show it
            importlib.import_module(name)
    if threading.active_count() > 1:  # which nothing that is forked would have, so trials are started by themselves
        sys.modules.pop(HARNESS, None)
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        # What libraries opened here is not for each trial to take apart.
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # memory that nobody writes to stays shared


def main(control: str, parent: str, *libraries: str) -> None:
    """Serve the process `parent`, which holds the other end of the socket with this number."""
    sys.path[:] = [entry for entry in sys.path if entry]  # not this process's working folder
    set_name("det-forkserver")
    adopt_orphans()
    _Server(socket.socket(fileno=int(control)), int(parent), libraries).run()
    os._exit(0)  # there is nothing to take apart that would not go with the process
