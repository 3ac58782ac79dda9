"""What the processes of a run execute."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from determined.experiment.executors._base import RunSpec
from determined.experiment.executors._beginning import Beginning
from determined.experiment.executors._ending import show
from determined.experiment.executors._hook import run_hook
from determined.launch._command import MODULE

Body = Callable[[Beginning], None]

_HARNESS = "determined.launch._harness"
_OURS = ("determined", "__main__")


def is_warm(spec: RunSpec) -> bool:
    """Say whether a class entrypoint can run in a process forked from this one.

    It cannot if the program has a module that would take the place of one that is loaded here, or a startup hook, which
    may change variables and packages that are loaded here.
    """
    if _HARNESS not in sys.modules or spec.has_startup_hook:
        return False
    loaded = {name.partition(".")[0] for name in sys.modules}.difference(_OURS)
    return not any(_module_name(entry) in loaded for entry in spec.code.iterdir())


def command_of(spec: RunSpec) -> list[str]:
    """Return the command that runs an entrypoint in a process of its own."""
    if not isinstance(spec.entrypoint, str):
        return list(spec.entrypoint)
    if not spec.is_class:
        return ["/bin/sh", "-c", spec.entrypoint]
    if spec.ranks == 1:
        return [sys.executable, "-m", _HARNESS, "--trial", spec.entrypoint]
    ranks = ["--nproc-per-node", str(spec.ranks)]
    return [sys.executable, "-m", MODULE, *ranks, "--", "--trial", spec.entrypoint]


def execute(spec: RunSpec, environment: Mapping[str, str], beginning: Beginning) -> NoReturn:
    """Run the startup hook, then become the program of an entrypoint."""
    try:
        environment = run_hook(spec, environment)
    except RuntimeError as error:
        show(error)
        os._exit(1)
    command, folder = command_of(spec), spec.code
    # What Python ignores, other programs expect to be killed by.
    for which in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(which, signal.SIG_DFL)
    try:
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        message = f"{command[0]!r} cannot be run: {_why(error, command[0], folder)}."
        os.write(2, f"{message}\n".encode(errors="replace"))
        beginning.failed(message)
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _why(error: OSError | ValueError, program: str, folder: pathlib.Path) -> str:
    if not isinstance(error, OSError):
        return str(error)
    remedy = ""
    if isinstance(error, FileNotFoundError) and (folder / program).is_file():
        is_bare = os.sep not in program
        remedy = f"; write ./{program} for the one in the code folder" if is_bare else "; its #! names no program here"
    elif isinstance(error, PermissionError):
        remedy = "; make it executable with chmod +x, or name its interpreter before it"
    elif error.errno == errno.ENOEXEC:
        remedy = "; begin it with #! and its interpreter, or name the interpreter before it"
    return f"{error.strerror}{remedy}"


def _module_name(entry: pathlib.Path) -> str | None:
    """Return the name under which an entry of a folder can be imported; a folder without __init__.py yields."""
    if entry.suffix in (".py", ".so"):
        return entry.name.partition(".")[0]
    return entry.name if (entry / "__init__.py").is_file() else None
