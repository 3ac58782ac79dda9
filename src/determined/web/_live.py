"""Send the changed parts of a page as server-sent events."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from determined import errors

_INTERVAL_S = 1.0
_REST_FACTOR = 10
"""The pause after an update is at least this many times its duration, so that a page takes a tenth of a core."""
_MAX_UPDATES = 2
"""Number of pages that are updated at the same time, so that threads are left for other requests."""
_KEEPALIVE_S = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy closes the connection."""

logger = logging.getLogger("determined.web")


@functools.cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(_MAX_UPDATES)


async def changes(request: Request, render: Callable[[], Mapping[str, str]]) -> AsyncIterator[str]:
    """Yield events with the changed parts of a page, until the client disconnects or the page is gone."""
    known: dict[str, str] = {}
    last_sent = time.monotonic()
    while not await request.is_disconnected():
        began = time.monotonic()
        try:
            parts = await to_thread.run_sync(render, limiter=_limiter())
        except Exception as error:
            if not isinstance(error, errors.DeterminedException | OSError):
                logger.exception("a page could not be rendered")
            yield _event("trouble", str(error))
            if isinstance(error, errors.NotOnRecordException):
                return
            known.clear()  # so that everything is sent when it works again
        else:
            if changed := {name: text for name, text in parts.items() if known.get(name) != text}:
                known |= changed
                yield _event("parts", changed)
                last_sent = time.monotonic()
        if time.monotonic() - last_sent > _KEEPALIVE_S:
            yield ": still here\n\n"
            last_sent = time.monotonic()
        await asyncio.sleep(max(_INTERVAL_S, _REST_FACTOR * (time.monotonic() - began)))


def _event(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
