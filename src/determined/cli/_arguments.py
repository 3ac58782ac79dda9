"""Arguments and options that several commands share, with their shell completion."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from determined import errors, tracking

from ._output import open_records, plain

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Also if a process on another machine or in another container, which cannot be checked, runs it.",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow the experiment until it ends.")]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of slots into which the CPU is divided. (default: DET_SLOTS, else one per two cores)"
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on", metavar="CLUSTER", help="Where to run: local, slurm, ray or ray://HOST:PORT. (default: this machine)"
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="KEY=VALUE", help="Replace a value of the config; can be repeated."),
]
Include = Annotated[
    list[pathlib.Path] | None,
    typer.Option("--include", "-i", metavar="PATH", help="Copy this file or folder as well; can be repeated."),
]


def add(
    app: typer.Typer, function: Callable[..., Any], name: str | None = None, *, example: str, short: str | None = None
) -> None:
    """Register a function as a command, with an example at the end of its help; a short name is not listed."""
    app.command(name, epilog=f"Example: {example}")(function)
    if short is not None:
        app.command(short, epilog=f"Example: {example}", hidden=True)(function)


def _quietly(
    found: Callable[[tracking.TrackingReader], Iterator[tuple[str, str]]],
) -> Callable[[str], list[tuple[str, str]]]:
    """Return a completion function; it completes nothing if the database cannot be read."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        try:
            return [(value, plain(about)) for value, about in found(open_records()) if value.startswith(incomplete)]
        except (errors.DeterminedException, OSError):
            return []

    return complete


def _experiment_ids(records: tracking.TrackingReader) -> Iterator[tuple[str, str]]:
    for record in records.experiments():
        yield str(record.id), f"{record.name}, {record.state.value}"


def _trial_ids(records: tracking.TrackingReader) -> Iterator[tuple[str, str]]:
    for experiment in records.experiments(limit=_RECENT):
        for trial in records.trials(experiment.id):
            yield str(trial.id), f"experiment {experiment.id}, {trial.state.value}"


def _checkpoint_ids(records: tracking.TrackingReader) -> Iterator[tuple[str, str]]:
    for record in records.checkpoints():
        if record.state is tracking.CheckpointState.COMPLETED:
            yield record.uuid, f"trial {record.trial_id}, step {record.steps_completed}"


def _model_names(records: tracking.TrackingReader) -> Iterator[tuple[str, str]]:
    for model in tracking.Registry().models():
        yield model.name, f"{model.version_count} versions"


_RECENT = 5
_EXPERIMENTS = "The id that `det experiment list` shows."

complete_experiment = _quietly(_experiment_ids)
complete_trial = _quietly(_trial_ids)
complete_checkpoint = _quietly(_checkpoint_ids)
complete_model = _quietly(_model_names)

ExperimentId = Annotated[int, typer.Argument(metavar="ID", help=_EXPERIMENTS, autocompletion=complete_experiment)]
ExperimentIds = Annotated[
    list[int], typer.Argument(metavar="ID...", help=_EXPERIMENTS, autocompletion=complete_experiment)
]
TrialId = Annotated[
    int,
    typer.Argument(metavar="ID", help="The id that `det experiment list-trials` shows.", autocompletion=complete_trial),
]
CheckpointUuid = Annotated[
    str,
    typer.Argument(
        metavar="UUID", help="The id, or its first characters (at least 4).", autocompletion=complete_checkpoint
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Its name, or the id that `det model list` shows.", autocompletion=complete_model
    ),
]
