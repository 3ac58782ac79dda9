"""From a file, a string or a mapping to a checked config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic

from determined.experiment.config._document import Document, document_of_file, document_of_text, overridden, plain
from determined.experiment.config._experiment import ExperimentConfig
from determined.experiment.config._issues import issues
from determined.experiment.config._old_forms import translate
from determined.experiment.config._section import ConfigIssue, Path

# Takes the place of an invalid searcher, so that the rest can be checked too.
_ANY_SEARCHER = {"name": "single", "metric": "loss"}


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Return the config in a file of YAML or JSON, with `overrides` such as "searcher.max_trials=20" applied.

    Raises `errors.InvalidConfig`, which lists all problems, each with its line.
    """
    return _config(plain(overridden(document_of_file(path), overrides)))


def parse(text: str, source: str = "<text>", overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Return the config in a string of YAML or JSON; errors name it `source`. Otherwise as `load`."""
    return _config(plain(overridden(document_of_text(text, source), overrides)))


def from_map(mapping: Mapping[str, Any], overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Return the config in a mapping, such as one from `ExperimentConfig.to_dict`. Otherwise as `load`."""
    return _config(plain(overridden(Document("The experiment config", mapping), overrides)))


def read(path: str | os.PathLike[str], assumed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mapping in a file as it is written, after checking that it is a config.

    `assumed` has values, by section, for required keys that the file may leave out.
    """
    document = plain(document_of_file(path))
    complete = dict(document.tree)
    for name, values in assumed.items():
        given = complete.get(name)
        if isinstance(given, dict | None):
            complete[name] = {**values, **{key: value for key, value in (given or {}).items() if value is not None}}
    _config(document, complete)
    written: dict[str, Any] = document.tree
    return written


def _config(document: Document, tree: dict[str, Any] | None = None) -> ExperimentConfig:
    tree, notes, untranslated = translate(document.tree if tree is None else tree)
    known = [*document.issues, *untranslated]
    try:
        config = ExperimentConfig.model_validate(tree, context={"notes": notes})
        found: list[ConfigIssue] = []
    except pydantic.ValidationError as error:
        found = _found(tree, error)
    else:
        if not known:
            return config
    # The models miss what could not be read; that is not reported again.
    new = [issue for issue in found if not any(_touch(issue.path, one.path) for one in known if one.path)]
    raise document.invalid(*known, *new)


def _found(tree: dict[str, Any], error: pydantic.ValidationError) -> list[ConfigIssue]:
    found = list(issues(error))
    bad = {str(issue.path[0]) for issue in found if issue.path and not issue.needs}
    return found + (_found_across(tree, bad) if bad else [])


def _found_across(tree: dict[str, Any], bad: set[str]) -> list[ConfigIssue]:
    """Return the violated rules over several sections, where each section by itself is valid."""
    rest = {"searcher": _ANY_SEARCHER} | {name: value for name, value in tree.items() if name not in bad}
    try:
        ExperimentConfig.model_validate(rest)
    except pydantic.ValidationError as error:
        return [issue for issue in issues(error) if not issue.needs & bad]
    return []


def _touch(one: Path, other: Path) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]
