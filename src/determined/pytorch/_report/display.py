"""The display of a run: a progress bar in a terminal, lines elsewhere."""

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

MAX_NAME_LENGTH = 60
MAX_METRICS = 8


class _Output:
    """A text stream that never raises: replaces characters it cannot encode, and ignores a broken stream."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._broken = False
        self.encoding: str = getattr(output, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal; False if that is unknown."""
        try:
            return self._output.isatty()
        except (AttributeError, OSError, ValueError):
            return False

    def write(self, text: str) -> None:
        self._attempt(self._write, text)

    def flush(self) -> None:
        self._attempt(getattr(self._output, "flush", lambda: None))

    def _write(self, text: str) -> None:
        try:
            self._output.write(text)
        except UnicodeEncodeError:
            self._output.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _attempt(self, action: Callable[..., None], *arguments: str) -> None:
        if self._broken:
            return
        try:
            action(*arguments)
        except (OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._broken = True


class _Meter:
    """The throughput of training; time outside of training does not count."""

    def __init__(self, length_of: Callable[[Any], int | None], ranks: int) -> None:
        self._length_of = length_of
        self._ranks = ranks
        self._since = time.monotonic()
        self._seconds = 0.0
        self._batches = 0
        self._samples = 0
        self._usual_length = 0
        self.rate = ""
        """The throughput of the last window, with its unit."""

    def trained(self, last_batch: Any, count: int) -> None:
        """Count batches; all but the last have the usual length."""
        self._seconds += time.monotonic() - self._since
        self.pause()
        length = self._length_of(last_batch) or 0
        self._usual_length = max(self._usual_length, length)
        self._samples += self._usual_length * (count - 1) + length
        self._batches += count

    def pause(self) -> None:
        """Do not count the time since the last batch."""
        self._since = time.monotonic()

    def end_window(self) -> None:
        """Compute the rate of the window and begin the next."""
        if self._seconds > 0:
            count, unit = (self._samples * self._ranks, "samples") if self._samples else (self._batches, "batches")
            rate = count / self._seconds
            self.rate = f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"
        self._seconds, self._batches, self._samples = 0.0, 0, 0
        self.pause()


class Display:
    """Keeps what to show, and shows nothing itself. Used on all ranks but the chief."""

    def __init__(self, progress: Progress, plan: Plan, length_of: Callable[[Any], int | None], ranks: int) -> None:
        self._progress = progress
        self._total = plan.total_batches
        self._epochs = plan.epochs
        self._meter = _Meter(length_of, ranks)
        self._metrics: Mapping[str, Any] = {}
        self._validation: Mapping[str, Any] = {}
        self._checkpoint = ""
        self._is_validating = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def trained(self, last_batch: Any, count: int) -> None:
        """Count the batches that were trained since the last call."""
        self._meter.trained(last_batch, count)

    def reported(self, metrics: Mapping[str, Any]) -> None:
        """Show the averages of a window."""
        self._metrics = metrics
        self._meter.end_window()
        self._log(f"{_formatted(metrics)} | {self._meter.rate}")

    def validating(self) -> None:
        """Show that a validation has begun."""
        self._is_validating = True

    def validated(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a validation."""
        self._validation = metrics
        self._is_validating = False
        self._meter.pause()
        self._log(f"validation | {_formatted(metrics)}")

    def saved(self, uuid: str) -> None:
        """Show that a checkpoint was saved."""
        self._checkpoint = uuid
        self._meter.pause()
        self._log(f"saved checkpoint {uuid}")

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def _log(self, text: str) -> None:
        """Print an event with its position, if the display prints lines."""

    def _position(self) -> str:
        position = f"batch {self._progress.batches_trained}/{self._total}"
        if self._epochs.length:
            done, total = self._epochs.done(self._progress.batches_trained), self._epochs.done(self._total)
            position += f", epoch {done:.1f}/{total:.1f}"
        return position


class Lines(Display):
    """Plain lines, one for each report."""

    def __init__(self, *args: Any, output: _Output) -> None:
        super().__init__(*args)
        self._output = output

    def say(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {plain(line)}", file=self._output, flush=True)  # its purpose

    def _log(self, text: str) -> None:
        self.say(f"{self._position()} | {text}")


class Bar(Display):
    """A live progress bar, refreshed by its own thread, so that it costs the loop nothing between reports."""

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
        rows = {
            "training": _formatted(self._metrics),
            "validation": "running" if self._is_validating else _formatted(self._validation),
            "checkpoint": self._checkpoint,
        }
        texts = (Text.assemble((f"{label:>10} ", "dim"), text) for label, text in rows.items() if text)
        return Group(first, *texts)

    def _left(self) -> str:
        done = self._progress.batches_trained - self._began_at
        if not done:
            return "starting"
        seconds = (time.monotonic() - self._began) / done * (self._total - self._progress.batches_trained)
        minutes, rest = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{rest:02d} left" if hours else f"{minutes}:{rest:02d} left"


def display_for(
    ranks: DistributedContext,
    progress: Progress,
    plan: Plan,
    length_of: Callable[[Any], int | None],
    micro_batches: int,
) -> Display:
    """Return the display for this process's output. Only the chief shows anything: the throughput of all ranks.

    `length_of` counts the samples of one of the `micro_batches` in which each rank trains a batch.
    """
    arguments = (progress, plan, length_of, ranks.size * micro_batches)
    if not ranks.is_chief or sys.stdout is None:  # as under pythonw
        return Display(*arguments)
    output = _Output(sys.stdout)
    switch = os.environ.get(SWITCH)
    wants_bar = output.isatty() if switch not in ("0", "1") else switch == "1"
    try:
        return Bar(*arguments, output=output) if wants_bar else Lines(*arguments, output=output)
    except ImportError:  # rich is not installed
        return Lines(*arguments, output=output)


def continue_command(uuid: str) -> str:
    """Return the shell command that continues this program from a checkpoint."""
    setting = f"DET_LATEST_CHECKPOINT={uuid}"
    if launched := os.environ.get("DET_LAUNCH_COMMAND"):  # by our own launcher
        return f"{setting} {launched}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        command = ["torchrun", "--nproc-per-node", processes, *sys.argv]
    else:
        command = sys.orig_argv
    return shlex.join(["env", setting, *command]).removeprefix("env ")


def _formatted(metrics: Mapping[str, Any]) -> str:
    numbers = [(name, value) for name, value in metrics.items() if isinstance(value, Real)]
    shown = [(plain(name, MAX_NAME_LENGTH), value) for name, value in numbers if name not in ("batches", "epochs")]
    parts = [f"{name} {as_float(value):.4g}" for name, value in shown[:MAX_METRICS]]
    return ", ".join(parts) + (", ..." if len(shown) > MAX_METRICS else "")
