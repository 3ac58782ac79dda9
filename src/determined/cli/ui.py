"""`det ui`: serve the page."""

from __future__ import annotations

import logging
import os
import sys
import threading
import webbrowser
from typing import Annotated

import typer

from determined import _home


def ui(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port. (default: the first free one from 8080)")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. If other machines can reach it, a token is required.")
    ] = "127.0.0.1",
    token: Annotated[bool, typer.Option("--token", help="Require a token on this machine too.")] = False,
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a live page with all experiments, trials, curves and logs until Ctrl-C."""
    from determined import web

    def ready(url: str) -> None:
        typer.echo(f"The page is at {url} . Ctrl-C stops it; experiments keep running.")
        if open:  # in a thread, since some browsers block until they are closed
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # which reports connections that it cannot accept
    web.serve(_home.home(), host, port, with_token=token, on_ready=ready)
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that still read
