"""Messages between a parent and the shim of its processes: lines of JSON over a socket, both ways."""

from __future__ import annotations

import json
import socket
from typing import Any

_CHUNK = 1 << 16


class Channel:
    """One end of the socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._rest = b""

    def fileno(self) -> int:
        """Return what becomes readable when `receive` has something to return."""
        return self._link.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; returns whether the other end was still there."""
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for data and return the messages that are complete; None if the other end is gone."""
        try:
            data = self._link.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the socket, by which the other end hears that this one is gone."""
        self._link.close()
