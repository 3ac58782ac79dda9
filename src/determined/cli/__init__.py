"""The command line, installed as `det`."""

from __future__ import annotations


def main() -> None:
    """Run `det` with the arguments of this process, and end the process with its exit status."""
    from ._app import app

    app(prog_name="det")


__all__ = ["main"]
