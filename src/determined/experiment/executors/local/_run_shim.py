"""The process in front of a run: starts its ranks, stores what they write, ends them when asked, reports the exit."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from determined._home import make_private
from determined.core.distributed import DEFAULT_TIMEOUT_S, TIMEOUT_VARIABLE
from determined.experiment.executors._base import EndReason, RunExit, RunSpec
from determined.experiment.executors._exit_file import summary, write_json
from determined.experiment.executors.local._classify import RunObservations, classify_exit
from determined.experiment.executors.local._log import LogOutput
from determined.experiment.executors.local._patterns import Patterns
from determined.experiment.executors.local._rank import Rank, rank_bodies, serve_store
from determined.processes import Channel, EventLoop, RankExits, SignalPipe, adopt_orphans, children, set_name
from determined.tracking import RunProcess, lacks_room

SETTLING_TIMEOUT_S = 5.0
"""How long the other ranks have to end by themselves after one has failed."""
LEFTOVER_TIMEOUT_S = 2.0
"""How long processes have to end that a run leaves behind."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What asks a shim to let its run stop, as when the machine is shut down."""
_KILL_TIMEOUT_S = 10.0
_RETRY_S = 1.0
_SHOWN_LINES = 20


def main(link: socket.socket) -> None:
    """Supervise the run that the other end of a socket describes, and report how it ended."""
    os.setsid()
    adopt_orphans()
    channel = Channel(link)
    messages: list[dict[str, Any]] | None = []
    while messages == []:
        messages = channel.receive()
    process = RunProcess.of(os.getpid()).to_json()
    if messages is None or not channel.send({"shim": process}):
        return  # the runner is gone, and nothing has begun
    start, *orders = messages
    spec = RunSpec.from_json(start["spec"])
    set_name(f"det-shim-{spec.trial_id}")
    signals = SignalPipe((signal.SIGCHLD, *STOP_SIGNALS))
    problem: Exception | None = None
    try:
        exit = _make_folder(spec, {**process, "forkserver": start["forkserver"]}, channel, bool(orders))
        exit = exit or RunShim(spec, start["environment"], channel, signals).run(orders)
    except Exception as error:
        reason = f"its shim failed: {type(error).__name__}: {error}"
        problem, exit = error, RunExit.of(spec, EndReason.KILLED, reason)
    with contextlib.suppress(OSError):  # a full disk: the runner still hears it
        write_json(spec.files.exit, exit.to_json())
    channel.send({"exit": exit.to_json()})
    if problem is not None:
        raise problem  # with which this process ends, and all that it started


def _make_folder(spec: RunSpec, shim: dict[str, Any], channel: Channel, has_orders: bool) -> RunExit | None:
    """Make the folder of a run, as soon as the disk has room for it; returns the exit of a run that cannot have one.

    An order, which may have come already, or the runner's end ends the waiting.
    """
    while True:
        try:
            make_private(spec.folder)
            write_json(spec.files.shim, shim)
            return None
        except OSError as error:
            if not lacks_room(error):
                return RunExit.of(spec, EndReason.NOT_STARTED, f"{error}")
            if has_orders or select.select([channel], [], [], _RETRY_S)[0]:
                is_gone = not has_orders and channel.receive() is None
                return RunExit.of(spec, EndReason.STOPPED, f"before it had begun: {error}", runner_gone=is_gone)


