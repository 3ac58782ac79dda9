"""Wait for room on a full disk, so that a search outlives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from determined import errors
from determined.tracking import lacks_room

logger = logging.getLogger("determined.experiment")

_BETWEEN_ATTEMPTS_S = 1.0
_BETWEEN_WARNINGS_S = 60.0

T = TypeVar("T")


def when_there_is_room(action: Callable[[], T], gives_up: Callable[[], bool] = lambda: False) -> T:
    """Return what an action on the tracking database returns, repeated until its disk has room for it.

    What keeps it from being stored is raised when `gives_up` says so, and at once if it is not a lack of room.
    """
    warned_at = -_BETWEEN_WARNINGS_S
    while True:
        try:
            result = action()
        except errors.TrackingException as error:
            if not lacks_room(error) or gives_up():
                raise
            if time.monotonic() - warned_at >= _BETWEEN_WARNINGS_S:
                warned_at = time.monotonic()
                logger.warning("The experiment waits for room on the disk: %s Trials that run go on.", error)
            time.sleep(_BETWEEN_ATTEMPTS_S)
        else:
            if warned_at > 0:
                logger.info("There is room on the disk again.")
            return result
