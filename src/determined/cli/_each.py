"""Commands about several things: what fails for one is said, and the others are done nevertheless."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import typer

from determined import errors

from . import _errors
from ._output import plain

T = TypeVar("T", int, str)


def each(items: Iterable[T], act: Callable[[T], object], done: str) -> None:
    """Do something to each of the items and say so; exit status 1 if one of them failed.

    `done` says it, with the item in place of {0} and what `act` returned in place of {1}.
    """
    has_failed = False
    for item in dict.fromkeys(items):
        try:
            result = act(item)
        except (errors.DeterminedException, OSError) as error:
            _errors.say(error)
            has_failed = True
        else:
            typer.echo(done.format(plain(item), result))
    if has_failed:
        raise typer.Exit(1)
