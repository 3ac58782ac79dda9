"""Limits before a request is read: on the number of connections, and on the time that a request takes to arrive."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 5.0
"""Seconds in which headers and body of a request must arrive."""
_MAX_CONNECTIONS = 200
_INCOMPLETE = (h11.IDLE, h11.SEND_BODY)


def max_connections() -> int:
    """Return the maximum number of connections: half of the file descriptors of this process, at most 200."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if descriptors < 0 else min(_MAX_CONNECTIONS, descriptors // 2)


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn with limits; uvicorn itself waits forever for the rest of a request.

    A request that is incomplete after `REQUEST_TIMEOUT_S` is dropped. If `limit_concurrency` would be reached, the
    oldest connection without a complete request is closed. If all connections have one, such as live pages, uvicorn
    answers the new one with 503.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened_at = self.loop.time()
        self._timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._make_room()
        self._update_timeout()

    def data_received(self, data: bytes) -> None:
        """Wait on until the request is complete."""
        super().data_received(data)
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._cancel_timeout()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        limit = self.limit_concurrency
        if limit is None or len(self.connections) < limit:
            return
        others = (one for one in self.connections if isinstance(one, LimitedProtocol) and one is not self)
        idle = [one for one in others if one.conn.their_state in _INCOMPLETE]
        if idle:
            oldest = min(idle, key=lambda one: one._opened_at)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def _update_timeout(self) -> None:
        if self.conn.their_state not in _INCOMPLETE:
            self._cancel_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
