"""Log lines of trials, for `det experiment logs` and `det trial logs`."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from determined import errors, tracking
from determined.experiment import wording

if TYPE_CHECKING:
    from determined.experiment.executors import LogLine

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the end.")]
Head = Annotated[int | None, typer.Option(min=1, help="Show only the first N lines.")]
Tail = Annotated[int | None, typer.Option(min=1, help="Show only the last N lines.")]
Ranks = Annotated[list[int] | None, typer.Option("--rank", min=0, help="Only lines of this rank; can be repeated.")]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only lines since this time: 30s, 10m, 2h or 1d ago, or a time in ISO 8601."),
]

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines to show."""

    head: int | None
    tail: int | None
    ranks: list[int] | None
    since: float | None
    follow: bool

    @classmethod
    def of(cls, head: int | None, tail: int | None, ranks: list[int] | None, since: str | None, follow: bool) -> Wanted:
        """Return the lines that options select; options that exclude each other are a usage error."""
        if head is not None and (tail is not None or follow):
            other = "--tail" if tail is not None else "--follow"
            raise typer.BadParameter(f"--head and {other} exclude each other; give one of them.")
        return cls(head, tail, ranks or None, None if since is None else timestamp(since), follow)


def timestamp(text: str) -> float:
    """Return the time that a string describes, in seconds since 1970."""
    if found := _AGO.fullmatch(text.strip()):
        return time.time() - float(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"{text!r} is not a time; write 10m for ten minutes ago, or 2026-01-31T12:00:00.", param_hint="--since"
        ) from None


def require_logs(experiment: tracking.ExperimentRecord) -> None:
    """Raise if the output of an experiment was not recorded."""
    if experiment.is_local:
        raise errors.InvalidRequestException(
            f"experiment {experiment.id} is the run of a script, whose output went to its own terminal; only "
            "experiments of `det experiment create` have logs."
        )


def goes_on(experiment: tracking.ExperimentRecord) -> bool:
    """Return whether there may be more lines."""
    return experiment.state.has_process and not wording.lacks_runner(experiment)


def show(folder: pathlib.Path, wanted: Wanted, is_over: Callable[[], bool], with_trial: bool) -> None:
    """Print lines; with `follow`, also new ones."""
    from determined.experiment.executors import follow_logs, read_logs

    if wanted.follow:
        lines = follow_logs(folder, is_over, ranks=wanted.ranks, since=wanted.since, tail=wanted.tail)
    else:
        lines = read_logs(folder, ranks=wanted.ranks, since=wanted.since, head=wanted.head, tail=wanted.tail)
    for line in lines:
        sys.stdout.write(f"{line_text(line, with_trial)}\n")
        if wanted.follow:
            sys.stdout.flush()


def line_text(line: LogLine, with_trial: bool) -> str:
    """Return a line with its time, trial and rank."""
    at = datetime.datetime.fromtimestamp(line.time).astimezone().isoformat(sep=" ", timespec="milliseconds")
    trial = f"trial {line.trial} " if with_trial else ""
    return f"{at[:23]} [{trial}rank {line.rank}] {wording.clean(line.text)}"
