"""Call a function of this library in a process of its own."""

from __future__ import annotations

import pathlib

_LIBRARY = str(pathlib.Path(__file__).parents[2])


def call_arguments(module: str, *arguments: str) -> list[str]:
    """Return the arguments with which Python calls `main` of a module, given these strings, and exits with the result.

    The library is found where it is found here, whatever the environment says.
    """
    program = f"import sys; sys.path.append({_LIBRARY!r}); from {module} import main; sys.exit(main(*sys.argv[1:]))"
    return ["-c", program, *arguments]
