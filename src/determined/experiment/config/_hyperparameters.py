"""The section `hyperparameters`: constants, ranges to search in, and mappings of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from determined.experiment.config._section import Positive, RuleViolation, Section, is_finite_power, key, tagged

_MAX_RANGE = 2**63 - 1  # from which NumPy draws integers
_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[
    Positive | None, key("Number of values that a grid search takes from the range; other searches ignore it.", 5)
]


class Const(Section):
    """A value that is the same in every trial. `lr: 0.1` is short for `lr: {type: const, val: 0.1}`."""

    type: Literal["const"] = "const"
    val: Annotated[Any, key("The value: anything, also a list or a mapping.", 0.1)]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        # Null is a value here; anything but a mapping is the value itself.
        if isinstance(value, Const | Mapping):
            return value
        return {"val": value}


class _Range(Section):
    """Values from `minval` to `maxval`."""

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that the bounds are in the wrong order, or too far apart."""
        minval, maxval = _bounds(self)
        if minval >= maxval:
            yield RuleViolation(
                ("minval",), f"minval={minval} is not below maxval={maxval}", "Swap them, or write a single value."
            )
        elif not _drawable(self):
            yield RuleViolation(
                ("maxval",), f"{minval} to {maxval} is too wide a range to draw from", "Choose bounds that are closer."
            )


class Int(_Range):
    """An integer from `minval` to `maxval`, both included."""

    type: Literal["int"] = "int"
    minval: Annotated[_Int64, key("The smallest value.", 8)]
    maxval: Annotated[_Int64, key("The largest value.", 64)]
    count: _Count = None


class Double(_Range):
    """A number from `minval` to `maxval`."""

    type: Literal["double"] = "double"
    minval: Annotated[float, key("The smallest value.", 0.1)]
    maxval: Annotated[float, key("The largest value.", 0.5)]
    count: _Count = None


class Log(_Range):
    """A number from `base**minval` to `base**maxval`, uniform over the exponents."""

    type: Literal["log"] = "log"
    base: Annotated[float, key("The base of the exponent.", 10, gt=0)] = 10.0
    minval: Annotated[float, key("The smallest exponent.", -4)]
    maxval: Annotated[float, key("The largest exponent.", -1)]
    count: _Count = None


class Categorical(Section):
    """One of the listed values."""

    type: Literal["categorical"] = "categorical"
    vals: Annotated[list[Any], key("The values to choose from: anything.", ["relu", "gelu"], min_length=1)]


Hyperparameter = Const | Int | Double | Log | Categorical
KINDS = (Const, Int, Double, Log, Categorical)
_TYPES = {kind.model_fields["type"].default for kind in KINDS}
_KEYS = {name for kind in KINDS for name in kind.model_fields} - {"type"}
_NESTED = tagged(tagged("nested"))  # no string under `type` can equal it


def _kind(value: Any) -> str | None:
    """Return the tag of a value in a mapping of hyperparameters; None if its `type` is not a string."""
    if isinstance(value, KINDS):
        return tagged(value.type)
    if not isinstance(value, Mapping):
        return tagged("const")
    kind = value.get("type")
    # A program may have a hyperparameter of its own called `type`, such as that of an optimizer. Beside a key of ours,
    # such as `minval`, an unknown type is a mistake.
    is_known = isinstance(kind, str) and kind in _TYPES
    if kind is None or isinstance(kind, Mapping | Section) or not (is_known or _KEYS & value.keys()):
        return _NESTED
    return tagged(kind) if isinstance(kind, str) else None


_Entry = Annotated[
    Annotated[Const, Tag(tagged("const"))]
    | Annotated[Int, Tag(tagged("int"))]
    | Annotated[Double, Tag(tagged("double"))]
    | Annotated[Log, Tag(tagged("log"))]
    | Annotated[Categorical, Tag(tagged("categorical"))]
    | Annotated["Space", Tag(_NESTED)],
    Discriminator(_kind),
]
Space = TypeAliasType("Space", dict[str, _Entry])


def leaves(space: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Hyperparameter]]:
    """Yield every hyperparameter of a space with its path, in the order of their names."""
    for name in sorted(space):
        value = space[name]
        if isinstance(value, KINDS):
            yield (*above, name), value
        else:
            yield from leaves(value, (*above, name))


def _bounds(values: Any) -> tuple[float, float]:
    return values.minval, values.maxval


def _drawable(values: Any) -> bool:
    minval, maxval = _bounds(values)
    if isinstance(values, Int):
        return maxval - minval < _MAX_RANGE
    if isinstance(values, Log):
        return is_finite_power(values.base, minval) and is_finite_power(values.base, maxval)
    return math.isfinite(maxval - minval)
