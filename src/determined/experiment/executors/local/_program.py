"""What the processes of a run execute: a trial class in a forked process, or a program of its own."""

from __future__ import annotations

import ast
import errno
import os
import pathlib
import signal
import sys
import types
from collections.abc import Iterator, Mapping
from typing import NoReturn

from determined._packages import explained
from determined.experiment.executors._base import RunSpec
from determined.experiment.executors._environment import THREAD_VARIABLES, command_of, import_path
from determined.experiment.executors._exit_file import note_not_started
from determined.experiment.executors._hook import run_hook
from determined.experiment.executors.local._forked import run_to_end, show
from determined.launch import HARNESS
from determined.processes import set_name

_OURS = ("determined", "__main__")


def can_fork(spec: RunSpec) -> bool:
    """Return whether a class entrypoint can run in a process forked from this one.

    It cannot if the program has a module that would take the place of one that is loaded here, or a startup hook, which
    may change variables and packages that are loaded here.
    """
    if HARNESS not in sys.modules or spec.has_startup_hook:
        return False
    loaded = {name.partition(".")[0] for name in sys.modules}.difference(_OURS)
    return not any(_module_name(entry) in loaded for entry in spec.code.iterdir())


def _module_name(entry: pathlib.Path) -> str | None:
    """Return the name under which an entry of a folder can be imported; a folder without __init__.py yields."""
    if entry.suffix in (".py", ".so"):
        return entry.name.partition(".")[0]
    return entry.name if (entry / "__init__.py").is_file() else None


def train_class(spec: RunSpec, environment: Mapping[str, str]) -> NoReturn:
    """Train a class in this forked process, made to look as if it had just been started, and end the process."""
    set_name(f"det-trial-{spec.trial_id}")
    os.environ.clear()
    os.environ.update(environment)
    entrypoint = str(spec.entrypoint)
    command = ["-m", HARNESS, "--trial", entrypoint]
    sys.orig_argv = [sys.executable, "-u", *command]
    sys.argv = [_become_main(), *command[2:]]
    os.chdir(spec.code)
    sys.path[:] = import_path(str(spec.code), environment.get("PYTHONPATH", ""))
    if THREAD_VARIABLES[0] not in spec.environment:
        sys.modules["torch"].set_num_threads(spec.placement.get("threads", 1))
    # Else all trials would draw the same. Python's own generator is new in every process, torch's always the same.
    sys.modules["numpy"].random.seed()
    run_to_end(lambda: _train(entrypoint, spec))


def _train(entrypoint: str, spec: RunSpec) -> None:
    from determined.launch import load_class, train

    try:
        load_class(entrypoint)
    except Exception as error:
        show(error)
        note_not_started(spec, explained(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    train(entrypoint)


def _become_main() -> str:
    """Make the harness the program of this process, as `python -m` would; returns its file.

    Workers that the trial spawns import the program that their parent names.
    """
    harness = sys.modules[HARNESS]
    main = types.ModuleType("__main__")
    main.__spec__, main.__file__, main.__loader__ = harness.__spec__, harness.__file__, harness.__loader__
    sys.modules["__main__"] = main
    return str(harness.__file__)


def execute(spec: RunSpec, environment: Mapping[str, str]) -> NoReturn:
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
        note_not_started(spec, message)
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


# Libraries that the forkserver imports before it forks

FORKABLE = frozenset({"PIL", "joblib", "numpy", "pandas", "scipy", "sklearn", "torch", "torchvision", "tqdm", "yaml"})
"""Libraries after whose import a process can be forked: no GPU is touched, and there are no threads but those of
OpenBLAS, which start again in a fork."""


def libraries_of(code: pathlib.Path) -> list[str]:
    """Return the modules of well-known libraries that the modules in a folder import when they are loaded.

    The folder's own modules are none, whatever they are called. Some names may turn out to be no modules.
    """
    own = {path.name.partition(".")[0] for path in code.glob("*")}
    found = dict.fromkeys(name for path in sorted(code.glob("*.py")) for name in _imports(path))
    return [name for name in found if name.partition(".")[0] in FORKABLE - own]


def _imports(path: pathlib.Path) -> Iterator[str]:
    try:
        statements = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # which the trial itself will show
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (one.name for one in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
            yield from (f"{statement.module}.{one.name}" for one in statement.names)
