"""From a file, a text or a map to a config whose every rule holds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic

from determined.experiment.config._document import Document, document_of_file, document_of_text, overridden, plain
from determined.experiment.config._experiment import ExperimentConfig
from determined.experiment.config._findings import ConfigIssue, findings
from determined.experiment.config._old_forms import translate
from determined.experiment.config._section import Path

# Stands in for a searcher that is wrong, so that the rest can be checked too.
_ANY_SEARCHER = {"name": "single", "metric": "loss"}


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Return the config in a file of YAML or JSON, with `overrides` such as "searcher.max_trials=20" put into it.

    Raises `errors.InvalidConfig`, which lists all problems, each with its line.
    """
    return _config(plain(overridden(document_of_file(path), overrides)))


def parse(text: str, source: str = "<text>", overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Return the config in a text of YAML or JSON; `source` is what errors call it. Otherwise as `load`."""
    return _config(plain(overridden(document_of_text(text, source), overrides)))


def from_map(mapping: Mapping[str, Any], overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Return the config that a map is, such as one from `ExperimentConfig.to_dict`. Otherwise as `load`."""
    return _config(plain(overridden(Document("The experiment config", mapping), overrides)))


def read(path: str | os.PathLike[str], assumed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the map in a file as it is written, once it is known to be a config.

    `assumed` gives values, by section, of keys that the file may leave out although a config needs them.
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
    known = [*document.findings, *untranslated]
    try:
        config = ExperimentConfig.model_validate(tree, context={"notes": notes})
        found: list[ConfigIssue] = []
    except pydantic.ValidationError as error:
        found = _found(tree, error)
    else:
        if not known:
            return config
    # What could not be read is not there, or not whole, for the models; that goes without saying.
    new = [finding for finding in found if not any(_touch(finding.path, one.path) for one in known if one.path)]
    raise document.invalid(*known, *new)


def _found(tree: dict[str, Any], error: pydantic.ValidationError) -> list[ConfigIssue]:
    found = list(findings(error))
    bad = {str(finding.path[0]) for finding in found if finding.path and not finding.needs}
    return found + (_found_across(tree, bad) if bad else [])


def _found_across(tree: dict[str, Any], bad: set[str]) -> list[ConfigIssue]:
    """Return the rules over several sections that do not hold, where all that they are about is right by itself."""
    rest = {"searcher": _ANY_SEARCHER} | {name: value for name, value in tree.items() if name not in bad}
    try:
        ExperimentConfig.model_validate(rest)
    except pydantic.ValidationError as error:
        return [finding for finding in findings(error) if not finding.needs & bad]
    return []


def _touch(one: Path, other: Path) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]
