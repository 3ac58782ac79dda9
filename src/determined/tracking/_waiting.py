"""Wait for a database that is full or away for a while, so that what works with it survives that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from determined import errors

from ._data.room import is_away, lacks_room

logger = logging.getLogger("determined.tracking")

_RETRY_S = 1.0
_WARNING_PERIOD_S = 60.0

T = TypeVar("T")


def when_available(
    action: Callable[[], T],
    gives_up: Callable[[], bool] = lambda: False,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what an action on the tracking database returns, repeated until its disk has space and its server answers.

    Any other error is raised at once; these are raised as well when `gives_up` returns True.
    """
    warned_at: float | None = None
    while True:
        try:
            result = action()
        except errors.TrackingException as error:
            if not (lacks_room(error) or is_away(error)) or gives_up():
                raise
            if warned_at is None or time.monotonic() - warned_at >= _WARNING_PERIOD_S:
                warned_at = time.monotonic()
                logger.warning("Waiting for the tracking database: %s Trials that run go on.", error)
            wait(_RETRY_S)
        else:
            if warned_at is not None:
                logger.info("The tracking database can be used again.")
            return result
