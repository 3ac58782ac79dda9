"""Read the command line: which options are torchrun's, and what every rank runs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import sys
from typing import NamedTuple

MODULE = "determined.launch.torch_distributed"
HARNESS = "determined.launch._harness"
"""The program of every rank that trains a trial class."""
USAGE = (
    f"python -m {MODULE} [torchrun options --] script.py [arguments]\n"
    f"       python -m {MODULE} [torchrun options --] --trial module:Class [--config experiment.yaml]"
)


class UsageError(Exception):
    """The command line cannot be carried out; the message says why and what to write."""


class Words(NamedTuple):
    """The two parts of the command line."""

    options: list[str]
    """For torchrun."""
    program: list[str]
    """What every rank runs, and its arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A trial class to train, in place of a script."""

    entrypoint: str
    config: str | None


def is_class_entrypoint(text: str) -> bool:
    """Return whether an entrypoint is written as `module:Class`."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def split(words: list[str]) -> Words:
    """Return the parts of a command line: options come first and end with `--`, if there are any."""
    if not words or not words[0].startswith("-") or words[0].split("=")[0] in ("--trial", "--config"):
        found = Words([], words)
    elif "--" in words:
        cut = words.index("--")
        found = Words(words[:cut], words[cut + 1 :])
    elif {"-h", "--help"} & set(words):
        return Words(words, [])
    else:
        raise UsageError(
            f"{words[0]} is an option for torchrun, but no -- follows that would end the options: write "
            f"python -m {MODULE} {words[0]} ... -- script.py"
        )
    if not found.program and not {"-h", "--help"} & set(found.options):
        raise UsageError("there is no script to run.")
    return found


def trial_of(program: list[str]) -> Trial | None:
    """Return the trial class that the words ask for; None if they are a script and its arguments."""
    if not program or not program[0].startswith("-"):
        return None
    values: dict[str, str] = {}
    rest = list(program)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--trial", "--config") or name in values or not (equals or rest):
            raise UsageError(
                f"{name} is not understood here; after the options for torchrun comes a script, or --trial."
            )
        values[name] = value if equals else rest.pop(0)
    if "--trial" not in values:
        raise UsageError("--config goes with --trial module:Class; a script reads its config itself.")
    return Trial(values["--trial"], values.get("--config"))


def command_of_script(program: list[str], *, is_module: bool = False, no_python: bool = False) -> list[str]:
    """Return the command that each rank runs: a script by this interpreter, anything else as it is."""
    name = program[0]
    if is_module:
        return [sys.executable, "-u", "-m", *program]
    if not no_python and (name.endswith(".py") or _is_data(name)):
        if not os.path.exists(name):
            raise UsageError(f"there is no script {name!r} in {pathlib.Path.cwd()}.")
        return [sys.executable, "-u", *program]
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"{name!r} is neither a Python script nor a program that can be run.")
    return [found, *program[1:]]


def command_of_trial(trial: Trial) -> list[str]:
    """Return the command that each rank runs to train a trial class."""
    command = [sys.executable, "-u", "-m", HARNESS, "--trial", trial.entrypoint]
    return command if trial.config is None else [*command, "--config", trial.config]


def _is_data(name: str) -> bool:
    """Return whether this is a file or folder that only an interpreter can run."""
    return os.path.isdir(name) or (os.path.isfile(name) and not os.access(name, os.X_OK))
