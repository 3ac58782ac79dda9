"""Keep the ranks of a run together: when one fails, dies or hangs, all end, and say why."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from determined import errors
from determined.core.distributed._context import DistributedContext
from determined.core.distributed._exchange import Event, Exchange
from determined.core.distributed._lifeline import CLOSED
from determined.core.distributed._stop import Signals, StopAgreement

PEER_TIMEOUT_VARIABLE = "DET_PEER_TIMEOUT"

_GRACE_PERIOD_S = 2.0  # for a rank to end by itself after another one has failed
_TICK_S = 0.1
_NEWS_TIMEOUT_S = 3.0
_SUSPECTS_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 3.0

# Where a thread that waits for other ranks is: in the exchange of objects or of gradients.
_WAITING_MODULES = ("torch.distributed", "torch.nn.parallel", "determined.core.distributed")
_WAITING_FUNCTIONS = ("_engine_run_backward", "wait_for_ranks")


class Failure(NamedTuple):
    """What ended the run: a rank and what happened there."""

    rank: int
    reason: str
    invalid_hp: bool = False

    def message(self, rank: int) -> str:
        """Return what a rank says that ends because of this; the launcher reads it too."""
        if self.rank == rank:
            return f"Rank {rank} stops. {self.reason}"
        separator = ".\n" if "\n" in self.reason else ": "
        return f"Rank {rank} stops because of rank {self.rank}{separator}{self.reason}"


class HealthMonitor:
    """Hears of the other ranks, and ends this one where it cannot go on."""

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
        """Begin to watch; `on_abort` is called before this process is ended from outside its main thread."""
        self._on_abort = on_abort
        self._exchange.listen(self, peer_timeout_seconds())
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
        """Return the failure of another rank if that is why this one failed; else tell the others of this one's."""
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
        """Tell the others that the program leaves the loop here; returns whether all ranks do so."""
        self._decided.clear()
        self._exchange.publish({"kind": "exit"})
        if not self._decided.wait(_EXIT_TIMEOUT_S):
            self._exchange.publish({"kind": "refuse exit"})
            self._decided.wait()
        return self._all_exit

    def close(self, *, failed: bool) -> None:
        """End the watch; after a failure the others shall see this process end, not take leave."""
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
        # Without rank 0, nothing more will be heard of the others.
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
        """Decide whether all ranks leave the loop. All ranks decide alike, because they see the same events."""
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
        """Say that this rank hangs, and end all; the first rank of those that hang at the same time is named."""
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
        # Recording the end may never come to an end itself.
        thread = threading.Thread(target=self._on_abort, args=(error,), daemon=True)
        thread.start()
        thread.join(_GRACE_PERIOD_S)
        place = "" if failure.rank == self._rank else f"It was here:\n{_stack_of_main_thread()}"
        sys.stderr.write(f"{message}\n{place}")
        sys.stderr.flush()
        os._exit(0 if failure.invalid_hp else 1)


def peer_timeout_seconds() -> float:
    """Return how long a rank may be silent, frozen or cut off, before it counts as lost."""
    text = os.environ.get(PEER_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or 120)
    except ValueError:
        seconds = 0.0
    if not 2 < seconds < math.inf:
        raise ValueError(f"{PEER_TIMEOUT_VARIABLE}={text!r}: pass a number of seconds above 2, such as 120.")
    return seconds


def _may_follow_from_others(error: BaseException) -> bool:
    """Return whether an error can be the consequence of another rank's: it is one of communication."""
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
    output = io.StringIO()
    traceback.print_stack(_main_frame(), file=output)
    return output.getvalue()


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
