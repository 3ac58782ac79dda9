"""`det ui`: the page."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from determined import _home


def ui(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port. (default: the first free one from 8080 on)")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="The address to listen on. Others than this machine's own can be reached with a token only."),
    ] = "127.0.0.1",
    open: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a page with all experiments, their trials, curves and output, live, until Ctrl-C."""
    from determined import web

    def ready(url: str) -> None:
        typer.echo(f"The page is at {url} . Ctrl-C ends it; experiments go on.")
        if open:
            webbrowser.open(url)

    web.serve(_home.home(), host, port, ready)
