"""Create experiments, and continue ended ones."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from determined import experiment
from determined.cli import _output
from determined.cli._arguments import ExperimentId, Follow, Include, On, Overrides, Slots, complete_experiment

from ._control import watch

if TYPE_CHECKING:
    from determined.experiment.config import ExperimentConfig


def create(
    config: Annotated[
        pathlib.Path | None, typer.Argument(metavar="CONFIG", help="The experiment config, a YAML or JSON file.")
    ] = None,
    folder: Annotated[
        pathlib.Path | None, typer.Argument(metavar="DIR", help="The folder with the program; it is copied.")
    ] = None,
    include: Include = None,
    follow: Follow = False,
    overrides: Overrides = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Create the experiment without starting it; `activate` starts it.")
    ] = False,
    resume: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            help="Continue this experiment, as `activate` does, instead of creating one.",
            autocompletion=complete_experiment,
        ),
    ] = None,
    slots: Slots = None,
    on: On = None,
    local: Annotated[bool, typer.Option("--local", help="With --test: run in this terminal.")] = False,
    test: Annotated[
        bool, typer.Option("--test", help="With --local: train one batch of one trial, and record nothing.")
    ] = False,
) -> None:
    """Create an experiment and run it in the background."""
    if local != test:
        raise typer.BadParameter("--local and --test go together: give both, or neither.")
    if resume is not None:
        given = {"--include": include, "--config": overrides, "--paused": paused, "--on": on, "--test": test}
        _refuse(resume, CONFIG=config, DIR=folder, **given)
        _resume(resume, follow, slots)
        return
    if config is None or folder is None:
        raise typer.BadParameter("give a CONFIG and a DIR, such as: det experiment create experiment.yaml .")
    if test:
        from ._test_run import try_out

        try_out(_loaded(config, overrides), folder, include or ())
        return
    if follow and paused:
        raise typer.BadParameter("--follow and --paused exclude each other; give one of them.")
    loaded = _loaded(config, overrides)
    id = experiment.create(loaded, folder, include or (), paused=paused, slots=slots, on=on)
    _print_created(id, loaded, paused)
    if not paused:
        _start(id, follow, slots)


def _refuse(id: int, **given: object) -> None:
    if names := [name for name, value in given.items() if value]:
        raise typer.BadParameter(f"--resume {id} continues an experiment as it is; leave out {', '.join(names)}.")


def _resume(id: int, follow: bool, slots: int | None) -> None:
    experiment.control.activate(id, slots=slots)
    typer.echo(f"Experiment {id} runs.")
    if follow:
        watch(id)


def _loaded(path: pathlib.Path, overrides: list[str] | None) -> ExperimentConfig:
    config = experiment.config.load(path, overrides or ())
    for note in config.notes:
        typer.echo(f"Warning: {_output.plain(note, limit=2000)}", err=True)
    return config


def _print_created(id: int, config: ExperimentConfig, paused: bool) -> None:
    typer.echo(f"Created experiment {id}, {_output.plain(config.name)} ({config.searcher.name}).")
    if paused:
        typer.echo(f"  det experiment activate {id}     starts it")


def _start(id: int, follow: bool, slots: int | None) -> None:
    experiment.start(id, slots=slots)
    if follow:
        watch(id, from_start=True)
        return
    typer.echo(f"  det experiment activate {id} -f  follows it")
    typer.echo(f"  det experiment describe {id}     shows its trials")
    typer.echo(f"  det experiment logs {id} -f      shows their logs")


def continue_experiment(
    id: ExperimentId, follow: Follow = False, overrides: Overrides = None, slots: Slots = None
) -> None:
    """Continue an ended experiment: failed and canceled trials continue from their latest checkpoints."""
    trials = experiment.control.continue_experiment(id, slots=slots, overrides=overrides or ())
    typer.echo(f"Experiment {id} continues with trial {', '.join(map(str, trials))}.")
    if follow:
        watch(id)
