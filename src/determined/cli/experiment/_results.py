"""What an experiment has produced: its logs, plots, best checkpoints and code."""

from __future__ import annotations

import pathlib
import tarfile
from typing import Annotated

import typer

from determined import _home, errors, experiment
from determined.cli import _logs, _output, _plot
from determined.cli._arguments import ExperimentId
from determined.cli.checkpoint import copy_to


def logs(
    id: ExperimentId,
    follow: _logs.Follow = False,
    head: _logs.Head = None,
    tail: _logs.Tail = None,
    rank: _logs.Ranks = None,
    since: _logs.Since = None,
) -> None:
    """Print the logs of all trials of an experiment, in chronological order."""
    records = _output.open_records()
    wanted = _logs.Wanted.of(head, tail, rank, since, follow)
    _logs.require_logs(records.experiment(id))
    folder = _home.home().experiment(id)
    _logs.show(folder, wanted, is_over=lambda: not _logs.goes_on(records.experiment(id)), with_trial=True)


def plot(
    id: ExperimentId,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", help="The file to write: .png, .svg or .pdf. (default: experiment-ID.png)"),
    ] = None,
) -> None:
    """Plot the validation metrics of all trials, one panel per metric, one curve per trial."""
    found = _output.open_records().overview(id)
    target = output or pathlib.Path(f"experiment-{id}.png")
    curves = [(f"trial {trial.id}", found.validations[trial.id]) for trial in found.ranked]
    _output.print_left_out(_plot.draw_trials(curves, found.metric, f"{found.experiment.name}, experiment {id}", target))
    typer.echo(f"Wrote {_output.plain(target)}")


def download(
    id: ExperimentId,
    output_dir: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            help="The folder to write to, with one subfolder per checkpoint. (default: checkpoints)",
        ),
    ] = None,
    top_n: Annotated[int, typer.Option("--top-n", min=1, help="Number of checkpoints, best first.")] = 1,
    sort_by: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="The validation metric to rank by. (default: that of the search)"),
    ] = None,
    smaller_is_better: Annotated[
        bool | None,
        typer.Option(
            "--smaller-is-better/--larger-is-better",
            help="Which values are better. (default: for the metric of the search, as in its config)",
        ),
    ] = None,
) -> None:
    """Copy the best checkpoints of an experiment."""
    for record in experiment.best_checkpoints(_output.open_records(), id, top_n, sort_by, smaller_is_better):
        copy_to(record, (output_dir or pathlib.Path("checkpoints")) / record.uuid)


def download_model_def(
    id: ExperimentId,
    output_dir: Annotated[
        pathlib.Path, typer.Option("--output-dir", "-o", help="The folder to write the archive to.")
    ] = pathlib.Path(),
) -> None:
    """Write the program of an experiment, as its trials run it, to an archive."""
    if _output.open_records().experiment(id).is_local:
        raise errors.InvalidRequestException(f"experiment {id} is the run of a script, whose program is not copied.")
    output_dir.mkdir(parents=True, exist_ok=True)
    target = output_dir / f"experiment_{id}_model_def.tgz"
    aside = target.with_name(f".{target.name}.partial")
    with tarfile.open(aside, "w:gz") as archive:
        archive.add(_home.home().code(id), arcname=".")
    aside.replace(target)
    typer.echo(f"Wrote {_output.plain(target)}")
