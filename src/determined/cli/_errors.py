"""How mistakes are shown: what is wrong and what to type instead, never a traceback."""

from __future__ import annotations

import os

import typer

from determined import errors

from ._output import plain

_LONGEST = 2000
DEBUG_VARIABLE = "DET_DEBUG"
"""Environment variable: "1" shows where in the program an unexpected error came from."""


def say(error: Exception) -> None:
    """Print an error with an explanation: on one line, or one for each problem of a config."""
    if isinstance(error, errors.InvalidConfig) and error.problems:
        first, *problems = str(error).splitlines()
        typer.echo(f"Error: {plain(first, _LONGEST)}", err=True)
        for problem in problems:
            typer.echo(plain(problem, _LONGEST), err=True)
    else:
        typer.echo(f"Error: {plain(str(error), _LONGEST)}", err=True)


def say_unexpected(error: Exception) -> None:
    """Print an error that nobody foresaw, such as one of a search method of the user's; DET_DEBUG=1 raises it."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        raise error
    what = plain(f"{type(error).__name__}: {error}", _LONGEST)
    typer.echo(f"Error: unexpected {what} ({DEBUG_VARIABLE}=1 shows where it comes from)", err=True)
