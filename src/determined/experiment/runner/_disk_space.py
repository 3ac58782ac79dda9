"""Wait for space on a full disk, so that a search survives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from determined import errors
from determined.tracking import lacks_room

logger = logging.getLogger("determined.experiment")

_RETRY_S = 1.0
_WARNING_PERIOD_S = 60.0

T = TypeVar("T")


def when_there_is_space(
    action: Callable[[], T],
    gives_up: Callable[[], bool] = lambda: False,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what an action on the tracking database returns, repeated until its disk has space.

    Any other error is raised at once; a lack of space is raised as well when `gives_up` returns True.
    """
    warned_at: float | None = None
    while True:
        try:
            result = action()
        except errors.TrackingException as error:
            if not lacks_room(error) or gives_up():
                raise
            if warned_at is None or time.monotonic() - warned_at >= _WARNING_PERIOD_S:
                warned_at = time.monotonic()
                logger.warning("The experiment waits for space on the disk: %s Trials that run go on.", error)
            wait(_RETRY_S)
        else:
            if warned_at is not None:
                logger.info("The disk has space again.")
            return result
