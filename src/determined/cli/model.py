"""`det model`: the model registry, checkpoints with a name and a version number."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from determined import tracking
from determined.experiment import wording

from . import _output
from ._arguments import CheckpointUuid, Csv, Json, ModelName, add

app = typer.Typer(help="The model registry: checkpoints with a name and versions.", no_args_is_help=True)

Metadata = Annotated[
    list[str] | None,
    typer.Option("--metadata", metavar="KEY=VALUE", help="Metadata; can be repeated."),
]

_COLUMNS = ("id", "name", "versions", "description", "labels", "created", "updated")
_VERSION_COLUMNS = ("version", "name", "checkpoint", "experiment", "trial", "comment", "metadata", "created")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the model.")],
    description: Annotated[str | None, typer.Option(help="A description.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="A label; can be repeated.")] = None,
    metadata: Metadata = None,
) -> None:
    """Create a model without versions."""
    made = tracking.Registry().create_model(name, description, label or (), _metadata(metadata))
    typer.echo(f"Created model {made.id}, {_output.plain(made.name)}.")
    typer.echo(f"  det model register-version {made.id} CHECKPOINT   makes a checkpoint its first version")


def list_models(
    all: Annotated[bool, typer.Option("--all", "-a", help="Also list archived models.")] = False,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """List models, oldest first."""
    format = _output.chosen_format(json, csv)
    models = tracking.Registry().models(include_archived=all)
    _output.print_listing(format, _COLUMNS, [_row(model) for model in models], models)


def _row(model: tracking.ModelRecord) -> tuple[Any, ...]:
    return (
        model.id,
        model.name,
        model.version_count,
        model.description,
        ", ".join(model.labels) or None,
        wording.when(model.created),
        wording.when(model.updated),
    )


def describe(model: ModelName, json: Json = False) -> None:
    """Show a model and its versions."""
    registry = tracking.Registry()
    record, versions = registry.model(model), registry.versions(model)
    if json:
        _output.print_json({**_output.as_data(record), "versions": versions})
        return
    shown = dict(zip(("model", *_COLUMNS[1:]), _row(record), strict=True))
    _output.print_fields({**shown, "metadata": record.metadata, "notes": record.notes})
    _output.print_table(_VERSION_COLUMNS, _version_rows(versions), title="Versions")


def list_versions(model: ModelName, json: Json = False, csv: Csv = False) -> None:
    """List the versions of a model, newest first."""
    format = _output.chosen_format(json, csv)
    versions = tracking.Registry().versions(model)
    _output.print_listing(format, _VERSION_COLUMNS, _version_rows(versions), versions)


def _version_rows(versions: list[tracking.ModelVersionRecord]) -> list[tuple[Any, ...]]:
    records = _output.open_records()
    found = [(version, records.checkpoint(version.checkpoint)) for version in versions]
    return [
        (
            version.number,
            version.name,
            version.checkpoint,
            checkpoint.experiment_id,
            checkpoint.trial_id,
            version.comment,
            version.metadata,
            wording.when(version.created),
        )
        for version, checkpoint in found
    ]


def register_version(
    model: ModelName,
    uuid: CheckpointUuid,
    name: Annotated[str | None, typer.Option(help="The name of the version.")] = None,
    comment: Annotated[str | None, typer.Option(help="A comment.")] = None,
    metadata: Metadata = None,
) -> None:
    """Register a checkpoint as the next version of a model, which protects it from deletion."""
    checkpoint = _output.open_records().checkpoint(uuid)
    made = tracking.Registry().register_version(model, checkpoint.uuid, name, comment, _metadata(metadata))
    typer.echo(f"Checkpoint {made.checkpoint} is version {made.number} of {_output.plain(made.model)}.")


def _metadata(pairs: list[str] | None) -> dict[str, str]:
    metadata = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not of the form KEY=VALUE.", param_hint="--metadata")
        metadata[name] = value
    return metadata


add(app, create, example='det model create digits --description "reads digits"')
add(app, list_models, "list", example="det model list --json", short="ls")
add(app, describe, example="det model describe digits", short="desc")
add(app, register_version, "register-version", example="det model register-version digits 169787e6")
add(app, list_versions, "list-versions", example="det model list-versions digits", short="lv")
