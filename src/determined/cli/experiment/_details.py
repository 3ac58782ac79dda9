"""Change labels, names, notes and limits of experiments, and archive them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from determined import _home, tracking
from determined.cli._arguments import ExperimentId, ExperimentIds
from determined.cli._errors import each

Label = Annotated[str, typer.Argument(metavar="LABEL", help="The label.")]
Text = Annotated[str, typer.Argument(metavar="TEXT", help="The new value.")]
NumberOrNone = Annotated[str, typer.Argument(metavar="NUMBER", help='A number, or "none" for no limit.')]


def _catalog() -> tracking.Catalog:
    return tracking.Catalog(_home.home().database)


def archive(ids: ExperimentIds) -> None:
    """Hide experiments from listings without deleting anything."""
    each(ids, lambda id: _catalog().change_experiment(id, archived=True), "Archived experiment {}.")


def unarchive(ids: ExperimentIds) -> None:
    """Show archived experiments in listings again."""
    each(ids, lambda id: _catalog().change_experiment(id, archived=False), "Experiment {} is listed again.")


def add_label(id: ExperimentId, label: Label) -> None:
    """Add a label to an experiment."""
    _catalog().add_label(id, label)


def remove_label(id: ExperimentId, label: Label) -> None:
    """Remove a label from an experiment."""
    _catalog().remove_label(id, label)


def set_name(id: ExperimentId, name: Text) -> None:
    """Change the name of an experiment."""
    if not name.strip():
        raise typer.BadParameter("a name has at least one letter.", param_hint="TEXT")
    _catalog().change_experiment(id, name=name)


def set_description(id: ExperimentId, description: Text) -> None:
    """Change the description of an experiment; "" removes it."""
    _catalog().change_experiment(id, description=description or None)


def set_notes(id: ExperimentId, notes: Text) -> None:
    """Change the notes on an experiment; "" removes them."""
    _catalog().change_experiment(id, notes=notes or None)


def set_project(
    id: ExperimentId,
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE", help="The workspace.")],
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="The project in it.")],
) -> None:
    """Move an experiment to a project of a workspace; "" "" removes it from its project."""
    if bool(workspace) != bool(project):
        raise typer.BadParameter('give both a workspace and a project, or "" for both.', param_hint="PROJECT")
    _catalog().change_experiment(id, workspace=workspace or None, project=project or None)


def set_max_slots(id: ExperimentId, slots: NumberOrNone) -> None:
    """Limit the number of slots that an experiment uses at once, also while it runs."""
    _ask(id, max_slots=_number(slots, 1, None))


def set_priority(id: ExperimentId, priority: NumberOrNone) -> None:
    """Change the priority of an experiment: 1 is the highest, 99 the lowest. Default 42."""
    _ask(id, priority=_number(priority, 1, 99))


def _ask(id: int, **limits: int | None) -> None:
    with tracking.ExperimentStore.open(_home.home().database, id) as store:
        arguments: dict[str, Any] = limits
        store.ask(**arguments)


def _number(text: str, smallest: int, largest: int | None) -> int | None:
    if text.lower() == "none":
        return None
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < smallest or (largest is not None and value > largest):
        allowed = f"at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise typer.BadParameter(f'{text!r} is neither an integer {allowed} nor "none".', param_hint="NUMBER")
    return value
