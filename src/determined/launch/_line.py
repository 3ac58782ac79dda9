"""The line between a launcher or runner and whoever keeps its processes: messages as lines of JSON, both ways.

The keeper of a rank, `_keeper.py`, has its own few lines for this, since it imports nothing of this package.
"""

from __future__ import annotations

import json
import socket
from typing import Any

_CHUNK = 1 << 16


class Line:
    """One end of it; `link` is the socket. Said to nobody is no error: that the other end is gone shows by hearing."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._rest = b""

    def tell(self, message: dict[str, Any]) -> bool:
        """Send a message; returns whether there was anybody to send it to."""
        try:
            self.link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def hear(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come whole, after waiting for some of them; None if the other end is gone."""
        try:
            data = self.link.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
