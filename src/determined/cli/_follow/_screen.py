"""How a view is drawn in a terminal."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from determined import tracking
from determined.cli import _output
from determined.experiment import wording

if TYPE_CHECKING:
    from determined.experiment.search import Rung

    from ._view import TrialView, View

_LEAST_TRIALS = 3
_BAR = 16
_WIDE = 100
_STYLES = {"running": "green", "waiting": "dim", "COMPLETED": "cyan", "ERROR": "red", "CANCELED": "yellow"}


class Screen:
    """A view as tall as the terminal allows: trials that find no room are counted."""

    def __init__(self, view: View, note: str) -> None:
        self._view = view
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what to draw."""
        height = options.size.height
        head, rungs, log = _head(self._view), _rungs(self._view), _log(self._view, max(0, (height - 10) // 3))
        taken = 3 + len(rungs) + len(log) + 4  # and the heading and the end of the trials, the note and the cursor
        room = max(_LEAST_TRIALS, height - taken)
        bar = _BAR if options.max_width >= _WIDE else _BAR // 2
        yield Group(*head, _trials(self._view, room, bar), *rungs, *log, _cut(self._note, "dim"))


def _head(view: View) -> list[ConsoleRenderable]:
    took = datetime.timedelta(seconds=int(view.seconds))
    title = _cut("")
    title.append(f"{_output.plain(view.name, 60)} ", style="bold")
    title.append(f"experiment {view.id}, {view.searcher}, {_state(view)}, {took}")
    return [title, _overall(view), _best(view)]


def _state(view: View) -> str:
    asked = {tracking.Desired.PAUSED: "pausing", tracking.Desired.CANCELED: "ending", tracking.Desired.KILLED: "ending"}
    is_asked = view.state is tracking.RunState.ACTIVE and view.desired in asked
    return asked[view.desired] if is_asked else view.state.value


def _overall(view: View) -> Table:
    running = sum(trial.label == "running" for trial in view.trials)
    waiting = sum(trial.label == "waiting" for trial in view.trials)
    ended = sum(trial.state.is_final for trial in view.trials)
    others = f" and {view.other_slots} by other experiments" if view.other_slots else ""
    words = (
        f"{100 * view.progress:.0f}%  {len(view.trials)} trials: {running} running, {waiting} waiting, {ended} ended  "
        f"slots in use: {view.own_slots}{others}"
    )
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column()
    line.add_row(ProgressBar(total=1.0, completed=view.progress, width=_BAR), _cut(words))
    return line


def _best(view: View) -> Text:
    line = _cut("best ")
    if view.best is None:
        return line.append("none yet", style="dim")
    trial = view.trial(view.best.trial_id)
    line.append(f"{_output.plain(view.metric, 40)} {view.best_value:.6g}", style="bold")
    line.append(f", trial {trial.id} at step {view.best.steps_completed}  ")
    return line.append(hparams_text(trial, view.varying), style="dim")


def hparams_text(trial: TrialView, names: Sequence[str]) -> str:
    """Return hyperparameters on one line."""
    pairs = (f"{name} {wording.cell(trial.hparams[name])}" for name in names if name in trial.hparams)
    return _output.plain(", ".join(pairs))


def _trials(view: View, room: int, bar: int) -> Table:
    shown = list(itertools.islice(_in_order(view), room))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("progress", width=bar + 5, no_wrap=True)
    for name in ("step", "latest", "best", *(["rung"] if view.rungs else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hyperparameters")  # the one that yields where there is little room
    names = view.varying
    for trial in shown:
        table.add_row(*_cells(view, trial, names, bar))
    left = len(view.trials) - len(shown)
    table.caption = _cut(f"and {left} more: det experiment list-trials {view.id}" if left else "", "dim")
    table.caption_justify = "left"
    return table


def _in_order(view: View) -> Iterator[TrialView]:
    """Yield those that run, then the best, then those that wait."""
    ranked = view.ranked()
    yield from (trial for trial in view.trials if trial.label == "running")
    yield from (trial for trial in ranked if trial.label not in ("running", "waiting"))
    yield from (trial for trial in view.trials if trial.label == "waiting")


def _cells(view: View, trial: TrialView, names: Sequence[str], bar: int) -> list[ConsoleRenderable]:
    is_best = view.best is not None and view.best.trial_id == trial.id
    cells: list[ConsoleRenderable] = [
        Text(str(trial.id)),
        Text(f"{trial.label}{'*' * bool(trial.restarts)}", style=_STYLES.get(trial.label, "")),
        _bar(trial.progress or 0.0, bar),
        Text(str(trial.steps) if trial.steps else "-"),
        Text(wording.cell(trial.latest)),
        Text(wording.cell(trial.best), style="bold" if is_best else ""),
    ]
    if view.rungs:
        cells.append(Text("-" if trial.next_rung is None else f"to {trial.next_rung:,}"))
    return [*cells, _cut(hparams_text(trial, names), "dim")]


def _bar(fraction: float, width: int) -> Table:
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=1.0, completed=fraction, width=width), Text(f"{100 * fraction:.0f}%"))
    return bar


def _cut(text: str, style: str = "") -> Text:
    """Return a text for one line, which is cut if it is too long."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _rungs(view: View) -> list[ConsoleRenderable]:
    """Return a line for each bracket: how many trials have arrived at each rung, and how many are on their way."""
    lines: list[ConsoleRenderable] = []
    for bracket, rungs in itertools.groupby(view.rungs, key=lambda rung: rung.bracket):
        line = _cut(f"bracket {bracket}  {view.time_metric}", "dim")
        for rung in rungs:
            line.append(f"  {rung.time:,}: ", style="dim")
            line.append(_arrived(rung), style="default not dim")
        lines.append(line)
    return lines


def _arrived(rung: Rung) -> str:
    return f"{rung.arrived}{f' (+{len(rung.climbing)})' if rung.climbing else ''}"


def _log(view: View, room: int) -> list[ConsoleRenderable]:
    lines = view.log[max(0, len(view.log) - room) :]
    return [_cut(f"{trial} | {wording.clean(line.text)}", "dim") for trial, line in lines]
