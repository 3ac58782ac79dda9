"""`det ui`: the page."""

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
        int | None, typer.Option(min=0, max=65535, help="The port. (default: the first free one from 8080 on)")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; with one that other machines reach, there is a token.")
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Let only those use it who have the token, on this machine too.")
    ] = False,
    open: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a page with all experiments, their trials, curves and output, live, until Ctrl-C."""
    from determined import web

    def ready(url: str) -> None:
        typer.echo(f"The page is at {url} . Ctrl-C ends it; experiments go on.")
        if open:  # aside, since some browsers let their caller wait until they are closed
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of connections that it cannot accept
    web.serve(_home.home(), host, port, with_token=token, on_ready=ready)
    sys.stdout.flush()
    os._exit(0)  # nobody waits any more for what threads are still reading
