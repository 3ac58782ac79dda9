"""Keep one run: start its ranks, store what they write, end them when asked, and tell how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from determined.core.distributed import DEFAULT_TIMEOUT_S, TIMEOUT_VARIABLE
from determined.experiment.executors._base import RunExit, RunSpec
from determined.experiment.executors._output import gist
from determined.experiment.executors._patterns import Patterns
from determined.experiment.executors._processes import children
from determined.experiment.executors._rank import Rank
from determined.experiment.executors._start import start_of
from determined.experiment.executors._verdict import RunObservations, classify_exit
from determined.experiment.executors._wakeup import heard
from determined.launch._ends import RankExits
from determined.launch._line import Line

SETTLING = 5.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
PARTING = 2.0
"""Seconds that processes have to end which a run leaves behind."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What asks a keeper to let its run stop, as when the machine is shut down."""
_GIVING_UP = 10.0
_SHOWN_LINES = 20


class Keeper:
    """Runs one run to its end."""

    def __init__(self, spec: RunSpec, environment: dict[str, str], line: Line, woken: int) -> None:
        self._spec = spec
        self._environment = environment
        self._line = line
        self._events = selectors.DefaultSelector()
        self._watch(line.link.fileno(), self._hear)
        self._watch(woken, lambda: self._on_signals(heard(woken)))
        self._patterns = Patterns(spec.patterns)
        self._told = 0
        self._started = time.time()
        self._ranks: list[Rank] = []
        self._living: dict[int, Rank] = {}
        self._ends = RankExits(0)
        self._course = RunObservations()
        self._meeting_point: object = None
        self._was_cut_off = False
        self._signalled: set[int] = set()
        self._deadlines: dict[Callable[[], None], float] = {}
        self._overdue = ""
        self._is_killing = False
        self._is_over = False

    def run(self, orders: Iterable[Mapping[str, Any]] = ()) -> RunExit:
        """Return the end of the run, when it has come; `orders` are those that came with the run itself."""
        self._start()
        self._obey(orders)
        while not self._is_over:
            for key, _ in self._events.select(self._until_next()):
                key.data()
            for action in [action for action, at in self._deadlines.items() if at <= time.monotonic()]:
                del self._deadlines[action]
                action()
        return self._end()

    # The ranks

    def _start(self) -> None:
        try:
            start = start_of(self._spec, self._environment)
            self._ends = RankExits(len(start.bodies))
            for number, body in enumerate(start.bodies):
                self._add(Rank(number, self._spec, self._patterns, body))
            self._meeting_point = start.finish()
        except Exception as error:
            self._course.not_started = f"{error}"
            self._kill_all()
        self._tell_of_patterns()
        self._reap()

    def _add(self, rank: Rank) -> None:
        self._ranks.append(rank)
        self._living[rank.pid] = rank
        self._watch(rank.beginning, functools.partial(self._on_beginning, rank))
        for output in rank.outputs:
            self._watch(output.pipe, functools.partial(self._copy, output.pipe, output.copy))

    def _on_beginning(self, rank: Rank) -> None:
        self._course.not_started = self._course.not_started or rank.complaint()
        self._events.unregister(rank.beginning)  # it has begun, or never will

    def _copy(self, pipe: int, copy: Callable[[], int]) -> None:
        if copy() == 0:
            self._events.unregister(pipe)
        self._tell_of_patterns()

    def _tell_of_patterns(self) -> None:
        """Add to the log which patterns are not looked for, or not any more."""
        news = list(self._patterns.problems.items())[self._told :]
        self._told += len(news)
        for pattern, problem in news if self._ranks else ():
            self._ranks[0].say(f"[keeper] The log policy with the pattern {pattern!r} has no effect: {problem}.")

    # What comes from outside

    def _watch(self, source: int, action: Callable[[], object]) -> None:
        self._events.register(source, selectors.EVENT_READ, action)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in so many seconds, or earlier if that was to be."""
        at = time.monotonic() + seconds
        self._deadlines[action] = min(at, self._deadlines.get(action, at))

    def _until_next(self) -> float | None:
        return max(0.0, min(self._deadlines.values()) - time.monotonic()) if self._deadlines else None

    def _hear(self) -> None:
        orders = self._line.hear()
        if orders is None:
            self._events.unregister(self._line.link.fileno())
            self._course.runner_gone = not self._course.asked
            self._ask()
        else:
            self._obey(orders)

    def _obey(self, orders: Iterable[Mapping[str, Any]]) -> None:
        for order in orders:
            self._ask() if order["order"] == "stop" else self._kill("it was killed as asked")

    def _on_signals(self, signums: bytes) -> None:
        if any(signum in STOPPING for signum in signums):
            self._ask()
        self._reap()

    # Ending

    def _ask(self) -> None:
        """Let the ranks save and end."""
        if self._course.asked:
            return
        self._course.asked = True
        grace = self._spec.grace_period
        self._after(grace, lambda: self._kill(f"it did not end within {grace:g} s of being asked to"))
        for pid in self._living:
            # To the rank alone: workers of its own, such as those that load data, end with it.
            self._signal(pid, signal.SIGTERM)

    def _kill(self, why: str) -> None:
        if not self._ends.are_all_in or self._was_cut_off:
            self._course.killed = self._course.killed or why
        self._kill_all()

    def _kill_all(self) -> None:
        """Kill the ranks and whatever they have started; what is further down is adopted, and then killed as well."""
        if not self._is_killing:
            self._is_killing = True
            self._after(_GIVING_UP, self._give_up)
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
            self._on_end(pid, os.waitstatus_to_exitcode(status))
        if self._is_killing:
            self._kill_all()
        elif not self._living:
            self._end_leftovers()

    def _on_end(self, pid: int, code: int) -> None:
        rank = self._living.pop(pid, None)
        by_keeper = pid in self._signalled and code < 0
        self._signalled.discard(pid)
        if rank is None:
            return
        end = dataclasses.replace(rank.end(code, by_keeper), overdue=self._overdue)
        self._ends.add(end)
        self._was_cut_off |= by_keeper
        if end.is_failure and self._living:
            self._after(SETTLING, self._kill_all)
        elif code and self._living and not self._course.asked:
            # It was stopped by somebody else; the others agree with it, or are no use without it.
            self._after(self._spec.grace_period, self._kill_all)
        elif self._living and not self._course.asked:
            self._after(self._longest_wait(), self._kill_overdue)

    def _longest_wait(self) -> float:
        try:
            timeout = float(self._environment.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT_S)
        except ValueError:  # the ranks say so themselves
            timeout = DEFAULT_TIMEOUT_S
        return max(self._spec.grace_period, timeout)

    def _kill_overdue(self) -> None:
        """End ranks that are frozen or hang after the training, which no other rank is left to notice."""
        if self._living and not self._is_killing:
            self._overdue = (
                f"did not end within {self._longest_wait():g} s after another rank had (the longer of "
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
            self._after(PARTING, self._kill_all)

    # The end

    def _end(self) -> RunExit:
        course, failure = self._course, self._ends.failure
        for rank in self._ranks:
            course.not_started = course.not_started or rank.complaint()
            rank.drain()
        self._tell_of_patterns()
        for rank in self._ranks:
            rank.close()
        course.failure, course.status = failure, self._ends.status
        with contextlib.suppress(OSError):
            course.invalid_hp = self._spec.files.invalid_hp.read_text(encoding="utf-8", errors="replace")
        lines = self._ranks[failure.rank if failure else 0].last_lines if self._ranks else []
        course.words = gist(lines)
        reason, message = classify_exit(course, len(self._ranks))
        return RunExit.of(
            self._spec,
            reason,
            message,
            status=course.status if self._ranks and self._ends.are_all_in else None,
            last_lines=tuple(lines[-_SHOWN_LINES:]),
            matches=self._patterns.matches,
            runner_gone=course.runner_gone,
            started=self._started,
        )
