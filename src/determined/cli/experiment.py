"""`det experiment`: list and describe experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from determined import _home, tracking

from . import _output
from .checkpoint import COLUMNS as CHECKPOINT_COLUMNS
from .checkpoint import row as checkpoint_row

app = typer.Typer(help="Experiments: every run of a training script is one.", no_args_is_help=True)

ExperimentId = Annotated[int, typer.Argument(metavar="ID", help="The id that `det experiment list` shows.")]

_COLUMNS = ("id", "name", "state", "progress", "started", "duration", "trials", "checkpoints")
_TRIAL_COLUMNS = ("trial", "state", "steps", "best validation", "seed", "hparams", "TensorBoard")


@app.command("list")
def list_experiments(
    limit: Annotated[int | None, typer.Option(min=1, help="Show only the newest ones.")] = None,
    json: _output.Json = False,
    csv: _output.Csv = False,
) -> None:
    """List experiments, newest first."""
    format = _output.chosen_format(json, csv)
    experiments = _output.open_records().experiments(limit)
    _output.print_listing(format, _COLUMNS, [_row(record) for record in experiments], experiments)


def _row(record: tracking.ExperimentRecord) -> tuple[Any, ...]:
    return (
        record.id,
        record.name,
        _output.state_text(record),
        _output.percent(record.progress),
        _output.when(record.started),
        _output.duration(record.started, record.ended),
        record.trial_count,
        record.checkpoint_count,
    )


@app.command()
def describe(id: ExperimentId, json: _output.Json = False) -> None:
    """Show an experiment: its config, how to repeat it, its trials and checkpoints."""
    records = _output.open_records()
    experiment, trials = records.experiment(id), records.trials(id)
    checkpoints = records.checkpoints(experiment_id=id)
    if json:
        _output.print_json(_described(experiment, trials, checkpoints))
        return
    _output.print_fields(_fields(experiment, trials))
    _print_config(experiment.config)
    _output.print_table(_TRIAL_COLUMNS, [_trial_row(trial) for trial in trials], title="Trials")
    if checkpoints:
        rows = [checkpoint_row(record) for record in checkpoints]
        _output.print_table(CHECKPOINT_COLUMNS, rows, title="Checkpoints")


def _described(
    experiment: tracking.ExperimentRecord,
    trials: list[tracking.TrialRecord],
    checkpoints: list[tracking.CheckpointRecord],
) -> dict[str, Any]:
    described: dict[str, Any] = _output.as_data(experiment)
    described["trials"] = [{**_output.as_data(trial), "tensorboard": _tensorboard(trial)} for trial in trials]
    return {**described, "checkpoints": checkpoints}


def _fields(experiment: tracking.ExperimentRecord, trials: list[tracking.TrialRecord]) -> dict[str, Any]:
    return {
        "experiment": experiment.id,
        "name": experiment.name,
        "state": _output.state_text(experiment),
        "progress": _output.percent(experiment.progress),
        "started": _output.when(experiment.started),
        "ended": _output.when(experiment.ended),
        "duration": _output.duration(experiment.started, experiment.ended),
        "entrypoint": _distinct(trial.entrypoint for trial in trials),
        "seed": _distinct(trial.seed for trial in trials),
        "Resolute": _distinct(trial.resolute_version for trial in trials),
        "torch": _distinct(trial.torch_version for trial in trials),
        "git commit": _distinct(trial.git_commit for trial in trials),
        "best validation": _output.best_text(_best(experiment, trials)),
    }


def _distinct(values: Any) -> str | None:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None


def _best(experiment: tracking.ExperimentRecord, trials: list[tracking.TrialRecord]) -> tracking.BestValidation | None:
    searcher = (experiment.config or {}).get("searcher")
    is_smaller_better = searcher.get("smaller_is_better", True) if isinstance(searcher, Mapping) else True
    sign = 1 if is_smaller_better else -1
    scored = [trial.best_validation for trial in trials if trial.best_validation is not None]
    return min(scored, key=lambda best: sign * best.value, default=None)


def _print_config(config: Any) -> None:
    if config:
        typer.echo("config")
        for line in tracking.encode_json(_output.masked(config), indent=2).splitlines():
            typer.echo(f"  {line}")


def _trial_row(trial: tracking.TrialRecord) -> tuple[Any, ...]:
    return (
        trial.id,
        _output.state_text(trial),
        trial.steps_completed,
        _output.best_text(trial.best_validation),
        trial.seed,
        trial.hparams,
        _tensorboard(trial),
    )


def _tensorboard(trial: tracking.TrialRecord) -> str:
    return str(_home.home().tensorboard(trial.experiment_id, trial.id))
