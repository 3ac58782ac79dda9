"""Places where a test can make a process die, to show that nothing is lost there."""

from __future__ import annotations

import os
import signal

VARIABLE = "DET_DIE_AT"
"""Environment variable: the name of a point, or `name:n` for its n-th time."""

_reached: dict[str, int] = {}


def fault_point(point: str) -> None:
    """Die at once, as by `kill -9`, if the environment says so for this point."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    name, _, number = wanted.partition(":")
    if name == point:
        _reached[point] = _reached.get(point, 0) + 1
        if _reached[point] == int(number or 1):
            os.kill(os.getpid(), signal.SIGKILL)
