"""`det trial`: show a trial, its logs, metrics and best checkpoint, and kill it."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from determined import _home, errors, experiment, tracking
from determined.experiment import wording

from . import _logs, _output, _plot
from ._arguments import Csv, Json, TrialId, add
from .checkpoint import copy_to
from .experiment._listing import list_trials

app = typer.Typer(help="Trials: one training run with one set of hyperparameters.", no_args_is_help=True)

_SUMMARY_COLUMNS = ("group", "metric", "latest", "at step", "smallest", "largest", "reports")


def describe(
    id: TrialId,
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Show every report of metrics, also of the trials that this one continues."),
    ] = False,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Show a trial: its hyperparameters, how to repeat it, and its metrics."""
    format = _output.chosen_format(json, csv)
    records = _output.open_records()
    trial = records.trial(id)
    reports = records.history(id) if metrics else None
    if format is _output.Format.JSON:
        _output.print_json(_described(trial, reports))
    elif format is _output.Format.CSV:
        _print_csv(trial, reports)
    else:
        _print_text(trial, reports)


def _described(trial: tracking.TrialRecord, reports: list[tracking.MetricReport] | None) -> dict[str, Any]:
    described: dict[str, Any] = _output.as_data(trial)
    return described if reports is None else {**described, "metrics": reports}


def _print_csv(trial: tracking.TrialRecord, reports: list[tracking.MetricReport] | None) -> None:
    if reports is None:
        _output.print_csv(("field", "value"), list(_fields(trial).items()))
    else:
        names = _metric_names(reports)
        rows = [(report.group, *_report_row(report, names)) for report in reports]
        _output.print_csv(("group", "step", "time", *names), rows)


def _print_text(trial: tracking.TrialRecord, reports: list[tracking.MetricReport] | None) -> None:
    _output.print_fields(_fields(trial))
    if reports is None:
        _output.print_table(_SUMMARY_COLUMNS, _summary_rows(trial), title="Metrics")
        return
    for group in dict.fromkeys(report.group for report in reports):
        of_group = [report for report in reports if report.group == group]
        names = _metric_names(of_group)
        rows = [_report_row(report, names) for report in of_group]
        _output.print_table(("step", "time", *names), rows, title=group)


def _fields(trial: tracking.TrialRecord) -> dict[str, Any]:
    return {
        "trial": trial.id,
        "experiment": trial.experiment_id,
        "state": wording.state_text(trial),
        "reason": trial.reason,
        "status": trial.status,
        "progress": wording.percent(trial.progress),
        "started": wording.when(trial.started),
        "ended": wording.when(trial.ended),
        "duration": wording.duration(trial.started, trial.ended),
        "steps": trial.steps_completed,
        "runs": trial.run_id or None,
        "restarts": trial.restarts or None,
        "best validation": wording.best_text(trial.best_validation),
        "hparams": trial.hparams,
        "metadata": trial.metadata,
        "continues": trial.source_checkpoint,
        "entrypoint": trial.entrypoint,
        "seed": trial.seed,
        "Resolute": trial.resolute_version,
        "torch": trial.torch_version,
        "git commit": trial.git_commit,
        "process": None if trial.process is None else f"{trial.pid} on {trial.host}",
        "TensorBoard": str(_home.home().tensorboard(trial.experiment_id, trial.id)),
    }


def _summary_rows(trial: tracking.TrialRecord) -> list[tuple[Any, ...]]:
    return [
        (group, name, item.latest, item.latest_step, item.smallest, item.largest, item.count)
        for group, metrics in trial.summary.items()
        for name, item in metrics.items()
    ]


def _metric_names(reports: list[tracking.MetricReport]) -> list[str]:
    return list(dict.fromkeys(name for report in reports for name in report.metrics))


def _report_row(report: tracking.MetricReport, names: list[str]) -> tuple[Any, ...]:
    values = (report.metrics.get(name) for name in names)
    return (report.steps_completed, wording.when(report.time), *values)


def plot(
    id: TrialId,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", help="The file to write: .png, .svg or .pdf. (default: trial-ID.png)"),
    ] = None,
) -> None:
    """Plot the metrics of a trial, training and validation in one panel per metric."""
    records = _output.open_records()
    trial = records.trial(id)
    experiment = records.experiment(trial.experiment_id)
    target = output or pathlib.Path(f"trial-{id}.png")
    left_out = _plot.draw(records.history(id), f"{experiment.name}, trial {id}", target)
    _output.print_left_out(left_out)
    typer.echo(f"Wrote {_output.plain(target)}")


def logs(
    id: TrialId,
    follow: _logs.Follow = False,
    head: _logs.Head = None,
    tail: _logs.Tail = None,
    rank: _logs.Ranks = None,
    since: _logs.Since = None,
) -> None:
    """Print the logs of a trial from all its runs, in chronological order."""
    records = _output.open_records()
    wanted = _logs.Wanted.of(head, tail, rank, since, follow)
    experiment_id = records.trial(id).experiment_id
    _logs.require_logs(records.experiment(experiment_id))

    def is_over() -> bool:
        return records.trial(id).state.is_final or not _logs.goes_on(records.experiment(experiment_id))

    _logs.show(_home.home().trial(experiment_id, id), wanted, is_over, with_trial=False)


def download(
    id: TrialId,
    output_dir: Annotated[
        pathlib.Path | None,
        typer.Option("--output-dir", "-o", help="The folder to write to. (default: checkpoints/UUID)"),
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Copy the latest checkpoint instead of the best one.")
    ] = False,
) -> None:
    """Copy the best checkpoint of a trial into a new or empty folder."""
    records = _output.open_records()
    trial = records.trial(id)
    if latest:
        record = _latest(records.checkpoints(trial.experiment_id, id), id)
    else:
        (record,) = experiment.best_checkpoints(records, trial.experiment_id, 1, trial_id=id)
    copy_to(record, output_dir or pathlib.Path("checkpoints", record.uuid))


def _latest(checkpoints: list[tracking.CheckpointRecord], id: int) -> tracking.CheckpointRecord:
    present = [one for one in checkpoints if one.state is tracking.CheckpointState.COMPLETED]
    if not present:
        raise errors.CheckpointNotFoundException(
            f"trial {id} has no checkpoint; `det checkpoint list` shows which there are."
        )
    return max(present, key=lambda one: one.steps_completed)


def kill(id: TrialId) -> None:
    """Kill a trial; its experiment continues."""
    experiment.control.kill_trial(id)
    experiment_id = _output.open_records().trial(id).experiment_id
    if experiment.control.is_run(experiment_id):
        typer.echo(f"Trial {id} is being killed; `det trial describe {id}` shows its state.")
    else:
        typer.echo(
            f"Trial {id} will be killed when its experiment runs again: it has no runner now, "
            f"`det experiment activate {experiment_id}` starts one."
        )


add(app, list_trials, "list", example="det trial list 3 --best", short="lt")
add(app, describe, example="det trial describe 7 --metrics --csv", short="desc")
add(app, logs, example="det trial logs 7 --follow --tail 20")
add(app, plot, example="det trial plot 7 --output curves.svg")
add(app, download, example="det trial download 7 --output-dir best")
add(app, kill, example="det trial kill 7")
