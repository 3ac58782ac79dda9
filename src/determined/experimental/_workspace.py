"""Workspaces and projects: labels that group experiments."""

from __future__ import annotations

import dataclasses
from typing import Any

from determined import errors
from determined._home import Home
from determined.tracking import ExperimentRecord, TrackingReader


@dataclasses.dataclass(frozen=True, slots=True)
class Project:
    """A group of experiments in a workspace. It is a label, stored only with its experiments."""

    workspace: str
    name: str

    @property
    def id(self) -> str:
        """The `project_id` of `create_experiment` and `list_experiments`: "workspace/name"."""
        return f"{self.workspace}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Workspace:
    """A group of projects. It is a label, stored only with its experiments."""

    name: str
    _home: Home = dataclasses.field(repr=False, compare=False)

    @property
    def id(self) -> str:
        """Its name."""
        return self.name

    def create_project(self, name: str, description: str | None = None) -> Project:
        """Return a project, which exists once it has an experiment. The description is not stored."""
        return Project(self.name, _checked("create_project", name))

    def get_project(self, project_name: str) -> Project:
        """Return a project, whether or not it has experiments."""
        return Project(self.name, _checked("get_project", project_name))

    def list_projects(self) -> list[Project]:
        """Return the projects that have experiments, by name."""
        found = TrackingReader(self._home.database).experiments(include_archived=True)
        names = {one.project for one in found if one.workspace == self.name and one.project}
        return [Project(self.name, name) for name in sorted(names)]


def workspace_of(call: str, name: str, home: Home) -> Workspace:
    """Return the workspace of a name, whether or not it has experiments."""
    return Workspace(_checked(call, name), home)


def workspaces(home: Home) -> list[Workspace]:
    """Return the workspaces that have experiments, by name."""
    found = TrackingReader(home.database).experiments(include_archived=True)
    return [Workspace(name, home) for name in sorted({one.workspace for one in found if one.workspace})]


def project_id_of(record: ExperimentRecord) -> str | None:
    """Return the id of the project that an experiment is in; None if it is in none."""
    return Project(record.workspace, record.project).id if record.workspace and record.project else None


def labels_of(call: str, project_id: Any) -> dict[str, str]:
    """Return the workspace and the project that an id names, as in an experiment config."""
    workspace, _, project = project_id.partition("/") if isinstance(project_id, str) else ("", "", "")
    if not (workspace and project):
        raise errors.InvalidExperimentException(
            f"{call}(project_id={project_id!r}): projects are labels here, without numbers; pass the `id` of a "
            'Project, such as "vision/digits", or write workspace and project into the config.'
        )
    return {"workspace": workspace, "project": project}


def _checked(call: str, name: Any) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{call}({name!r}): a name is a string of at least one character, without a slash.")
    return name
