"""Keep the ranks of a run together: all stop at the same batch; if one fails, dies or hangs, all end and say why."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

from determined import errors
from determined.core.distributed._context import DistributedContext, seconds_of
from determined.core.distributed._exchange import Event, Exchange
from determined.core.distributed._lifeline import CLOSED

PEER_TIMEOUT_VARIABLE = "DET_PEER_TIMEOUT"

_GRACE_PERIOD_S = 2.0  # for a rank to end by itself after another one has failed
_TICK_S = 0.1
_NEWS_TIMEOUT_S = 3.0
_SUSPECTS_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 3.0

# The code in which a thread waits for other ranks: it exchanges objects or gradients.
_WAITING_MODULES = ("torch.distributed", "torch.nn.parallel", "determined.core.distributed")
_WAITING_FUNCTIONS = ("_engine_run_backward", "wait_for_ranks")


class Signals(Protocol):
    """Holds the signal that asked this process to stop."""

    signum: int | None


class StopAgreement:
    """Finds a batch that no rank has passed, at which all stop; training goes on meanwhile.

    The rank that is asked to stop tells the others, and every rank answers with the next batch at which it can stop.
    After its answer it trains no further than that. All stop at the furthest of these batches.
    """

    def __init__(self, distributed: DistributedContext, exchange: Exchange, signals: Signals) -> None:
        self._distributed = distributed
        self._exchange = exchange
        self._signals = signals
        self._position: Callable[[], int] = lambda: 0
        self._round = 0
        self._answers: dict[int, dict[int, int]] = {}  # batch by rank, for each round that has begun
        self._is_requested = False
        self._stop_at: int | None = None
        self._agreed = threading.Event()
        self.limit = math.inf
        """Batches up to which this rank may train without asking `is_reached`."""

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._agreed.is_set()

    def follow(self, position: Callable[[], int]) -> None:
        """Take the number of batches trained from this function."""
        self._position = position

    def request(self) -> None:
        """Ask all ranks to stop soon."""
        if not self._is_requested:
            self._is_requested = True
            self._exchange.publish({"kind": "stop", "round": self._round, "signal": self._signals.signum})

    def is_reached(self, batches: int) -> bool:
        """Return whether this is the batch to stop at; waits for the other ranks' answers where it could be."""
        if batches < self.limit:
            return False
        self._agreed.wait()  # the health monitor ends it if a rank is lost
        return self._stop_at is not None and batches >= self._stop_at

    def reset(self) -> None:
        """Forget a stop after it took place, unless a signal asked for it. All ranks must call this."""
        if any(self._distributed.allgather(self._is_requested or self.is_agreed)):
            self._agreed.wait()
            if self._signals.signum is not None:
                self._stop_at = self.limit = 0  # whatever is trained after this stops at once
            else:
                self._agreed.clear()
                self._round += 1
                self._is_requested, self._stop_at, self.limit = False, None, math.inf
                if self._round in self._answers:  # a rank that was faster has asked already
                    self._answer()
        self.follow(lambda: 0)

    def on_event(self, sender: int, event: Event) -> None:
        """Handle a request or an answer, on the thread of the exchange."""
        if event["kind"] == "stop" and event["round"] not in self._answers:
            self._answers[event["round"]] = {}
            self._signals.signum = self._signals.signum or event["signal"]
            if event["round"] == self._round:
                self._answer()
        elif event["kind"] == "position":
            answers = self._answers[event["round"]]
            answers[sender] = event["batches"]
            if len(answers) == self._distributed.size:
                self._stop_at = self.limit = max(answers.values())
                self._agreed.set()

    def _answer(self) -> None:
        """Keep training from passing its next batch, and tell the others which one that is."""
        self._is_requested = True
        while True:
            self.limit = self._position() + 1
            if self._position() < self.limit:  # training goes on, and may have passed the limit before it could see it
                break
        self._exchange.publish({"kind": "position", "round": self._round, "batches": int(self.limit)})


class Failure(NamedTuple):
    """What ended the run: the rank that failed and what happened there."""

    rank: int
    reason: str
    invalid_hp: bool = False

    def message(self, rank: int) -> str:
        """Return what a rank prints that ends because of this; the launcher parses it."""
        if self.rank == rank:
            return f"Rank {rank} stops. {self.reason}"
        separator = ".\n" if "\n" in self.reason else ": "
        return f"Rank {rank} stops because of rank {self.rank}{separator}{self.reason}"


