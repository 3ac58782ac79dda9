"""The event file of the trial that runs in this process."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

from determined._home import home
from determined.tensorboard._events import EventFile

_current: Callable[[], EventFile] | None = None


def set_current(source: Callable[[], EventFile] | None) -> None:
    """Let `current` ask `source` for the event file; None when the trial ends. Closes nothing.

    A function and not a file, since the folder of a trial is known only some time after the trial starts.
    """
    global _current
    _current = source


def current() -> EventFile:
    """Return the running trial's event file, or one under the home folder when no trial is running."""
    return _current() if _current else _unattached(home().unattached_tensorboard)


# One file a process, however often it is asked for.
@functools.cache
def _unattached(folder: pathlib.Path) -> EventFile:
    return EventFile(folder)
