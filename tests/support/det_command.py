"""`det` within the process of the tests. Its commands are built once, which takes longer than most of them run."""

from __future__ import annotations

import functools
from typing import Any

import typer
from click.testing import CliRunner, Result

from determined.cli._app import app


@functools.cache
def root() -> Any:
    """Return the command `det`."""
    return typer.main.get_command(app)


def run_det(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(root(), [str(argument) for argument in arguments], **options)