class HealthMonitor:
    """Watches the other ranks, and ends this one if it cannot go on."""

    def __init__(self, distributed: DistributedContext, exchange: Exchange, signals: Signals) -> None:
        self._rank = distributed.rank
        self._timeout = distributed.timeout
        self._exchange = exchange
        self._signals = signals
        self._pulse: Callable[[], object] | None = None
        self._on_abort: Callable[[BaseException], None] = lambda _: None
        self._failure: Failure | None = None
        self._heard = threading.Event()
        self._gone = [threading.Event() for _ in range(distributed.size)]
        self._leaving = threading.Event()
        self._suspects: dict[int, str] = {}
        self._exiting: set[int] = set()
        self._decided = threading.Event()
        self._all_exit = False
        self._thread = threading.Thread(target=self._run, name="determined-health", daemon=True)
        self.stop = StopAgreement(distributed, exchange, signals)

    def start(self, on_abort: Callable[[BaseException], None]) -> None:
        """Begin to watch. `on_abort` is called before another thread than the main one ends this process."""
        self._on_abort = on_abort
        self._exchange.listen(self, seconds_of(PEER_TIMEOUT_VARIABLE, 120.0, above=2.0))
        self._thread.start()

    @contextlib.contextmanager
    def following(self, position: Callable[[], int], pulse: Callable[[], object]) -> Iterator[None]:
        """Watch a loop: `position` is how many batches it has trained, and `pulse` changes while it is alive."""
        self.stop.follow(position)
        self._pulse = pulse
        try:
            yield
        finally:
            self._pulse = None

    def explain(self, error: BaseException) -> Failure | None:
        """Return the failure of another rank if it caused this error; else publish this one and return None."""
        self._leaving.set()
        is_invalid = isinstance(error, errors.InvalidHP)
        if is_invalid and self._all_exit:
            return None
        if _may_follow_from_others(error):
            self._heard.wait(_NEWS_TIMEOUT_S)
        failure = self._failure
        if failure is not None and failure.rank != self._rank:
            # Its traceback comes first: it is printed before that process ends.
            self._gone[failure.rank].wait(_NEWS_TIMEOUT_S)
            return failure
        summary = f"{type(error).__name__}: {error}".splitlines()[0][:1000]
        published = self._publish_failure(Failure(self._rank, summary, is_invalid))
        with contextlib.suppress(TimeoutError):
            published.result(_NEWS_TIMEOUT_S)  # else this process may end before
        return None

    def agree_to_exit(self) -> bool:
        """Publish that the program leaves the loop on this rank; returns whether it does so on all ranks."""
        self._decided.clear()
        self._exchange.publish({"kind": "exit"})
        if not self._decided.wait(_EXIT_TIMEOUT_S):
            self._exchange.publish({"kind": "refuse exit"})
            self._decided.wait()
        return self._all_exit

    def close(self, *, failed: bool) -> None:
        """End the watch. After a failure, the others see this process end instead of a goodbye."""
        self._leaving.set()
        if failed:
            self._exchange.abandon()

    def on_event(self, sender: int, event: Event) -> None:
        """Handle what a rank published."""
        if event["kind"] == "failure":
            self._learn(Failure(event["rank"], event["reason"], event["invalid_hp"]))
        elif event["kind"] == "hangs":
            self._suspects[sender] = event["reason"]
        elif event["kind"] in ("exit", "refuse exit"):
            self._decide_exit(sender, is_refused=event["kind"] == "refuse exit")
        else:
            self.stop.on_event(sender, event)

    def on_left(self, rank: int, why: str) -> None:
        """Handle that a rank is gone."""
        # Without rank 0, no further news of the others arrives.
        for gone in self._gone if rank == 0 else [self._gone[rank]]:
            gone.set()
        if why != CLOSED:
            self._learn(Failure(rank, why))

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._heard.set()

    def _publish_failure(self, failure: Failure) -> Any:
        return self._exchange.publish({"kind": "failure", **failure._asdict()})

    def _decide_exit(self, sender: int, *, is_refused: bool) -> None:
        """Decide whether all ranks leave the loop. All decide alike, because they see the same events."""
        if not is_refused:
            self._exiting.add(sender)
        if len(self._exiting) == len(self._gone) or (is_refused and self._exiting):
            self._all_exit = not is_refused
            self._exiting.clear()
            self._decided.set()

    def _run(self) -> None:
        beat, since, is_reported = object(), time.monotonic(), False
        while not self._leaving.wait(_TICK_S):
            if self._signals.signum is not None:
                self.stop.request()
            if self._failure is not None:
                self._end_soon(self._failure)
                return
            now = time.monotonic()
            pulse = self._pulse() if self._pulse else None
            if pulse is None or pulse != beat:
                beat, since, is_reported = pulse, now, False
            elif not is_reported and now - since > self._timeout and (stack := _stack_of_user_code()):
                is_reported = True
                self._report_hang(stack)

    def _report_hang(self, stack: str) -> None:
        """Publish that this rank hangs, and end all ranks; of several that hang, the lowest is named."""
        limit = f"{self._timeout:g} seconds (DistributedContext(timeout=...) or DET_DISTRIBUTED_TIMEOUT)"
        self._exchange.publish({"kind": "hangs", "reason": f"has not come on for {limit} and is here:\n{stack}"})
        if self._leaving.wait(_SUSPECTS_TIMEOUT_S) or not self._suspects:
            return
        reasons = "\n".join(f"Rank {one} {reason}" for one, reason in sorted(self._suspects.items()))
        self._publish_failure(Failure(min(self._suspects), reasons))

    def _end_soon(self, failure: Failure) -> None:
        """End the process unless its main thread is on its way out within the grace period."""
        if self._leaving.wait(_GRACE_PERIOD_S):
            return
        message = failure.message(self._rank)
        error = errors.InvalidHP(failure.reason) if failure.invalid_hp else errors.PeerLostException(message)
        # Recording the end may hang too.
        thread = threading.Thread(target=self._on_abort, args=(error,), daemon=True)
        thread.start()
        thread.join(_GRACE_PERIOD_S)
        place = "" if failure.rank == self._rank else f"It was here:\n{_stack_of_main_thread()}"
        sys.stderr.write(f"{message}\n{place}")
        sys.stderr.flush()
        os._exit(0 if failure.invalid_hp else 1)


def _may_follow_from_others(error: BaseException) -> bool:
    """Return whether another rank's failure may have caused an error: it is one of communication."""
    if isinstance(error, errors.PeerLostException):
        return True
    kinds = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
    if any(kind.__name__ in kinds for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "peer", "connection"))


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _stack_of_main_thread() -> str:
    return "".join(traceback.format_stack(_main_frame()))


def _stack_of_user_code() -> str | None:
    """Return the stack of the main thread, unless it waits for another rank."""
    frame = _main_frame()
    for _ in range(4):  # the innermost ones tell
        if frame is None:
            break
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_WAITING_MODULES) or frame.f_code.co_name in _WAITING_FUNCTIONS:
            return None
        frame = frame.f_back
    return _stack_of_main_thread()
