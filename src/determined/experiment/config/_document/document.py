"""A config as it was written: plain values, and the line of each."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from determined import errors
from determined._secrets import MASK, is_secret
from determined._text import plain as printable
from determined.experiment.config._document.plain import Plain, TooMuch
from determined.experiment.config._document.yaml import Unreadable, read_yaml
from determined.experiment.config._section import NOTHING, SECRET, ConfigIssue, Path
from determined.experiment.config._text import shown, spelled

MAX_SIZE = 100_000
"""Maximum bytes of a file, or characters of a string; reading them takes about a second."""
_SMALLEST_CONFIG = "Write at least searcher: {name: single, metric: validation_loss}."
# Sections in which mappings and lists may contain secrets.
_GUARDED = ("checkpoint_storage", "data", "environment", "integrations", "registry_auth")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A config that was read and not yet checked."""

    source: str
    tree: Any = None
    lines: dict[Path, int | None] = dataclasses.field(default_factory=dict)
    issues: tuple[ConfigIssue, ...] = ()

    def line(self, path: Path) -> int | None:
        """Return the line of a key, or else of the section that it is missing from."""
        while len(path) > 1 and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)

    def invalid(self, *issues: ConfigIssue) -> errors.InvalidConfig:
        """Return the error that lists all issues."""
        source = printable(self.source)
        problems = sorted(map(self._problem, issues), key=lambda problem: problem.line or sys.maxsize)
        if len(problems) == 1:
            return errors.InvalidConfig(f"{source}: {problems[0]}", problems)
        listed = "".join(f"\n  {problem}" for problem in problems)
        return errors.InvalidConfig(f"{source}: {len(problems)} problems{listed}", problems)

    def _problem(self, issue: ConfigIssue) -> errors.ConfigProblem:
        return errors.ConfigProblem(
            path=spelled(issue.path),
            rule=issue.rule,
            remedy=issue.remedy,
            line=self.line(issue.path),
            value=_value(issue),
        )


def document_of_file(path: str | os.PathLike[str]) -> Document:
    """Return the config in a file of YAML or JSON."""
    source = os.fsdecode(path)
    try:
        with open(source, "rb") as file:
            content = file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "Give the path of a file with an experiment config."
        raise Document(source).invalid(ConfigIssue((), f"it cannot be read ({reason})", remedy)) from None
    _require_room(content, "bytes", source)
    try:
        return document_of_text(content.decode("utf-8-sig"), source)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        issue = ConfigIssue((), f"byte {error.start + 1} is not UTF-8", "Save the file as UTF-8.")
        raise Document(source, lines={(): line}).invalid(issue) from None


def document_of_text(text: str, source: str) -> Document:
    """Return the config in a string of YAML or JSON."""
    _require_room(text, "characters", source)
    try:
        read = read_yaml(text)
    except Unreadable as error:
        raise Document(source, lines={error.issue.path: error.line}).invalid(error.issue) from None
    return Document(source, read.value, dict(read.lines), tuple(read.issues))


def _require_room(content: str | bytes, units: str, source: str) -> None:
    if len(content) > MAX_SIZE:
        issue = ConfigIssue((), f"it has more than {MAX_SIZE:,} {units}", "Move data to a file of its own.")
        raise Document(source).invalid(issue)


def plain(document: Document) -> Document:
    """Return a copy of a document with plain JSON values only; raise if it is not a mapping."""
    copier = Plain()
    try:
        tree = copier.copy(document.tree)
    except TooMuch as error:
        raise document.invalid(error.issue) from None
    if not isinstance(tree, dict):
        rule = "it is empty" if document.tree is None else "an experiment config is a mapping of keys and values"
        value = NOTHING if tree is None else tree
        raise document.invalid(*copier.issues, ConfigIssue((), rule, _SMALLEST_CONFIG, value))
    return dataclasses.replace(document, tree=tree, issues=(*document.issues, *copier.issues))


def overridden(document: Document, overrides: Iterable[str]) -> Document:
    """Return a document with values replaced; each override is a string `key.path=value`."""
    for override in overrides:
        document = _with_override(document, override)
    return document


def _with_override(document: Document, override: str) -> Document:
    spelling, equals, text = override.partition("=")
    path = tuple(key.strip() for key in spelling.split("."))
    if not equals or not all(path):
        rule, remedy = "an override is of the form key=value", "Write, for example, searcher.max_trials=20."
        return _with_issue(document, ConfigIssue((), rule, remedy, override))
    try:
        read = read_yaml(text)
    except Unreadable as error:
        return _with_issue(document, error.issue._replace(path=path), path)
    if (tree := _replaced(document.tree, path, read.value)) is None:
        issue = ConfigIssue(path, "there is no mapping to put it into", "Override the value around it.")
        return _with_issue(document, issue, path)
    lines = {known: line for known, line in document.lines.items() if known[: len(path)] != path}
    issues = [issue._replace(path=(*path, *issue.path)) for issue in read.issues]
    return Document(document.source, tree, lines | {path: None}, (*document.issues, *issues))


def _with_issue(document: Document, issue: ConfigIssue, path: Path = ()) -> Document:
    # An override has no line.
    return Document(document.source, document.tree, document.lines | {path: None}, (*document.issues, issue))


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree with the value at a path; None if a value on the path has no keys."""
    if not path:
        return value
    if tree is not None and not isinstance(tree, Mapping):
        return None
    key, *rest = path
    inner = _replaced((tree or {}).get(key), tuple(rest), value)
    return None if inner is None and rest else {**(tree or {}), key: inner}


def _value(issue: ConfigIssue) -> str | None:
    if issue.value is NOTHING:
        return None
    is_guarded = bool(issue.path) and issue.path[0] in _GUARDED and isinstance(issue.value, dict | list)
    # A URL of a store with an @ may have keys before it.
    is_url_with_keys = issue.path == ("checkpoint_storage",) and "@" in str(issue.value)
    if issue.value is SECRET or is_guarded or is_url_with_keys or is_secret(issue.path):
        return MASK
    return shown(issue.value)
