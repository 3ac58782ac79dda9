"""A config as it was written: the plain values in it, and the line of each."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from determined import errors
from determined._secrets import MASK, is_secret
from determined._text import plain as printable
from determined.experiment.config._findings import NOTHING, SECRET, ConfigIssue
from determined.experiment.config._section import Path
from determined.experiment.config._text import shown, spelled
from determined.experiment.config._tree import Plain, TooMuch
from determined.experiment.config._yaml import Unreadable, read_yaml

LARGEST = 100_000
"""Bytes of a file, or characters of a text, which take a second or so to read."""
_SMALLEST_CONFIG = "Write at least searcher: {name: single, metric: validation_loss}."
# Sections in which maps and lists may hold secrets.
_GUARDED = ("checkpoint_storage", "data", "environment", "integrations", "registry_auth")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A config that was read and not yet checked."""

    source: str
    tree: Any = None
    lines: dict[Path, int | None] = dataclasses.field(default_factory=dict)
    findings: tuple[ConfigIssue, ...] = ()

    def line(self, path: Path) -> int | None:
        """Return the line of a key, or else of the section that it is missing from."""
        while len(path) > 1 and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)

    def invalid(self, *findings: ConfigIssue) -> errors.InvalidConfig:
        """Return the error that says all that is wrong."""
        source = printable(self.source)
        problems = sorted(map(self._problem, findings), key=lambda problem: problem.line or sys.maxsize)
        if len(problems) == 1:
            return errors.InvalidConfig(f"{source}: {problems[0]}", problems)
        listed = "".join(f"\n  {problem}" for problem in problems)
        return errors.InvalidConfig(f"{source}: {len(problems)} problems{listed}", problems)

    def _problem(self, finding: ConfigIssue) -> errors.ConfigProblem:
        return errors.ConfigProblem(
            path=spelled(finding.path),
            rule=finding.rule,
            remedy=finding.remedy,
            line=self.line(finding.path),
            value=_value(finding),
        )


def document_of_file(path: str | os.PathLike[str]) -> Document:
    """Return the config in a file of YAML or JSON."""
    source = os.fsdecode(path)
    try:
        with open(source, "rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "Give the path of a file with an experiment config."
        raise Document(source).invalid(ConfigIssue((), f"it cannot be read ({reason})", remedy)) from None
    _require_room(content, "bytes", source)
    try:
        return document_of_text(content.decode("utf-8-sig"), source)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        finding = ConfigIssue((), f"byte {error.start + 1} is not UTF-8", "Save the file as UTF-8.")
        raise Document(source, lines={(): line}).invalid(finding) from None


def document_of_text(text: str, source: str) -> Document:
    """Return the config in a text of YAML or JSON."""
    _require_room(text, "characters", source)
    try:
        read = read_yaml(text)
    except Unreadable as error:
        raise Document(source, lines={error.finding.path: error.line}).invalid(error.finding) from None
    return Document(source, read.value, dict(read.lines), tuple(read.findings))


def _require_room(content: str | bytes, units: str, source: str) -> None:
    if len(content) > LARGEST:
        finding = ConfigIssue((), f"it has more than {LARGEST:,} {units}", "Move data to a file of its own.")
        raise Document(source).invalid(finding)


def plain(document: Document) -> Document:
    """Return a document with nothing in it that cannot be in JSON; refuse what is no map at all."""
    copier = Plain()
    try:
        tree = copier.copy(document.tree)
    except TooMuch as error:
        raise document.invalid(error.finding) from None
    if not isinstance(tree, dict):
        rule = "it is empty" if document.tree is None else "an experiment config is a map of keys and values"
        value = NOTHING if tree is None else tree
        raise document.invalid(*copier.findings, ConfigIssue((), rule, _SMALLEST_CONFIG, value))
    return dataclasses.replace(document, tree=tree, findings=(*document.findings, *copier.findings))


def overridden(document: Document, overrides: Iterable[str]) -> Document:
    """Return a document with values replaced, each as a text `key.path=value` says."""
    for override in overrides:
        document = _with_override(document, override)
    return document


def _with_override(document: Document, override: str) -> Document:
    spelling, equals, text = override.partition("=")
    path = tuple(key.strip() for key in spelling.split("."))
    if not equals or not all(path):
        rule, remedy = "an override is of the form key=value", "Write, for example, searcher.max_trials=20."
        return _with_finding(document, ConfigIssue((), rule, remedy, override))
    try:
        read = read_yaml(text)
    except Unreadable as error:
        return _with_finding(document, error.finding._replace(path=path), path)
    if (tree := _replaced(document.tree, path, read.value)) is None:
        finding = ConfigIssue(path, "there is no map to put it into", "Override the value around it.")
        return _with_finding(document, finding, path)
    lines = {known: line for known, line in document.lines.items() if known[: len(path)] != path}
    findings = [finding._replace(path=(*path, *finding.path)) for finding in read.findings]
    return Document(document.source, tree, lines | {path: None}, (*document.findings, *findings))


def _with_finding(document: Document, finding: ConfigIssue, path: Path = ()) -> Document:
    # It is about no line of the text.
    return Document(document.source, document.tree, document.lines | {path: None}, (*document.findings, finding))


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree with the value at a path; None if what is there has no keys."""
    if not path:
        return value
    if tree is not None and not isinstance(tree, Mapping):
        return None
    key, *rest = path
    inner = _replaced((tree or {}).get(key), tuple(rest), value)
    return None if inner is None and rest else {**(tree or {}), key: inner}


def _value(finding: ConfigIssue) -> str | None:
    if finding.value is NOTHING:
        return None
    is_guarded = bool(finding.path) and finding.path[0] in _GUARDED and isinstance(finding.value, dict | list)
    if finding.value is SECRET or is_guarded or is_secret(finding.path):
        return MASK
    return shown(finding.value)
