"""Follow an experiment until it ends, is paused, or the reader leaves."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

import typer

from determined import errors, experiment, tracking
from determined._home import home

from . import _summary
from ._displays import Display, LineDisplay, LiveDisplay
from ._view import View
from ._watch import Watch

_EVERY = 0.5
_SHARE = 20
"""Reading and drawing take at most one part in this number of a core, however many trials there are."""
_SLICE = 0.1
_NOTES = {
    tracking.Desired.PAUSED: "Pausing: trials save and stop. Ctrl-C detaches.",
    tracking.Desired.CANCELED: "Stopping: trials save and stop. Ctrl-C detaches.",
    tracking.Desired.KILLED: "Stopping. Ctrl-C detaches.",
}


class _Choice(enum.Enum):
    """What to do after Ctrl-C."""

    FOLLOW = "follow"
    DETACH = "detach"
    PAUSE = "pause"


class _Signals:
    """Counts Ctrl-C, so that it comes between two looks and not within one; SIGTERM ends this process tidily."""

    def __init__(self) -> None:
        self.interrupts = 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch SIGINT and SIGTERM within the block."""
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate),
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def sleep(self, seconds: float) -> None:
        """Sleep until Ctrl-C, at most so long."""
        until = time.monotonic() + seconds
        while not self.interrupts and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE))


def follow(experiment_id: int, *, from_start: bool = False) -> int:
    """Show an experiment until it ends, is paused or the reader leaves; returns the exit status.

    Of one that has just been started no validation is left out, also where it is faster than the first look.
    """
    signals = _Signals()
    with Watch(experiment_id, home(), lambda: signals.interrupts > 0) as watch, signals.caught():
        while True:
            view = _show(watch, signals, from_start)
            if view.is_over:
                return _summary.conclude(view, home())
            choice = _choose(view, signals)
            signals.interrupts = 0
            if choice is _Choice.DETACH:
                _say_detached(view)
                return 0 if _can_ask() else 128 + signal.SIGINT
            if choice is _Choice.PAUSE:
                _pause(experiment_id)


def _show(watch: Watch, signals: _Signals, from_start: bool) -> View:
    """Show one view after the other until it is over, or Ctrl-C."""
    display: Display = LiveDisplay(sys.stdout) if sys.stdout.isatty() else LineDisplay(tell_all=from_start)
    with contextlib.closing(display):
        while True:
            began = time.process_time()
            view = watch.look()
            display.show(view, _note(view))
            if view.is_over or signals.interrupts:
                return view
            signals.sleep(max(_EVERY, (time.process_time() - began) * _SHARE))


def _note(view: View) -> str:
    return _NOTES.get(view.desired, "Ctrl-C: detach or pause.")


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _choose(view: View, signals: _Signals) -> _Choice:
    """Return the effect of Ctrl-C: what the reader chooses, or a pause if it comes twice."""
    if view.desired is not tracking.Desired.ACTIVE or not _can_ask():
        return _Choice.DETACH
    typer.echo("[d] detach: the experiment keeps running   [p] pause it (or Ctrl-C again)   [Enter] keep following")
    typer.echo("> ", nl=False)
    while signals.interrupts < 2:  # not by input(), for which Ctrl-C can come too early to be heard
        if select.select([sys.stdin], [], [], _SLICE)[0]:
            return _meant(os.read(sys.stdin.fileno(), 1024))
    typer.echo()
    return _Choice.PAUSE


def _meant(said: bytes) -> _Choice:
    if not said:  # Ctrl-D
        return _Choice.DETACH
    return {b"d": _Choice.DETACH, b"p": _Choice.PAUSE}.get(said.strip().lower()[:1], _Choice.FOLLOW)


def _pause(experiment_id: int) -> None:
    with contextlib.suppress(errors.TrackingException):  # it has ended meanwhile
        experiment.control.pause(experiment_id)


def _say_detached(view: View) -> None:
    does = "keeps running" if view.desired is tracking.Desired.ACTIVE else "keeps pausing or stopping"
    typer.echo(f"Experiment {view.id} {does} in the background.")
    typer.echo(f"  det experiment activate {view.id} --follow  follows it again")
    typer.echo(f"  det experiment pause {view.id}              pauses it")
