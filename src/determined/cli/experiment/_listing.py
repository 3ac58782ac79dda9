"""List and describe experiments, their trials and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from determined import _home, errors, tracking
from determined.cli import _output
from determined.cli._arguments import Csv, ExperimentId, Json
from determined.cli.checkpoint import COLUMNS as CHECKPOINT_COLUMNS
from determined.cli.checkpoint import row as checkpoint_row
from determined.experiment import wording

Best = Annotated[bool, typer.Option("--best", help="Best first, by the metric of the search.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of rows.")]

_COLUMNS = ("id", "name", "state", "progress", "started", "duration", "search", "trials", "checkpoints", "labels")
_TRIAL_COLUMNS = ("trial", "state", "progress", "steps", "best validation", "restarts", "duration", "seed", "hparams")
_MAX_TRIALS = 20


def list_experiments(
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of experiments, the newest ones.")] = None,
    all: Annotated[bool, typer.Option("--all", "-a", help="Also list archived experiments.")] = False,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """List experiments, newest first."""
    format = _output.chosen_format(json, csv)
    experiments = _output.open_records().experiments(limit, include_archived=all)
    _output.print_listing(format, _COLUMNS, [_row(record) for record in experiments], experiments)


def _row(record: tracking.ExperimentRecord) -> tuple[Any, ...]:
    return (
        record.id,
        record.name,
        f"{wording.state_text(record)}{', archived' if record.is_archived else ''}",
        wording.percent(record.progress),
        wording.when(record.started),
        wording.duration(record.started, record.ended),
        wording.searcher(record).get("name"),
        record.trial_count,
        record.checkpoint_count,
        ", ".join(record.labels) or None,
    )


def describe(id: ExperimentId, json: Json = False) -> None:
    """Show an experiment: its config, how to repeat it, its trials and checkpoints."""
    found = _output.open_records().overview(id, all_metrics=True)
    if json:
        _output.print_json(_described(found))
        return
    _output.print_fields(_fields(found))
    _print_config(found.experiment.config)
    trials = found.trials
    shown = found.ranked[:_MAX_TRIALS] if len(trials) > _MAX_TRIALS else trials
    title = "Trials" if len(shown) == len(trials) else f"The best {len(shown)} of {len(trials)} trials"
    _output.print_table(_TRIAL_COLUMNS, [_trial_row(trial) for trial in shown], title=title)
    if found.checkpoints:
        rows = [checkpoint_row(record) for record in found.checkpoints]
        _output.print_table(CHECKPOINT_COLUMNS, rows, title="Checkpoints")
    if wording.lacks_runner(found.experiment):
        typer.echo(f"This experiment has no runner; `det experiment activate {id}` continues it.")


def _described(found: tracking.Overview) -> dict[str, Any]:
    described: dict[str, Any] = _output.as_data(found.experiment)
    described["trials"] = [{**_output.as_data(trial), "tensorboard": _tensorboard(trial)} for trial in found.trials]
    return {**described, "checkpoints": found.checkpoints}


def _fields(found: tracking.Overview) -> dict[str, Any]:
    experiment, trials = found.experiment, found.trials
    shown = {
        "experiment": experiment.id,
        "name": experiment.name,
        "description": experiment.description,
        "labels": ", ".join(experiment.labels),
        "project": " / ".join(filter(None, (experiment.workspace, experiment.project))),
        "notes": experiment.notes,
        "state": wording.state_text(experiment),
        "archived": "yes" if experiment.is_archived else None,
        "progress": wording.percent(experiment.progress),
        "started": wording.when(experiment.started),
        "ended": wording.when(experiment.ended),
        "duration": wording.duration(experiment.started, experiment.ended),
        "search": wording.searcher(experiment).get("name"),
        "runs on": experiment.cluster,
        "max slots": experiment.max_slots,
        "priority": experiment.priority,
        "runner": _process_text(experiment.runner),
        "entrypoint": _distinct(trial.entrypoint for trial in trials),
        "seed": _distinct(trial.seed for trial in trials) if experiment.is_local else _seed(experiment),
        "Resolute": _distinct(trial.resolute_version for trial in trials),
        "torch": _distinct(trial.torch_version for trial in trials),
        "git commit": _distinct(trial.git_commit for trial in trials),
        "best validation": wording.best_text(None if found.best is None else found.best.best_validation),
        "program": None if experiment.is_local else str(_home.home().code(experiment.id)),
        "TensorBoard": _tensorboard_of_all(experiment, trials),
    }
    always = ("experiment", "name", "state", "progress", "started", "best validation")
    return {name: value for name, value in shown.items() if value not in (None, "") or name in always}


def print_config(id: ExperimentId) -> None:
    """Print the config of an experiment as YAML, with every default filled in and secrets masked."""
    import yaml

    config = _output.open_records().experiment(id).config
    if config is None:
        raise errors.InvalidRequestException(f"experiment {id} is the run of a script without a config.")
    typer.echo(yaml.safe_dump(wording.masked(dict(config)), sort_keys=False, allow_unicode=True), nl=False)


def _tensorboard_of_all(experiment: tracking.ExperimentRecord, trials: Sequence[tracking.TrialRecord]) -> str:
    if len(trials) == 1:
        return _tensorboard(trials[0])
    return str(_home.home().tensorboards(experiment.id))


def _process_text(process: tracking.RunProcess | None) -> str | None:
    return None if process is None else f"process {process.pid} on {process.host}{', gone' * process.is_gone}"


def _seed(experiment: tracking.ExperimentRecord) -> Any:
    return ((experiment.config or {}).get("reproducibility") or {}).get("experiment_seed")


def _distinct(values: Iterable[Any]) -> str | None:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None


def _print_config(config: Any) -> None:
    if config:
        typer.echo("config")
        for line in tracking.encode_json(wording.masked(config), indent=2).splitlines():
            typer.echo(f"  {line}")


def _trial_row(trial: tracking.TrialRecord) -> tuple[Any, ...]:
    return (
        trial.id,
        wording.state_text(trial),
        wording.percent(trial.progress),
        trial.steps_completed,
        wording.best_text(trial.best_validation),
        trial.restarts,
        wording.duration(trial.started, trial.ended),
        trial.seed,
        trial.hparams,
    )


def _tensorboard(trial: tracking.TrialRecord) -> str:
    return str(_home.home().tensorboard(trial.experiment_id, trial.id))


def list_trials(
    id: ExperimentId, best: Best = False, limit: Limit = None, json: Json = False, csv: Csv = False
) -> None:
    """List the trials of an experiment in order of creation."""
    format = _output.chosen_format(json, csv)
    found = _output.open_records().overview(id, all_metrics=True)
    chosen = (found.ranked if best else found.trials)[:limit]
    _output.print_listing(format, _TRIAL_COLUMNS, [_trial_row(trial) for trial in chosen], chosen)


def list_checkpoints(
    id: ExperimentId, best: Best = False, limit: Limit = None, json: Json = False, csv: Csv = False
) -> None:
    """List the checkpoints of an experiment, oldest first; includes deleted ones unless --best is given."""
    from determined.experiment import scores

    format = _output.chosen_format(json, csv)
    records = _output.open_records()
    checkpoints, values = records.checkpoints(experiment_id=id), scores(records, id)
    found = (values.ranked(checkpoints) if best else checkpoints)[:limit]
    columns = (*CHECKPOINT_COLUMNS[:4], values.metric, *CHECKPOINT_COLUMNS[4:])
    rows = []
    for record in found:
        cells = checkpoint_row(record, in_bytes=csv)
        rows.append((*cells[:4], values.of(record), *cells[4:]))
    _output.print_listing(format, columns, rows, found)
