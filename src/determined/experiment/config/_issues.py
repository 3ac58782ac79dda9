"""Turns the errors of pydantic into issues that people can use: the path, the value, the rule and what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from determined.experiment.config._experiment import ExperimentConfig
from determined.experiment.config._hyperparameters import KINDS
from determined.experiment.config._searcher import searchers
from determined.experiment.config._section import (
    NOTHING,
    SECRET,
    ConfigIssue,
    Path,
    RuleViolation,
    Section,
    is_marked,
    tagged,
)
from determined.experiment.config._storage import HOME, STORAGES, HomeStorage
from determined.experiment.config._text import any_of, in_yaml, nearest


class _Family(NamedTuple):
    """The kinds of a top-level section, which a key of it tells apart."""

    section: str
    key: str
    kinds: Mapping[str, type[Section]]


def _families() -> tuple[_Family, ...]:
    return (
        _Family("searcher", "name", searchers()),
        _Family("checkpoint_storage", "type", {str(kind.model_fields["type"].default): kind for kind in STORAGES}),
        _Family("hyperparameters", "type", {str(kind.model_fields["type"].default): kind for kind in KINDS}),
    )


def _kind_of(tag: str) -> type[Section] | None:
    """Return the kind of section that has a tag of pydantic."""
    kinds = {tagged(name): kind for family in _families() for name, kind in family.kinds.items()}
    return kinds.get(tag, HomeStorage if tag == HOME else None)


class _Place(NamedTuple):
    """What the models know about a path in a config."""

    path: Path
    field: FieldInfo | None
    name: str  # of the field
    section: type[Section] | None  # that is there, or is missing there

    @property
    def example(self) -> str:
        """The key as it could be written."""
        examples = self.field.examples if self.field else None
        return f"{self.name}: {in_yaml(examples[0])}" if examples else "something else"


def issues(error: pydantic.ValidationError) -> Iterator[ConfigIssue]:
    """Yield the issues in an error of the models."""
    for detail in error.errors(include_url=False):
        yield from _issues(detail)


def _issues(detail: ErrorDetails) -> Iterator[ConfigIssue]:
    place = _place(detail["loc"])
    kind = detail["type"]
    if kind == "violations":
        for violation in detail["ctx"]["violations"]:
            yield _of_violation(place, violation, detail["input"])
    elif kind == "extra_forbidden":
        yield _of_unknown_key(detail["loc"])
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _of_unknown_kind(place, detail["input"])
    else:
        value = NOTHING if kind == "missing" else detail["input"]
        is_secret = place.field is not None and is_marked(place.field, "secret")
        rule, remedy = _explained(detail, place)
        yield ConfigIssue(place.path, rule, remedy, SECRET if is_secret else value)


def _place(loc: tuple[str | int, ...]) -> _Place:
    path: list[str | int] = []
    section: type[Section] | None = ExperimentConfig
    field, name = None, ""
    for part in loc:
        if isinstance(part, str) and part.startswith("\0"):
            section = _kind_of(part) or section
            continue
        path.append(part)
        if isinstance(part, str):
            field, name = section.model_fields.get(part) if section else None, part
            section = _section_in(field.annotation) if field else None
    return _Place(tuple(path), field, name, section)


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _of_violation(place: _Place, violation: RuleViolation, given: Any) -> ConfigIssue:
    value: Any = given
    for key in violation.at:
        try:
            value = value[key]
        except (LookupError, TypeError):
            value = NOTHING
            break
    field = place.section.model_fields.get(str(violation.at[0])) if violation.at and place.section else None
    if field is not None and is_marked(field, "secret"):
        value = SECRET
    return ConfigIssue((*place.path, *violation.at), violation.rule, violation.remedy, value, violation.needs)


def _of_unknown_key(loc: tuple[str | int, ...]) -> ConfigIssue:
    *above, key = loc
    section = _place(tuple(above)).section
    known = list(section.model_fields) if section else []
    path = _place(loc).path
    if (owners := _owners(section, str(key))) is not None:
        remedy = f"It belongs to {owners}."
    elif near := nearest(key, known):
        remedy = _did_you_mean(near)
    elif (home := _homes().get(str(key))) is not None and section is ExperimentConfig:
        remedy = f"It belongs below {home}."
    else:
        remedy = f"The keys here are {', '.join(known)}."
        if section is ExperimentConfig:
            remedy += " Hyperparameters go below hyperparameters, other settings of the program below data."
    return ConfigIssue(path, "there is no such key here", remedy)


def _owners(section: type[Section] | None, key: str) -> str | None:
    """Return which other kinds of the section have the key, if any: 'name: gp or random'."""
    for family in _families():
        if section in family.kinds.values() or (section is HomeStorage and family.section == "checkpoint_storage"):
            owners = [name for name, kind in family.kinds.items() if key in kind.model_fields]
            return f"{family.key}: {any_of(owners)}" if owners else None
    return None


def _homes() -> dict[str, str]:
    """Return the section of each key of the config's sections; the first of those with the same key."""
    homes: dict[str, str] = {}
    for name, field in ExperimentConfig.model_fields.items():
        section = _section_in(field.annotation)
        homes = dict.fromkeys(section.model_fields if section else (), name) | homes
    return dict.fromkeys((key for kind in searchers().values() for key in kind.model_fields), "searcher") | homes


