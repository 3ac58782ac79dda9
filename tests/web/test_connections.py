"""How long the page waits for requests, and for how many at once."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import urllib.parse
from collections.abc import Iterator

import pytest
from site_of_tests import Site, served

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

HALF_HEADERS = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
HALF_BODY = (
    b"POST /experiments/1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{"
)


@contextlib.contextmanager
def connected(site: Site, data: bytes) -> Iterator[socket.socket]:
    """Give a connection on which the start of a request was sent."""
    port = urllib.parse.urlsplit(site.url).port
    with socket.create_connection(("127.0.0.1", port or 0), timeout=60) as connection:
        connection.sendall(data)
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def test_request_is_answered_beside_300_incomplete_ones(tmp_path: pathlib.Path) -> None:
    with served(tmp_path, "--token") as site, contextlib.ExitStack() as stack:
        half_open = [stack.enter_context(connected(site, HALF_HEADERS)) for _ in range(300)]
        assert site.ask("/").status == 401
        assert site.ask("/", Authorization=f"Bearer {site.token}").status == 200
        for connection in half_open[:100]:  # the oldest ones made room
            assert read_to_the_end(connection) == b""


def test_incomplete_request_is_dropped_in_time_and_a_live_page_is_not(site: Site) -> None:
    with site.events("/live/") as events:
        next(events)
        with connected(site, HALF_HEADERS) as slow, connected(site, b"") as silent, connected(site, HALF_BODY) as body:
            assert read_to_the_end(slow) == b""
            assert read_to_the_end(silent) == b""
            read_to_the_end(body)  # ends
        site.add_experiment("begun later")
        assert "begun later" in next(events)[1]["experiments"]
