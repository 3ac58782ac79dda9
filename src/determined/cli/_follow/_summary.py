"""What is said when an experiment ends: its trials, the best of them, and what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from determined import errors, tracking
from determined._home import Home
from determined.cli import _output

from ._screen import hparams_text
from ._view import View

_MAX_TRIALS = 20


def conclude(view: View, home: Home) -> int:
    """Print what came of an experiment that runs no more; returns the exit status for it."""
    _print_trials(view)
    _print_best(view, home)
    if view.state.has_process:
        typer.echo(f"The runner of experiment {view.id} is gone, but the experiment is {view.state.value}.")
        typer.echo(f"  det experiment activate {view.id} --follow  continues it")
        typer.echo(f"  {_output.plain(home.runner_log(view.id))}  is its log")
        return 1
    typer.echo(f"Experiment {view.id} is {view.state.value}.")
    for command, does in _next(view):
        typer.echo(f"  {command:34}{does}")
    return 1 if view.state is tracking.RunState.ERROR else 0


def _print_trials(view: View) -> None:
    if not view.trials:
        return
    ranked, names = view.ranked(), view.varying
    rows = [_row(view, trial.id, names) for trial in ranked[:_MAX_TRIALS]]
    left = len(ranked) - len(rows)
    title = f"The best {len(rows)} of {len(ranked)} trials" if left else "Trials"
    _output.print_table(("trial", "state", "step", f"best {view.metric}", *names), rows, title=title)


def _row(view: View, id: int, names: Sequence[str]) -> tuple[Any, ...]:
    trial = view.trial(id)
    state = f"{trial.label}{f' ({trial.reason})' if trial.reason else ''}"
    return (trial.id, state, trial.steps, trial.best, *(trial.hparams.get(name) for name in names))


def _print_best(view: View, home: Home) -> None:
    if view.best is None:
        typer.echo("No trial has reported the metric.")
        return
    trial = view.trial(view.best.trial_id)
    _output.print_fields(
        {
            "best trial": trial.id,
            view.metric: f"{view.best_value:.6g} at step {view.best.steps_completed}",
            "hyperparameters": hparams_text(trial, list(trial.hparams)),
            "checkpoint": _checkpoint(view, home),
        }
    )


def _checkpoint(view: View, home: Home) -> str:
    from determined.experiment import best_checkpoints

    try:
        return best_checkpoints(tracking.TrackingReader(home.database), view.id, 1)[0].uuid
    except errors.CheckpointNotFoundException:
        return "none at a validation"


def _next(view: View) -> list[tuple[str, str]]:
    if view.state is tracking.RunState.PAUSED:
        return [(f"det experiment activate {view.id} -f", "continues it")]
    commands = [
        (f"det experiment describe {view.id}", "shows all details"),
        (f"det experiment plot {view.id}", "plots the metrics of its trials"),
        (f"det experiment download {view.id}", "copies the best checkpoint"),
        ("det ui", "shows it in a browser"),
    ]
    if view.state is not tracking.RunState.COMPLETED:
        failed = [(f"det experiment logs {view.id} --tail 50", "shows the logs of its trials")]
        again = [(f"det experiment continue {view.id}", "continues unfinished trials")]
        return [*failed, *again, commands[0]]
    return commands if view.best is not None else commands[:1]
