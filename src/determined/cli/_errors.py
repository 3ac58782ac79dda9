"""How errors are shown: what is wrong and what to type instead, never a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import typer

from determined import errors

from ._output import plain

T = TypeVar("T", int, str)

_MAX_LINE = 2000  # characters
DEBUG_VARIABLE = "DET_DEBUG"
"""Environment variable: "1" shows the traceback of an unexpected error."""


def print_error(error: Exception) -> None:
    """Print an error with an explanation, such as one line for each problem of a config."""
    typer.echo(f"Error: {_shown(error)}", err=True)


def print_unexpected(error: Exception) -> None:
    """Print an unexpected error, such as one in a user's search method; DET_DEBUG=1 raises it."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        raise error
    what = f"{type(error).__name__}: {_shown(error)}"
    typer.echo(f"Error: unexpected {what} ({DEBUG_VARIABLE}=1 shows where it comes from)", err=True)


def each(items: Iterable[T], act: Callable[[T], object], done: str) -> None:
    """Call `act` on each item, also after one has failed; exit status 1 if one of them failed.

    `done` is printed for each, with the item in place of {0} and what `act` returned in place of {1}.
    """
    has_failed = False
    for item in dict.fromkeys(items):
        try:
            result = act(item)
        except (errors.DeterminedException, OSError) as error:
            print_error(error)
            has_failed = True
        else:
            typer.echo(done.format(plain(item), result))
    if has_failed:
        raise typer.Exit(1)


def _shown(error: Exception) -> str:
    return "\n".join(plain(line.expandtabs(), _MAX_LINE) for line in str(error).split("\n"))
