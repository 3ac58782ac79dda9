"""Keep the ranks of a run together: when one fails, dies or hangs, all end, and say why."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from determined import errors
from determined.core._agreement import StopAgreement
from determined.core._distributed import DistributedContext
from determined.core._preempt import PreemptContext
from determined.core._sideline import SideLine

GRACE = 2.0
"""Seconds that a rank has to end by itself after another one has failed."""

SILENCE_VARIABLE = "DET_PEER_TIMEOUT"

_TICK = 0.1
_NEWS = 3.0
_SUSPECTS = 2.0
_LEAVERS = 3.0

# Where a thread that waits for other ranks is: in the exchange of objects or of gradients.
_CHANNEL = ("_channel", "_handshake", "_hub", "_spoke")
_WAITING_MODULES = ("torch.distributed", "torch.nn.parallel", *(f"determined.core.{part}" for part in _CHANNEL))
_WAITING_FUNCTIONS = ("_engine_run_backward", "wait_for_ranks")


class Failure(NamedTuple):
    """What ended the run: a rank and what happened there."""

    rank: int
    reason: str
    invalid_hp: bool = False


class RankWatch:
    """Hears of the other ranks on a thread of its own, and ends this one where it cannot go on."""

    def __init__(self, distributed: DistributedContext, line: SideLine, preempt: PreemptContext) -> None:
        self._rank = distributed.rank
        self._timeout = distributed.timeout
        self._line = line
        self._preempt = preempt
        self._pulse: Callable[[], object] | None = None
        self._on_abort: Callable[[BaseException], None] = lambda _: None
        self._failure: Failure | None = None
        self._heard = threading.Event()
        self._gone: dict[int, threading.Event] = {rank: threading.Event() for rank in range(distributed.size)}
        self._leaving = threading.Event()
        self._suspects: dict[int, str] = {}
        self._leavers: dict[int, str] = {}
        self._verdict = threading.Event()
        self._all_leave = False
        self._thread = threading.Thread(target=self._run, name="determined-rank-watch", daemon=True)
        self.stop = StopAgreement(distributed, line, preempt)

    def start(self, on_abort: Callable[[BaseException], None]) -> None:
        """Begin to watch; `on_abort` is called before this process is ended from outside its main thread."""
        self._on_abort = on_abort
        self._line.start(self._hear, self._lost, silence=silence_seconds())
        self._thread.start()

    @contextlib.contextmanager
    def following(self, position: Callable[[], int], pulse: Callable[[], object]) -> Any:
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
        if isinstance(error, errors.InvalidHP) and self._all_leave:
            return None
        if _may_follow_from_others(error):
            self._heard.wait(_NEWS)
        failure = self._failure
        if failure is not None and failure.rank != self._rank:
            # Its traceback comes first: it is printed before that process ends.
            self._gone[failure.rank].wait(_NEWS)
            return failure
        self._line.send({"kind": "failed", "reason": summary_of(error), **_kind_of(error)})
        self._line.flush(_NEWS)  # else this process may end before its side line has had a turn
        return None

    def leave_unasked(self, reason: str, batches: int) -> bool:
        """Tell the others that the program leaves the loop here; returns whether all ranks do so."""
        self._line.send({"kind": "leaves", "reason": f"{reason} at batch {batches}"})
        self._verdict.wait()
        self._verdict.clear()
        return self._all_leave

    def close(self, *, failed: bool) -> None:
        """Take leave of the others; after a failure they shall see this process end, not take leave."""
        self._leaving.set()
        if not failed:
            self._line.close()

    def _hear(self, sender: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "failed":  # on the chief
            about = {"rank": sender, "reason": message["reason"], "invalid_hp": message["invalid_hp"]}
            self._line.publish({"kind": "failure", **about})
        elif kind == "failure":
            self._learn(Failure(message["rank"], message["reason"], message["invalid_hp"]))
        elif kind == "hangs":  # on the chief, which waits a little for others that hang too
            self._suspects[sender] = message["reason"]
            if len(self._suspects) == 1:
                _later(_SUSPECTS, self._name_suspects)
        elif kind == "leaves":
            self._leavers[sender] = message["reason"]
            if len(self._leavers) == len(self._gone):
                self._judge(self._leavers, together=True)
            elif len(self._leavers) == 1:
                _later(_LEAVERS, functools.partial(self._judge, self._leavers, together=False))
        elif kind == "verdict":
            self._all_leave = message["together"]
            self._verdict.set()
        else:
            self.stop.hear(sender, message)

    def _lost(self, rank: int, why: str) -> None:
        self._gone[rank].set()
        self._learn(Failure(rank, why))

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._heard.set()

    def _name_suspects(self) -> None:
        rank = min(self._suspects)
        reasons = "\n".join(f"Rank {one} {reason}" for one, reason in sorted(self._suspects.items()))
        self._line.publish({"kind": "failure", "rank": rank, "reason": reasons, "invalid_hp": False})

    def _judge(self, leavers: dict[int, str], *, together: bool) -> None:
        """Say, on the chief, whether all ranks have left the loop with these; once."""
        if leavers is self._leavers:
            self._leavers = {}
            self._line.publish({"kind": "verdict", "together": together})

    def _run(self) -> None:
        beat, since, told = object(), time.monotonic(), False
        while not self._leaving.wait(_TICK):
            if self._preempt.signum is not None:
                self.stop.ask()
            if self._failure is not None:
                self._end_soon(self._failure)
                return
            now = time.monotonic()
            pulse = self._pulse() if self._pulse else None
            if pulse is None or pulse != beat:
                beat, since, told = pulse, now, False
            elif not told and now - since > self._timeout and (stack := _stack_of_user_code()):
                told = True
                limit = f"{self._timeout:g} seconds (DistributedContext(timeout=...) or DET_DISTRIBUTED_TIMEOUT)"
                self._line.send({"kind": "hangs", "reason": f"has not come on for {limit} and is here:\n{stack}"})

    def _end_soon(self, failure: Failure) -> None:
        """End the process unless its main thread is on its way out within the time of grace."""
        if self._leaving.wait(GRACE):
            return
        message = message_of(self._rank, failure)
        error = errors.InvalidHP(failure.reason) if failure.invalid_hp else errors.PeerLostException(message)
        _run_briefly(lambda: self._on_abort(error))
        place = "" if failure.rank == self._rank else f"It was here:\n{_stack_of_main_thread()}"
        sys.stderr.write(f"{message}\n{place}")
        sys.stderr.flush()
        os._exit(0 if failure.invalid_hp else 1)


def silence_seconds() -> float:
    """Return how long a rank may be silent, frozen or cut off, before it counts as lost."""
    text = os.environ.get(SILENCE_VARIABLE, "")
    try:
        seconds = float(text or 120)
    except ValueError:
        seconds = 0.0
    if not 2 < seconds < math.inf:
        raise ValueError(f"{SILENCE_VARIABLE}={text!r}: pass a number of seconds above 2, such as 120.")
    return seconds


def message_of(rank: int, failure: Failure) -> str:
    """Return what a rank says that ends because of another one."""
    if failure.rank == rank:
        return f"Rank {rank} stops. {failure.reason}"
    separator = ".\n" if "\n" in failure.reason else ": "
    return f"Rank {rank} stops because of rank {failure.rank}{separator}{failure.reason}"  # the launcher reads it too


def summary_of(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:1000]


def _kind_of(error: BaseException) -> dict[str, bool]:
    return {"invalid_hp": isinstance(error, errors.InvalidHP)}


def _may_follow_from_others(error: BaseException) -> bool:
    """Say whether an error can be the echo of another rank's: it is one of communication."""
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


def _later(seconds: float, action: Callable[[], None]) -> None:
    """Do something after a while, if the process lives that long."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _run_briefly(action: Callable[[], None]) -> None:
    """Run something that may never end, for a moment."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(2.0)
