"""A proxy in front of a PostgreSQL server that cuts connections at a chosen moment."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Literal

Moment = Literal["before the commit", "after the commit"]


class CuttingProxy:
    """Passes on what clients and the server say. `cut` is when the next connection that commits is cut."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._server = str(pathlib.Path(urllib.parse.parse_qs(parts.query)["host"][0], ".s.PGSQL.5432"))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://tests@127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"
        self.cut: Moment | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
                threading.Thread(target=_pass_on, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(1 << 16):
                if self.cut is not None and b"COMMIT" in data:
                    moment, self.cut = self.cut, None
                    self.cuts += 1
                    client.shutdown(socket.SHUT_RDWR)
                    if moment == "after the commit":
                        server.sendall(data)
                        server.shutdown(socket.SHUT_WR)
                        server.recv(1)  # what it answers, or that it has ended: the other thread may have got that
                    return
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)


def _pass_on(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(1 << 16):
            client.sendall(data)
        client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(url: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
