"""The root of the command line: its command groups, their short names, and how errors are shown."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from determined import errors
from determined._version import VERSION

from . import _errors, checkpoint, experiment, maintenance, model, tensorboard, trial, ui
from ._arguments import add

_INTERRUPTED = 130


class _Root(TyperGroup):
    """Shows errors that have an explanation as one line and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Abort):
            raise  # `det … | head` ends quietly
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except (errors.DeterminedException, OSError) as error:
            _errors.print_error(error)
            raise typer.Exit(1) from error
        except Exception as error:
            if hasattr(error, "exit_code"):  # one of typer's, which prints its own message
                raise
            _errors.print_unexpected(error)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Root,
    help="Train, search and inspect experiments on this machine. `--install-completion` installs the completion of "
    "commands and ids in your shell.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Example: det experiment create adaptive.yaml . --follow",
)
for _noun, _commands in (
    ("experiment", experiment.app),
    ("trial", trial.app),
    ("checkpoint", checkpoint.app),
    ("model", model.app),
):
    app.add_typer(_commands, name=_noun)
    app.add_typer(_commands, name=_noun[0], hidden=True)
app.add_typer(experiment.app, name="exp", hidden=True)
app.add_typer(tensorboard.app, name="tensorboard")


@app.callback()
def _prepare(
    master: Annotated[str | None, typer.Option("--master", "-m", metavar="URL", hidden=True)] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", metavar="NAME", hidden=True)] = None,
) -> None:
    if master is not None or user is not None:
        typer.echo("Warning: --master and --user have no effect: experiments run on this machine.", err=True)
    # A terminal or pipe that cannot show a character gets its escape instead of an exception.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def version() -> None:
    """Show the version of Resolute."""
    typer.echo(f"Resolute {VERSION}")


add(app, experiment.preview_search, "preview-search", example="det preview-search adaptive.yaml")
add(app, ui.ui, example="det ui --open")
add(app, maintenance.gc, example="det gc")
add(app, maintenance.doctor, example="det doctor")
add(app, maintenance.backup, example="det backup tracking-monday.db")
add(app, version, example="det version")
