"""How mistakes are shown: what is wrong and what to type instead, never a traceback."""

from __future__ import annotations

import os

import typer

from ._output import plain

_LONGEST = 2000  # characters of a line
DEBUG_VARIABLE = "DET_DEBUG"
"""Environment variable: "1" shows where in the program an unexpected error came from."""


def say(error: Exception) -> None:
    """Print an error with an explanation, such as one line for each problem of a config."""
    typer.echo(f"Error: {_shown(error)}", err=True)


def say_unexpected(error: Exception) -> None:
    """Print an error that nobody foresaw, such as one of a search method of the user's; DET_DEBUG=1 raises it."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        raise error
    what = f"{type(error).__name__}: {_shown(error)}"
    typer.echo(f"Error: unexpected {what} ({DEBUG_VARIABLE}=1 shows where it comes from)", err=True)


def _shown(error: Exception) -> str:
    return "\n".join(plain(line.expandtabs(), _LONGEST) for line in str(error).split("\n"))
