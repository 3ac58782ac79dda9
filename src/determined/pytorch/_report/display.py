"""What a person sees of a run: a progress bar in a terminal, lines elsewhere."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, TextIO, cast

from determined._text import plain
from determined.core import DistributedContext
from determined.core.metrics import as_float
from determined.pytorch._loop.plan import Plan
from determined.pytorch._loop.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

SWITCH = "DET_PROGRESS"
"""Environment variable: 0 for lines also in a terminal, 1 for a bar also elsewhere."""


_LONGEST_NAME = 60


class _Output:
    """Text output that training outlives: a character that it has no code for is replaced, and once it is broken
    nothing more is written.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._broken = False
        self.encoding: str = getattr(output, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Say whether a person looks at it; what cannot tell is no terminal."""
        try:
            return self._output.isatty()
        except (AttributeError, OSError, ValueError):
            return False

    def write(self, text: str) -> None:
        """Write as much of the text as can be written."""
        try:
            self._attempt(self._output.write, text)
        except UnicodeEncodeError:
            self._attempt(self._output.write, text.encode(self.encoding, "replace").decode(self.encoding))

    def flush(self) -> None:
        """Hand on what was written, if it has to be asked for that."""
        self._attempt(getattr(self._output, "flush", lambda: None))

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        if self._broken:
            return
        try:
            action(*arguments)
        except UnicodeEncodeError:
            raise
        except (OSError, ValueError):  # a pipe that nobody reads, a full disk, a closed file
            self._broken = True


class _Meter:
    """How fast training goes, by the time spent on training alone."""

    def __init__(self, length_of: Callable[[Any], int | None]) -> None:
        self._length_of = length_of
        self._usual_length = 0
        self._since = time.monotonic()
        self._seconds = 0.0
        self._batches = 0
        self._samples = 0
        self.rate = ""
        """The throughput of the last window, in words."""

    def trained(self, last_batch: Any, count: int) -> None:
        """Count batches, all but the last of the usual length."""
        self._seconds += time.monotonic() - self._since
        self.pause()
        length = self._length_of(last_batch) or 0
        self._usual_length = max(self._usual_length, length)
        self._samples += self._usual_length * (count - 1) + length
        self._batches += count

    def pause(self) -> None:
        """Leave out the time since the last batch."""
        self._since = time.monotonic()

    def end_window(self) -> None:
        """Work out the rate of what was counted, and count anew."""
        if self._seconds > 0:
            count, unit = (self._samples, "samples") if self._samples else (self._batches, "batches")
            self.rate = f"{_short(count / self._seconds)} {unit}/s"
        self._seconds, self._batches, self._samples = 0.0, 0, 0
        self.pause()


class Display:
    """Keeps what there is to see; the base of those that show it, and by itself silent."""

    def __init__(self, progress: Progress, plan: Plan, length_of: Callable[[Any], int | None]) -> None:
        self._progress = progress
        self._total = plan.total_batches
        self._epochs = plan.epochs
        self._meter = _Meter(length_of)
        self._metrics: Mapping[str, Any] = {}
        self._validation: Mapping[str, Any] = {}
        self._checkpoint = ""
        self._stage = "training"

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def trained(self, last_batch: Any, count: int) -> None:
        """Take note of batches that were trained since the last call here."""
        self._meter.trained(last_batch, count)

    def reported(self, metrics: Mapping[str, Any]) -> None:
        """Show the averages of a window."""
        self._metrics = metrics
        self._meter.end_window()

    def validating(self) -> None:
        """Show that a validation has begun."""
        self._stage = "validating"

    def validated(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a validation."""
        self._validation = metrics
        self._stage = "training"
        self._meter.pause()

    def saved(self, uuid: str) -> None:
        """Show that a checkpoint was saved."""
        self._checkpoint = uuid
        self._meter.pause()

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def _position(self) -> str:
        place = f"batch {self._progress.batches_trained}/{self._total}"
        if self._epochs.length:
            done, total = self._epochs.done(self._progress.batches_trained), self._epochs.done(self._total)
            place += f", epoch {done:.1f}/{total:.1f}"
        return place


class Lines(Display):
    """Plain lines, one a report."""

    def __init__(self, *args: Any, output: _Output) -> None:
        super().__init__(*args)
        self._output = output

    def reported(self, metrics: Mapping[str, Any]) -> None:
        """Print the averages of a window."""
        super().reported(metrics)
        self.say(f"{self._position()} | {_told(metrics)} | {self._meter.rate}")

    def validated(self, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a validation."""
        super().validated(metrics)
        self.say(f"{self._position()} | validation | {_told(metrics)}")

    def saved(self, uuid: str) -> None:
        """Print the id of a checkpoint."""
        super().saved(uuid)
        self.say(f"{self._position()} | saved checkpoint {uuid}")

    def say(self, line: str) -> None:
        """Print a line with the time of day."""
        print(f"{time.strftime('%H:%M:%S')} {plain(line)}", file=self._output, flush=True)  # its purpose


class Bar(Display):
    """A live progress bar, refreshed by its own thread: the loop pays nothing for it between reports."""

    def __init__(self, *args: Any, output: _Output) -> None:
        super().__init__(*args)
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar

        self._began = time.monotonic()
        self._began_at = self._progress.batches_trained
        self._bar = ProgressBar(total=self._total, width=30)
        console = Console(file=cast(TextIO, output), force_terminal=True)
        self._live = Live(self, console=console, refresh_per_second=2, transient=False)

    def __enter__(self) -> Bar:
        self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._live.__exit__(*details)

    def say(self, line: str) -> None:
        """Print a line above the bar, unbroken, so that commands and paths can be copied."""
        self._live.console.print(plain(line), highlight=False, markup=False, emoji=False, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        self._bar.update(self._progress.batches_trained)
        first = Table.grid(padding=(0, 1))
        first.add_row(self._bar, Text(self._position(), "bold"), Text(self._left(), "cyan"), Text(self._meter.rate))
        rows: list[RenderableType] = [first]
        for label, text in self._facts():
            rows.append(Text.assemble((f"{label:>10} ", "dim"), text))
        return Group(*rows)

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("training", _told(self._metrics)), ("validation", _told(self._validation))]
        if self._stage != "training":
            facts[1] = ("validation", "running")
        return [(label, text) for label, text in (*facts, ("checkpoint", self._checkpoint)) if text]

    def _left(self) -> str:
        done = self._progress.batches_trained - self._began_at
        if not done:
            return "starting"
        seconds = (time.monotonic() - self._began) / done * (self._total - self._progress.batches_trained)
        minutes, rest = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{rest:02d} left" if hours else f"{minutes}:{rest:02d} left"


def display_for(
    ranks: DistributedContext, progress: Progress, plan: Plan, length_of: Callable[[Any], int | None]
) -> Display:
    """Return the display for where the output goes; only the chief shows anything, and of all ranks."""

    def length_of_all(batch: Any) -> int | None:
        own = length_of(batch)
        return None if own is None else own * ranks.size

    arguments = (progress, plan, length_of if ranks.size == 1 else length_of_all)
    if not ranks.is_chief or sys.stdout is None:  # programs without a terminal, as those of pythonw, have none
        return Display(*arguments)
    output = _Output(sys.stdout)
    switch = os.environ.get(SWITCH)
    wants_bar = output.isatty() if switch not in ("0", "1") else switch == "1"
    try:
        return Bar(*arguments, output=output) if wants_bar else Lines(*arguments, output=output)
    except ImportError:  # without rich there are lines
        return Lines(*arguments, output=output)


def continue_command(uuid: str) -> str:
    """Return the shell command that goes on with this program from a checkpoint."""
    setting = f"DET_LATEST_CHECKPOINT={uuid}"
    if launched := os.environ.get("DET_LAUNCH_COMMAND"):  # by our own launcher
        return f"{setting} {launched}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        command = ["torchrun", "--nproc-per-node", processes, *sys.argv]
    else:
        command = sys.orig_argv
    return shlex.join(["env", setting, *command]).removeprefix("env ")


def _told(metrics: Mapping[str, Any]) -> str:
    numbers = [(name, value) for name, value in metrics.items() if isinstance(value, Real)]
    shown = [(plain(name, _LONGEST_NAME), value) for name, value in numbers if name not in ("batches", "epochs")]
    told = [f"{name} {as_float(value):.4g}" for name, value in shown]
    return ", ".join(told[:8]) + (", ..." if len(told) > 8 else "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
