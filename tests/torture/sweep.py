"""Kill a process at each system call by which it changes its files, and check what is left.

`python tests/torture/sweep.py` interrupts every call of saving and of deleting a checkpoint once; status 1 if the
store or the record was ever inconsistent.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

import findings

from determined import core, tracking

CALLS = "write,pwrite64,fsync,fdatasync,ftruncate,rename,mkdir,chmod,unlink,unlinkat,rmdir"
OLD, NEW = (f"{number:08d}-0000-4000-8000-000000000000" for number in (1, 2))
"""Ids of the checkpoint that is there before, and of the one that is saved."""

# A line such as `123 fsync(5</home/x>) = 0` or `123 unlinkat(4</home/x>, "name", 0) = 0`.
_LINE = re.compile(r'(?P<thread>\d+) +(?P<name>\w+)\((?:\d+<|AT_FDCWD[^,]*, "|")(?P<path>/[^">]*)')


class Call(NamedTuple):
    """The n-th call of its name on a path, counted within its thread as strace does."""

    name: str
    path: str
    number: int


def why_not() -> str | None:
    """Return what keeps strace from being used here; None if nothing does."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace may not trace here: {tried.stderr.strip()}" if tried.returncode else None


class Sweep:
    """Interrupts one command of `core_program.py`, in a home folder with one whole checkpoint."""

    def __init__(self, folder: pathlib.Path, command: str, checkpoint_id: str) -> None:
        self.home = folder / "home"
        self._pristine = folder / "pristine"
        self._trace = folder / "trace"
        self._command = (command, checkpoint_id)
        self._run([], ("save", OLD)).check_returncode()
        self.home.rename(self._pristine)

    def calls(self) -> list[Call]:
        """Return all calls of the command on files of the home folder, in order."""
        self._restore()
        self._run(["strace", "-f", "-y", "-o", str(self._trace), "-e", f"trace={CALLS}"]).check_returncode()
        numbers: collections.Counter[tuple[str, ...]] = collections.Counter()
        found: dict[Call, None] = {}
        for match in map(_LINE.match, self._trace.read_text().splitlines()):
            if match and match["path"].startswith(str(self.home)):
                numbers[match.groups()] += 1
                found[Call(match["name"], match["path"], numbers[match.groups()])] = None
        return list(found)

    def interrupt(self, call: Call) -> bool:
        """Run the command and kill it as it makes a call; False if it came to its end without making it."""
        self._restore()
        inject = f"inject={call.name}:signal=KILL:when={call.number}"
        strace = ["strace", "-f", "-o", str(self._trace), "-P", call.path, "-e", f"trace={call.name}", "-e", inject]
        return self._run(strace).returncode == -signal.SIGKILL

    def faults(self) -> list[str]:
        """Return what is wrong: with what is left, and with what a next run makes of it."""
        store = findings.store_of(self.home)
        found = findings.unreadable(self.home)
        if self._command[0] != "delete" and OLD not in store.list():
            found.append("the old checkpoint is gone")
        self._next_run()
        found += [f"{name} is not cleared" for name in findings.leftovers(self.home)]
        found += findings.unreadable(self.home)
        on_record = {one.uuid: one.state for one in findings.checkpoints(self.home)}
        found += [f"{uuid} is not on record" for uuid in store.list() if uuid not in on_record]
        if NEW in store.list() and ("training", 3, {"loss": 0.25}) not in findings.rows(self.home):
            found.append("metrics are lost")
        if on_record.get(OLD) is tracking.CheckpointState.DELETED and self._command[0] != "delete":
            found.append("the old checkpoint is recorded as deleted")
        return found

    def _next_run(self) -> None:
        before = os.environ.get("DET_HOME")
        os.environ["DET_HOME"] = str(self.home)
        try:
            with core.init() as context:
                context.checkpoint.store.clear_leftovers()
                context.checkpoint.record_unrecorded()
        finally:
            os.environ.pop("DET_HOME")
            if before is not None:
                os.environ["DET_HOME"] = before

    def _restore(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self._pristine, self.home)

    def _run(self, tracer: list[str], command: tuple[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        program = str(pathlib.Path(__file__).with_name("core_program.py"))
        return subprocess.run(
            [*tracer, sys.executable, program, *(command or self._command)],
            env={**os.environ, "DET_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )


def sweep_all(command: str, checkpoint_id: str) -> int:
    """Interrupt every call of a command once, say what came of it, and return the number of faults."""
    faults, missed = 0, 0
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        sweep = Sweep(pathlib.Path(folder).resolve(), command, checkpoint_id)
        calls = sweep.calls()
        for call in calls:
            missed += not sweep.interrupt(call)
            for fault in sweep.faults():
                faults += 1
                print(f"  killed at {call}: {fault}", flush=True)
    by_name = ", ".join(f"{count} {name}" for name, count in collections.Counter(c.name for c in calls).most_common())
    print(f"{command}: {len(calls)} calls ({by_name}), {missed} not made again, {faults} faults", flush=True)
    return faults


def main() -> int:
    if reason := why_not():
        print(f"The sweep over system calls is left out: {reason}.")
        return 0
    return 1 if sweep_all("save", NEW) + sweep_all("delete", OLD) else 0


if __name__ == "__main__":
    sys.exit(main())
