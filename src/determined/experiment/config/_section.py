"""What all sections of an experiment config have in common, and lengths, which are in several of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic
from pydantic import Field, PrivateAttr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Key = str | int
Path = tuple[Key, ...]

# Larger numbers are typing mistakes; these fit every database and library below.
LARGEST = 2**31 - 1

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Text = Annotated[str, Field(min_length=1)]


NOTHING = object()
"""The value of an issue that is about no value."""
SECRET = object()
"""The value of an issue about a value that must not be shown."""


class ConfigIssue(NamedTuple):
    """A rule that a config breaks, the path and the value of the key, and what to write instead."""

    path: Path
    rule: str
    remedy: str
    value: Any = NOTHING
    needs: frozenset[str] = frozenset()


class RuleViolation(NamedTuple):
    """A rule over several keys of a section that does not hold: the path below the section, and what to write."""

    at: Path
    rule: str
    remedy: str
    needs: frozenset[str] = frozenset()  # top-level keys that must be valid for this to mean anything


class Section(pydantic.BaseModel):
    """A mapping of known keys; null stands for the default of a key."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the rules over several keys of this section that do not hold."""
        yield from ()

    def ignored_keys(self) -> Iterator[Path]:
        """Yield the keys that were given and are ignored here."""
        for name, field in type(self).model_fields.items():
            if is_marked(field, "ignored") and getattr(self, name) not in (None, False):
                yield (name,)
            for path, inner in sections_in(getattr(self, name), (name,)):
                yield from ((*path, *key) for key in inner.ignored_keys())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: its for name, its in value.items() if its is not None}

    @pydantic.model_validator(mode="after")
    def _hold_rules(self) -> Self:
        if violations := list(self.violations()):
            raise rule_error(violations)
        return self


def sections_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Section]]:
    """Yield the section that a value is, or the sections in a list."""
    if isinstance(value, Section):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from sections_in(item, (*path, index))


def key(description: str, example: Any, **rules: Any) -> Any:
    """Return the description of a key, with an example and the rules of pydantic for its value."""
    return Field(description=description, examples=[example], **rules)


def ignored(description: str, example: Any) -> Any:
    """Return the description of a key that is accepted so that old configs work, and ignored."""
    return key(description, example, json_schema_extra={"ignored": True})


def secret(description: str, example: Any) -> Any:
    """Return the description of a key whose value is masked in all output."""
    return key(description, example, json_schema_extra={"secret": True})


def is_marked(field: FieldInfo, mark: str) -> bool:
    """Return whether a key was described by `ignored` or `secret`."""
    return isinstance(field.json_schema_extra, dict) and mark in field.json_schema_extra


def rule_error(violations: list[RuleViolation]) -> PydanticCustomError:
    """Return the error that carries violations through pydantic."""
    message = "; ".join(f"{violation.rule} {violation.remedy}" for violation in violations)
    return PydanticCustomError("violations", "{message}", {"message": message, "violations": violations})


def tagged(name: str) -> str:
    """Return the tag of a kind in a union of pydantic; no key of a config can equal it."""
    return f"\0{name}"


class SlotRange(Section):
    """The slots of an elastic trial: it starts with as many as are free, from `min` to `max`.

    At its next start, after a pause, a restart or a preemption, it continues with those that are free then.
    It is not stopped to get more.
    """

    min: Annotated[Positive, key("Smallest number of slots; with fewer the trial waits.", 1)] = 1
    max: Annotated[Positive, key("Largest number of slots.", 8)]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of slots can differ from start to start."""
        return self.min < self.max

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that the range is empty."""
        if self.max < self.min:
            yield RuleViolation(("max",), f"it is less than min: {self.min}", f"Write max: {self.min} or more.")


def is_finite_power(base: float, exponent: float) -> bool:
    """Return whether base**exponent fits a float."""
    try:
        return math.isfinite(base**exponent)
    except OverflowError:
        return False


Unit = Literal["batches", "records", "epochs"]
UNITS: tuple[Unit, ...] = ("batches", "records", "epochs")

_EXAMPLES = "{batches: 1000}, {epochs: 3} or {records: 60000}"
_Number = Annotated[int | None, Field(ge=0, le=LARGEST)]


class Length(Section):
    """A length holds exactly one of `batches`, `records` and `epochs`; a bare number counts batches.

    `records` become max(records // global_batch_size, 1) batches.
    """

    batches: Annotated[_Number, key("Training batches.", 1000)] = None
    records: Annotated[_Number, key("Training records, over all slots.", 60000)] = None
    epochs: Annotated[_Number, key("Passes over the training data.", 3)] = None

    _is_bare: bool = PrivateAttr(default=False)  # programs read the length in the form that the user wrote

    @property
    def unit(self) -> Unit:
        """What is counted."""
        return next(unit for unit in UNITS if getattr(self, unit) is not None)

    @property
    def count(self) -> int:
        """How many of the unit."""
        number: int = getattr(self, self.unit)
        return number

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that there is not exactly one unit."""
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            held = " and ".join(given) or "none of them"
            yield RuleViolation(
                (), f"a length holds exactly one of {', '.join(UNITS)}, not {held}", f"Write {_EXAMPLES}."
            )

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _number_counts_batches(cls, value: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, int) and not isinstance(value, bool):
            length = handler({"batches": value})
            length._is_bare = True
            return length
        if not isinstance(value, Mapping | Length):
            raise rule_error([RuleViolation((), "it is not a length", f"Write {_EXAMPLES}.")])
        return handler(value)

    @pydantic.model_serializer
    def _as_written(self) -> dict[str, int] | int:
        return self.count if self._is_bare else {self.unit: self.count}

    def __eq__(self, other: object) -> bool:
        # A bare number means the same as that number of batches.
        return isinstance(other, Length) and (self.unit, self.count) == (other.unit, other.count)

    def __hash__(self) -> int:
        return hash((self.unit, self.count))
