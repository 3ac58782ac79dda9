"""How much memory and CPU time a command and all processes that come from it take."""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import threading

import psutil

_EVERY = 0.25


class Footprint:
    """Watches a command from a thread: the largest sum of memory of its processes, shared pages counted once, and CPU.

    Processes count from when they are first seen below another one, also if that ends before them.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.peak_bytes = 0
        self.cpu_seconds = 0.0
        self._known = {psutil.Process(process.pid)}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Footprint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            for process in list(self._known):
                with contextlib.suppress(psutil.Error):
                    self._known.update(process.children(recursive=True))
            self._known = {process for process in self._known if process.is_running()}
            self.peak_bytes = max(self.peak_bytes, sum(map(_proportional_bytes, self._known)))
            self.cpu_seconds = max(self.cpu_seconds, sum(map(_cpu_seconds, self._known)))


def _cpu_seconds(process: psutil.Process) -> float:
    """Return its CPU time with that of its children that have ended."""
    with contextlib.suppress(psutil.Error):
        return sum(process.cpu_times()[:4])
    return 0.0


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        text = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