def _of_unknown_kind(place: _Place, given: Any) -> ConfigIssue:
    family = next(family for family in _families() if family.section == place.path[0])
    key, choices = family.key, list(family.kinds)
    if not isinstance(given, Mapping):
        return ConfigIssue(place.path, "it is not a mapping", f"Write {place.example}.", given)
    path = (*place.path, key)
    kind = given.get(key)
    if kind is None:
        return ConfigIssue(path, "it is required", f"Write {key}: {any_of(choices)}.")
    remedy = _did_you_mean(nearest(kind, choices)) or f"Write {key}: {any_of(choices)}."
    if family.section == "hyperparameters":
        remedy += (
            f" A mapping with {key} is a range; a hyperparameter of that name is written "
            f"{key}: {{type: const, val: {kind}}}."
        )
    return ConfigIssue(path, f"it is not one of {', '.join(choices)}", remedy, kind)


def _choices(annotation: Any) -> list[str]:
    """Return the strings that a key accepts."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in _choices(part)]


def _explained(detail: ErrorDetails, place: _Place) -> tuple[str, str]:
    """Return the rule and the remedy."""
    kind, value, limits = detail["type"], detail["input"], detail.get("ctx") or {}
    if kind in _CLAUSES:
        return _CLAUSES[kind], _REMEDIES.get(kind, _by_example)(place, value)
    if kind == "literal_error":
        choices = _choices(place.field.annotation if place.field else None)
        return f"it is not one of {', '.join(choices)}", _did_you_mean(nearest(value, choices)) or _by_example(place)
    for name, clause in _LIMITS.items():
        if name in limits:
            return f"{clause} {_number(limits[name])}", _by_example(place)
    return f"it is not accepted ({detail['msg']})", _by_example(place)


_CLAUSES = {
    "missing": "it is required",
    "model_type": "it is not a mapping",
    "dict_type": "it is not a mapping",
    "list_type": "it is not a list",
    "string_type": "it is not a string",
    "int_type": "it is not an integer",
    "float_type": "it is not a number",
    "finite_number": "it is not a finite number",
    "bool_type": "it is neither true nor false",
    "too_short": "it is empty",
    "string_too_short": "it is empty",
    "string_pattern_mismatch": "it is not of the form module:Class",
}
_LIMITS = {"gt": "it is not above", "ge": "it is less than", "lt": "it is not below", "le": "it is more than"}


def _number(limit: Any) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _did_you_mean(near: str | None) -> str:
    return f"Did you mean {near}?" if near else ""


def _by_example(place: _Place, value: Any = None) -> str:
    return f"Write {place.example}."


def _integer(place: _Place, value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"Write {place.name}: {int(value)}."
    if isinstance(value, str) and value.strip().isdecimal():
        return f"Write {place.name}: {value.strip()}, without quotes."
    return _by_example(place)


def _quoted(place: _Place, value: Any) -> str:
    if isinstance(value, int | float):
        return f"Put it in quotes if it is meant as a string, or write, for example, {place.example}."
    return _by_example(place)


_REMEDIES: dict[str, Callable[[_Place, Any], str]] = {"int_type": _integer, "string_type": _quoted}
