"""Tell a page what has changed, by server-sent events."""

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

_PAUSE = 1.0
_RESTING = 10
"""How much longer than a look at the record the pause after it is, so that a page costs a tenth of a core at most."""
_AT_ONCE = 2
"""How many pages are looked at anew at the same time; threads are left for whoever asks for something."""
_SILENCE = 15.0
"""Seconds after which something is said in any case, so that nobody between takes the connection for dead."""


logger = logging.getLogger("determined.web")


@functools.cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(_AT_ONCE)


async def changes(request: Request, look: Callable[[], Mapping[str, str]]) -> AsyncIterator[str]:
    """Give events with the parts of a page that have changed, until its reader leaves or there is nothing to read."""
    known: dict[str, str] = {}
    spoken = time.monotonic()
    while not await request.is_disconnected():
        began = time.monotonic()
        try:
            parts = await to_thread.run_sync(look, limiter=_limiter())
        except Exception as error:
            if not isinstance(error, errors.DeterminedException | OSError):
                logger.exception("a page could not be made")
            yield _event("trouble", str(error))
            if isinstance(error, errors.NotOnRecordException):
                return
            known.clear()  # so that everything is sent when it is over
        else:
            if news := {name: text for name, text in parts.items() if known.get(name) != text}:
                known |= news
                yield _event("parts", news)
                spoken = time.monotonic()
        if time.monotonic() - spoken > _SILENCE:
            yield ": still here\n\n"
            spoken = time.monotonic()
        await asyncio.sleep(max(_PAUSE, _RESTING * (time.monotonic() - began)))


def _event(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
