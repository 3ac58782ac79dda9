"""What all sections of an experiment config have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Key = str | int
Path = tuple[Key, ...]

# Larger numbers are slips of the keyboard; these fit every database and library below.
LARGEST = 2**31 - 1

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Text = Annotated[str, Field(min_length=1)]


class RuleViolation(NamedTuple):
    """A rule over several keys that does not hold: where, below the section that says so, and what to do."""

    at: Path
    rule: str
    remedy: str
    needs: frozenset[str] = frozenset()  # top-level keys without which it means nothing


class Section(pydantic.BaseModel):
    """A map of known keys; null stands for the default of a key."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield the rules over several keys of this section that do not hold."""
        yield from ()

    def inert_keys(self) -> Iterator[Path]:
        """Yield the keys that were given and have no effect here."""
        for name, field in type(self).model_fields.items():
            if is_marked(field, "inert") and getattr(self, name) not in (None, False):
                yield (name,)
            for path, inner in sections_in(getattr(self, name), (name,)):
                yield from ((*path, *key) for key in inner.inert_keys())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: its for name, its in value.items() if its is not None}

    @pydantic.model_validator(mode="after")
    def _hold_rules(self) -> Self:
        if breaches := list(self.breaches()):
            raise broken(breaches)
        return self


def sections_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Section]]:
    """Yield the sections that the value of a key is, or lists."""
    if isinstance(value, Section):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from sections_in(item, (*path, index))


def inert(description: str, example: Any) -> Any:
    """Return the description of a key that is accepted so that old configs work, and has no effect here."""
    return Field(description=description, examples=[example], json_schema_extra={"inert": True})


def secret(description: str, example: Any) -> Any:
    """Return the description of a key whose value is masked wherever it is shown."""
    return Field(description=description, examples=[example], json_schema_extra={"secret": True})


def is_marked(field: FieldInfo, mark: str) -> bool:
    """Return whether a key was described by `inert` or `secret`."""
    return isinstance(field.json_schema_extra, dict) and mark in field.json_schema_extra


def broken(breaches: list[RuleViolation]) -> PydanticCustomError:
    """Return the error that carries breaches through pydantic."""
    said = "; ".join(f"{breach.rule} {breach.remedy}" for breach in breaches)
    return PydanticCustomError("breaches", "{said}", {"said": said, "breaches": breaches})


def tagged(name: str) -> str:
    """Return the mark by which pydantic tells the kinds of a union; no key of a config can be equal to it."""
    return f"\0{name}"


def is_finite_power(base: float, exponent: float) -> bool:
    """Return whether base**exponent is a number that a computer can hold."""
    try:
        return math.isfinite(base**exponent)
    except OverflowError:
        return False
