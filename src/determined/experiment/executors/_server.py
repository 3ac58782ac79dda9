"""The warm process: fork the keepers of runs, with torch, this library and some that the program needs imported.

It never imports a user's module, never touches CUDA, and runs no threads, so that what is forked from it is as good as
started anew. Keepers go on without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence

from determined.experiment.executors._keeping import keep
from determined.experiment.executors._processes import adopt_orphans, call_this, children
from determined.experiment.executors._wakeup import forget_signals, heard, held_back, woken_by

SCRIPT, CLASS = b"s", b"c"
"""What the run is of that a keeper is wanted for."""

PRELOADED = (
    "determined.launch._harness",
    "determined.tracking._writer",
    "sqlalchemy.dialects.sqlite",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes a second
)
_HUNTING = 0.05


class Server:
    """Forks a keeper for each request, until nobody can send any more and all keepers have ended."""

    def __init__(self, control: socket.socket, libraries: Sequence[str]) -> None:
        self._control = control
        self._libraries = libraries
        self._events = selectors.DefaultSelector()
        self._events.register(control, selectors.EVENT_READ, self._on_request)
        woken = woken_by(signal.SIGCHLD)
        self._events.register(woken, selectors.EVENT_READ, lambda: self._on_child(heard(woken)))
        self._keepers: set[int] = set()
        self._is_open = True
        self._has_tried = False
        self._hunts = False

    def run(self) -> None:
        """Serve until the end."""
        while self._is_open or self._keepers or self._hunts:
            for key, _ in self._events.select(_HUNTING if self._hunts else None):
                key.data()
            if self._hunts:
                self._hunt()

    def _on_request(self) -> None:
        kind, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not kind:
            self._events.unregister(self._control)
            self._is_open = False
            return
        if kind == CLASS and not self._has_tried:
            self._has_tried = True
            _warm_up(self._libraries)
        self._fork(socket.socket(fileno=fds[0]))

    def _fork(self, link: socket.socket) -> None:
        try:
            with held_back():
                pid = os.fork()
                if pid == 0:
                    self._become_keeper(link)
        except OSError as error:
            link.sendall(json.dumps({"refused": f"no process could be forked: {error.strerror}"}).encode() + b"\n")
        else:
            self._keepers.add(pid)
        link.close()

    def _become_keeper(self, link: socket.socket) -> None:
        try:
            self._control.close()
            self._events.close()
            forget_signals()
            keep(link)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _on_child(self, _: bytes) -> None:
        while self._keepers or self._hunts:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._keepers:
                self._keepers.remove(pid)
                # One that ends by itself leaves nobody behind.
                self._hunts |= status != 0

    def _hunt(self) -> None:
        """Kill what a keeper that was killed has left; each generation is adopted when the one before is gone."""
        self._on_child(b"")
        orphans = children() - self._keepers
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)  # a child, so the id is nobody else's
        self._hunts = bool(orphans)


def _warm_up(libraries: Sequence[str]) -> None:
    """Import what trials need. Where that fails, each trial is started anew and shows the reason in its output."""
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except Exception:  # not all libraries have to be there
            traceback.print_exc()
    for name in libraries:
        with contextlib.suppress(Exception):  # not there, no module, or broken: the trial will show it
            importlib.import_module(name)
    if threading.active_count() > 1:  # which nothing that is forked would have, so it shall be started anew
        sys.modules.pop(PRELOADED[0], None)
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        # What libraries opened here is not for each trial to take apart.
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # memory that nobody writes to stays shared


def main() -> None:
    """Serve whoever holds the other end of the socket whose number is the last argument."""
    sys.path[:] = [entry for entry in sys.path if entry]  # not this process's working folder
    call_this("det-warm")
    adopt_orphans()
    Server(socket.socket(fileno=int(sys.argv[-1])), sys.argv[2:-1]).run()
    os._exit(0)  # there is nothing to take apart that would not go with the process
