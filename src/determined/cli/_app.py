"""The root of the command line: its nouns, their short names, and how errors are shown."""

from __future__ import annotations

import io
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from determined import errors
from determined._version import VERSION

from . import checkpoint, experiment, trial
from . import gc as gc_command
from ._output import plain


class _Root(TyperGroup):
    """Shows errors that have an explanation as one line and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `det … | head`: ends quietly
        except (errors.DeterminedException, OSError) as error:
            typer.echo(f"Error: {plain(str(error), limit=2000)}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Root,
    help="Look at experiments, trials and checkpoints recorded on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _noun, _commands in (
    ("experiment", experiment.app),
    ("trial", trial.app),
    ("checkpoint", checkpoint.app),
):
    app.add_typer(_commands, name=_noun)
    app.add_typer(_commands, name=_noun[0], hidden=True)


app.command(name="gc")(gc_command.gc)


@app.callback()
def _prepare() -> None:
    # A terminal or pipe that cannot show a character gets its escape instead of an exception.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@app.command()
def version() -> None:
    """Show the version of Resolute."""
    typer.echo(f"Resolute {VERSION}")
