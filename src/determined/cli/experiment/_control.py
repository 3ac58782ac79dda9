"""Pause, activate, cancel, kill, await and delete experiments."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from determined import experiment, tracking
from determined.cli import _output
from determined.cli._arguments import ExperimentId, ExperimentIds, Follow, Force, Slots, Yes
from determined.cli._errors import each


def pause(ids: ExperimentIds, force: Force = False) -> None:
    """Save a checkpoint of every trial and stop; `activate` continues from there."""
    act = functools.partial(experiment.control.pause, force=force)
    each(ids, act, "Experiment {0} is pausing; `det experiment activate {0}` continues it.")


def activate(ids: ExperimentIds, follow: Follow = False, slots: Slots = None, force: Force = False) -> None:
    """Continue experiments that were paused, or whose runner is gone."""
    if follow and len(ids) > 1:
        raise typer.BadParameter("only one experiment can be followed; leave --follow out, or give one id.")

    def act(id: int) -> str:
        pid = experiment.control.activate(id, slots=slots, force=force)
        found = _output.open_records().experiment(id)
        if pid is None:
            return f"is already {found.state.value}."
        if found.runner is not None and not found.runner.is_here:
            where = _output.plain(found.runner.host)
            return f"was asked to run. Its runner is process {pid} on {where}, which cannot be checked from here."
        return f"runs. Its runner is process {pid}."

    each(ids, act, "Experiment {} {}")
    if follow:
        watch(ids[0])


def cancel(ids: ExperimentIds, force: Force = False) -> None:
    """Stop experiments; their trials save a last checkpoint."""
    act = functools.partial(experiment.control.cancel, force=force)
    each(
        ids,
        act,
        "Experiment {0} ends when its trials have saved; `det experiment wait {0}` waits for that.",
    )


def kill(ids: ExperimentIds, force: Force = False) -> None:
    """Stop experiments at once; training since the last checkpoint is lost."""
    act = functools.partial(experiment.control.kill, force=force)
    each(ids, act, "Experiment {0} is being killed; `det experiment wait {0}` waits for its end.")


def wait(
    id: ExperimentId,
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Maximum number of seconds to wait.")] = None,
) -> None:
    """Wait until an experiment ends; the exit status is 1 if it ends in ERROR."""
    state = experiment.control.wait(id, timeout)
    typer.echo(f"Experiment {id} is {state.value}.")
    if state is tracking.RunState.ERROR:
        raise typer.Exit(1)


def delete(ids: ExperimentIds, yes: Yes = False, force: Force = False) -> None:
    """Delete experiments with their checkpoints, logs and metrics, permanently."""
    records = _output.open_records()
    for id in ids if not yes else ():
        record = records.experiment(id)
        what = f"{record.name} with {record.trial_count} trials and {record.checkpoint_count} checkpoints"
        typer.confirm(f"Delete experiment {id}, {_output.plain(what)}, permanently?", abort=True)
    each(ids, functools.partial(experiment.control.delete, force=force), "Deleted experiment {}.")


def watch(id: int, *, from_start: bool = False) -> None:
    """Follow an experiment, and exit with its status."""
    from determined.cli._follow import follow

    if status := follow(id, from_start=from_start):
        raise typer.Exit(status)
