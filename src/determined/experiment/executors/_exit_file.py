"""The files that say who runs a run and how it ended, and the line that is shown of an error."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from determined._home import private_opener
from determined._packages import explained
from determined.experiment.executors._base import RunExit, RunSpec
from determined.processes import TRACEBACK

_MAX_DETAILS = 20
_RANK = re.compile(r"\[rank=?\d+\]:? ")  # as launchers put it before each line


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Write a file that is there completely or not at all; it is on the disk when this returns."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8", errors="replace", opener=private_opener) as file:
            json.dump(value, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Return the mapping in a file; None if there is no such file, or something else in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_exit(spec: RunSpec) -> RunExit | None:
    """Return the exit of a run that is on file; None if there is none."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if (value := read_json(spec.files.exit)) is not None:
            return RunExit.from_json(value)
    return None


def note_not_started(spec: RunSpec, why: str) -> None:
    """Let the supervisor of a run know that its entrypoint cannot be run; the first rank's reason stays."""
    with (
        contextlib.suppress(OSError),
        open(spec.files.not_started, "x", encoding="utf-8", errors="replace", opener=private_opener) as file,
    ):
        file.write(why)


def summary(lines: Iterable[str]) -> str:
    """Return what to show of an error output: the exception that the last traceback ends with, else the last line.

    Indented lines that follow belong to the exception, as those of the problems that torch lists.
    """
    lines = [_RANK.sub("", line, count=1).rstrip() for line in lines if line.strip()]
    if TRACEBACK in lines:
        begin = len(lines) - lines[::-1].index(TRACEBACK)
        inside = itertools.takewhile(_is_indented, lines[begin:])
        at = begin + sum(1 for _ in inside)
        if at < len(lines):
            details = itertools.takewhile(_is_indented, lines[at + 1 : at + _MAX_DETAILS])
            return "\n".join([explained(lines[at]), *details])
    return lines[-1] if lines else ""


def _is_indented(line: str) -> bool:
    return line[:1].isspace()
