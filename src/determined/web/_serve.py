"""Serve the page, by default to this machine only."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable

from determined import errors
from determined._home import Home

DEFAULT_HOST = "127.0.0.1"
FIRST_PORT = 8080
_PORTS_TRIED = 100
_SHUTDOWN_TIMEOUT_S = 1
"""Seconds after an interrupt in which browsers may close their connections."""


def serve(
    home: Home,
    host: str = DEFAULT_HOST,
    port: int | None = None,
    *,
    with_token: bool = False,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve the page for a home folder until Ctrl-C; `on_ready` is called with its URL.

    The default port is the first free one from 8080. With a token, which is part of the URL, requests without it are
    refused; there is always one if other machines can reach the page.
    """
    try:
        import uvicorn

        from determined.web._app import make_app
        from determined.web._connections import LimitedProtocol, max_connections
    except ImportError as error:
        raise errors.DeterminedException(
            f"the page needs {error.name}, which is not installed; run: pip install 'resolute[web]'"
        ) from error
    listening = _listen(host, port)
    token = secrets.token_urlsafe(32) if with_token or not _is_of_this_machine_alone(listening) else None
    config = uvicorn.Config(
        make_app(home, token, host),
        http=LimitedProtocol,
        limit_concurrency=max_connections() + 1,  # uvicorn refuses the request that reaches it
        log_level=logging.CRITICAL,
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )
    with listening, contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        on_ready(_address(host, listening, token))
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket, so that the URL works as soon as it is printed."""
    ports = range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED) if port is None else [port]
    for candidate in ports:
        try:
            return socket.create_server((host, candidate), family=_family(host))
        except OSError as error:
            reason = error
            if error.errno != errno.EADDRINUSE:
                break
    tried = f"port {port}" if port is not None else f"any port from {ports[0]} to {ports[-1]}"
    raise errors.DeterminedException(
        f"the page cannot be served at {host!r} on {tried}: {reason.strerror or reason}; give another --port (0 takes "
        "any free one) or --host."
    ) from reason


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_of_this_machine_alone(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def _address(host: str, listening: socket.socket, token: str | None) -> str:
    bound, port = listening.getsockname()[:2]
    shown = socket.gethostname() if ipaddress.ip_address(bound).is_unspecified else host
    name = f"[{shown}]" if ":" in shown else shown
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
