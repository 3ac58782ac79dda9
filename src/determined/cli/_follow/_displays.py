"""Where a view goes: drawn over and over in a terminal, or as lines of what has changed."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, Any, Protocol

import typer

from determined.cli import _output
from determined.experiment import wording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from determined import tracking

    from ._view import TrialView, View

_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # a terminal shows what is between them at once


class Display(Protocol):
    """Shows one view after the other."""

    def show(self, view: View, note: str) -> None:
        """Show a view, with a note to the reader."""

    def close(self) -> None:
        """Leave the terminal as it is to stay."""


class _AtOnce:
    """A terminal that draws each write at once, so that nothing flickers."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(f"{_BEGIN}{text}{_END}" if text else "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class LiveDisplay:
    """Draws each view in the place of the one before. The last one stays, unless the experiment is over."""

    def __init__(self, file: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        terminal: Any = _AtOnce(file)
        self._live = Live(
            console=Console(file=terminal, highlight=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()

    def show(self, view: View, note: str) -> None:
        """Draw a view, with a note below it."""
        from ._screen import Screen

        self._live.transient = view.is_over
        self._live.update(Screen(view, note), refresh=True)

    def close(self) -> None:
        """Stop drawing."""
        self._live.stop()


class LineDisplay:
    """Prints a line for each change; of what is older than the first view, the state, or with `tell_all` everything."""

    def __init__(self, *, tell_all: bool) -> None:
        self._tell_all = tell_all
        self._states: dict[int, str] = {}
        self._state = ""
        self._best: float | None = None

    def show(self, view: View, note: str) -> None:
        """Print what is new, ends last."""
        news = view.news if self._state or self._tell_all else []
        if not view.state.is_final:
            self._say_state(view)
        self._say_trials(view, ended=False)
        self._say_news(view, news)
        self._say_trials(view, ended=True)
        self._say_state(view)

    def _say_state(self, view: View) -> None:
        state = f"experiment {view.id} {view.state.value}"
        if state != self._state:
            self._state = state
            self._say(state)

    def _say_trials(self, view: View, *, ended: bool) -> None:
        for trial in view.trials:
            if trial.state.is_final is ended:
                self._say_trial(trial, view.varying)

    def _say_trial(self, trial: TrialView, names: Sequence[str]) -> None:
        from ._screen import hparams_text

        before = self._states.get(trial.id)
        self._states[trial.id] = trial.label
        if before is None:
            self._say(f"trial {trial.id} {trial.label}: {hparams_text(trial, names)}")
        elif trial.label != before:
            why = f" ({wording.cell(trial.reason)})" if trial.reason else ""
            self._say(f"trial {trial.id} {trial.label}{why}")

    def _say_news(self, view: View, news: Sequence[tracking.Validation]) -> None:
        for report in news:
            value = wording.cell(report.metrics.get(view.metric))
            self._say(f"trial {report.trial_id}: {_output.plain(view.metric)} {value} at step {report.steps_completed}")
        if view.best is not None and view.best_value != self._best:
            self._best = view.best_value
            self._say(f"best so far: {wording.cell(self._best)} by trial {view.best.trial_id}")

    def _say(self, text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {text}")

    def close(self) -> None:
        """Do nothing: all lines are printed."""