class RunShim:
    """Runs one run to its end."""

    def __init__(self, spec: RunSpec, environment: dict[str, str], channel: Channel, signals: SignalPipe) -> None:
        self._spec = spec
        self._environment = environment
        self._channel = channel
        self._events = EventLoop()
        self._events.watch(channel, self._receive)
        self._events.watch(signals, lambda: self._on_signals(signals.read()))
        self._patterns = Patterns(spec.patterns)
        self._reported_problems = 0
        self._started = time.time()
        self._ranks: list[Rank] = []
        self._living: dict[int, Rank] = {}
        self._exits = RankExits(0)
        self._seen = RunObservations()
        self._store: object = None
        self._was_cut_off = False
        self._signalled: set[int] = set()
        self._overdue = ""
        self._is_killing = False
        self._is_over = False

    def run(self, orders: Iterable[Mapping[str, Any]] = ()) -> RunExit:
        """Return the exit of the run, when it has come; `orders` are those that came with the run itself."""
        self._start()
        self._obey(orders)
        while not self._is_over:
            self._events.run_once()
        return self._exit()

    # The ranks

    def _start(self) -> None:
        if not self._spec.code.is_dir():
            self._seen.not_started = f"the code folder {self._spec.code} is not there"
        else:
            bodies, door = rank_bodies(self._spec, self._environment)
            self._exits = RankExits(len(bodies))
            for number, body in enumerate(bodies):
                self._add(Rank(number, self._spec, self._patterns, body))
            self._store = serve_store(door) if door is not None else None
        self._report_patterns()
        self._reap()

    def _add(self, rank: Rank) -> None:
        self._ranks.append(rank)
        self._living[rank.pid] = rank
        for output in rank.outputs:
            self._events.watch(output.pipe, functools.partial(self._copy, output))

    def _copy(self, output: LogOutput) -> None:
        if output.copy() == 0:
            self._events.unwatch(output.pipe)
        self._report_patterns()

    def _report_patterns(self) -> None:
        """Add to the log which patterns are not searched for, or not any more."""
        new = list(self._patterns.problems.items())[self._reported_problems :]
        self._reported_problems += len(new)
        for pattern, problem in new if self._ranks else ():
            self._ranks[0].add_line(f"[shim] The log policy with the pattern {pattern!r} has no effect: {problem}.")

    # What comes from outside

    def _receive(self) -> None:
        orders = self._channel.receive()
        if orders is None:
            self._events.unwatch(self._channel)
            self._seen.runner_gone = not self._seen.asked
            self._ask()
        else:
            self._obey(orders)

    def _obey(self, orders: Iterable[Mapping[str, Any]]) -> None:
        for order in orders:
            self._ask() if order["order"] == "stop" else self._kill("it was killed as asked")

    def _on_signals(self, signums: bytes) -> None:
        if any(signum in STOP_SIGNALS for signum in signums):
            self._ask()
        self._reap()

    # Ending

    def _ask(self) -> None:
        """Let the ranks save and end."""
        if self._seen.asked:
            return
        self._seen.asked = True
        grace = self._spec.grace_period
        self._events.after(grace, lambda: self._kill(f"it did not end within {grace:g} s of being asked to"))
        for pid in self._living:
            # To the rank alone: workers of its own, such as those that load data, end with it.
            self._signal(pid, signal.SIGTERM)

    def _kill(self, why: str) -> None:
        if not self._exits.are_all_in or self._was_cut_off:
            self._seen.killed = self._seen.killed or why
        self._kill_all()

    def _kill_all(self) -> None:
        """Kill the ranks and whatever they have started; what is further down is adopted, and then killed as well."""
        if not self._is_killing:
            self._is_killing = True
            self._events.after(_KILL_TIMEOUT_S, self._give_up)
        for pid in children():
            self._signal(pid, signal.SIGKILL)

    def _give_up(self) -> None:
        self._is_over = True  # what cannot be killed, such as a process that waits for a dead disk, is left

    def _signal(self, pid: int, signum: signal.Signals) -> None:
        self._signalled.add(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)

    def _reap(self) -> None:
        """Take note of all children that have ended; those of ranks that have ended became this process's own."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._is_over = True
                return
            if not pid:
                break
            self._on_exit(pid, os.waitstatus_to_exitcode(status))
        if self._is_killing:
            self._kill_all()
        elif not self._living:
            self._end_leftovers()

    def _on_exit(self, pid: int, code: int) -> None:
        rank = self._living.pop(pid, None)
        by_shim = pid in self._signalled and code < 0
        self._signalled.discard(pid)
        if rank is None:
            return
        exit = rank.exit(code, by_shim, self._overdue)
        self._exits.add(exit)
        self._was_cut_off |= by_shim
        if exit.is_failure and self._living:
            self._events.after(SETTLING_TIMEOUT_S, self._kill_all)
        elif code and self._living and not self._seen.asked:
            # It was stopped by somebody else; the others agree with it, or are no use without it.
            self._events.after(self._spec.grace_period, self._kill_all)
        elif self._living and not self._seen.asked:
            self._events.after(self._overdue_timeout(), self._kill_overdue)

    def _overdue_timeout(self) -> float:
        try:
            timeout = float(self._environment.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT_S)
        except ValueError:  # the ranks say so themselves
            timeout = DEFAULT_TIMEOUT_S
        return max(self._spec.grace_period, timeout)

    def _kill_overdue(self) -> None:
        """End ranks that are frozen or hang after the training, which no other rank is left to notice."""
        if self._living and not self._is_killing:
            self._overdue = (
                f"did not end within {self._overdue_timeout():g} s after another rank had (the longer of "
                f"preemption_timeout and {TIMEOUT_VARIABLE}), and was killed"
            )
            self._kill_all()

    def _end_leftovers(self) -> None:
        """End what the ranks have left behind.

        A shell that dies of the request to stop leaves the training itself, which is to save: it has as long as any.
        """
        for pid in children() - self._signalled:
            self._signal(pid, signal.SIGTERM)
        if not self._was_cut_off:
            self._events.after(LEFTOVER_TIMEOUT_S, self._kill_all)

    # The exit

    def _exit(self) -> RunExit:
        seen, failure = self._seen, self._exits.failure
        for rank in self._ranks:
            rank.drain()
        self._report_patterns()
        for rank in self._ranks:
            rank.close()
        seen.failure, seen.status = failure, self._exits.status
        with contextlib.suppress(OSError):
            seen.not_started = self._spec.files.not_started.read_text(encoding="utf-8", errors="replace")
        with contextlib.suppress(OSError):
            seen.invalid_hp = self._spec.files.invalid_hp.read_text(encoding="utf-8", errors="replace")
        lines = self._ranks[failure.rank if failure else 0].last_lines if self._ranks else []
        seen.summary = summary(lines)
        reason, message = classify_exit(seen, len(self._ranks))
        return RunExit.of(
            self._spec,
            reason,
            message,
            status=seen.status if self._ranks and self._exits.are_all_in else None,
            last_lines=tuple(lines[-_SHOWN_LINES:]),
            matches=self._patterns.matches,
            runner_gone=seen.runner_gone,
            started=self._started,
        )
