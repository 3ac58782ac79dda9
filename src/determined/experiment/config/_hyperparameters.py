"""The section `hyperparameters`: constants, ranges to search in, and maps of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from determined.experiment.config._section import Positive, RuleViolation, Section, is_finite_power, tagged

# The widest range that NumPy draws whole numbers from.
_WIDEST = 2**63 - 1
_Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[
    Positive | None,
    Field(description="How many values of the range a grid search takes; other searches ignore it.", examples=[5]),
]


class Const(Section):
    """A value that is the same in every trial. `lr: 0.1` is short for `lr: {type: const, val: 0.1}`."""

    type: Annotated[Literal["const"], Field(description="Says that it is a constant.", examples=["const"])] = "const"
    val: Annotated[Any, Field(description="The value: anything, also a list or a map.", examples=[0.1])]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        # Null is a value here; what is no map is the value itself.
        if isinstance(value, Const | Mapping):
            return value
        return {"val": value}


class _Range(Section):
    """Values from `minval` to `maxval`."""

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield that the ends are in the wrong order, or too far apart."""
        minval, maxval = _ends(self)
        if minval >= maxval:
            yield RuleViolation(
                ("minval",), f"minval={minval} is not below maxval={maxval}", "Swap them, or write the one value."
            )
        elif not _drawable(self):
            yield RuleViolation(
                ("maxval",), f"{minval} to {maxval} is too wide a range to draw from", "Choose nearer ends."
            )


class Int(_Range):
    """A whole number from `minval` to `maxval`, both included."""

    type: Annotated[
        Literal["int"], Field(description="Says that it is a range of whole numbers.", examples=["int"])
    ] = "int"
    minval: Annotated[_Whole, Field(description="The smallest value.", examples=[8])]
    maxval: Annotated[_Whole, Field(description="The largest value.", examples=[64])]
    count: _Count = None


class Double(_Range):
    """A number from `minval` to `maxval`."""

    type: Annotated[
        Literal["double"], Field(description="Says that it is a range of numbers.", examples=["double"])
    ] = "double"
    minval: Annotated[float, Field(description="The smallest value.", examples=[0.1])]
    maxval: Annotated[float, Field(description="The largest value.", examples=[0.5])]
    count: _Count = None


class Log(_Range):
    """A number from `base**minval` to `base**maxval`, spread evenly over the exponents."""

    type: Annotated[Literal["log"], Field(description="Says that it is a range of exponents.", examples=["log"])] = (
        "log"
    )
    base: Annotated[float, Field(gt=0, description="What is raised to the exponent.", examples=[10])] = 10.0
    minval: Annotated[float, Field(description="The smallest exponent.", examples=[-4])]
    maxval: Annotated[float, Field(description="The largest exponent.", examples=[-1])]
    count: _Count = None


class Categorical(Section):
    """One of the listed values."""

    type: Annotated[
        Literal["categorical"], Field(description="Says that it is a choice.", examples=["categorical"])
    ] = "categorical"
    vals: Annotated[
        list[Any], Field(min_length=1, description="The values to choose from, anything.", examples=[["relu", "gelu"]])
    ]


Hyperparameter = Const | Int | Double | Log | Categorical
KINDS = (Const, Int, Double, Log, Categorical)
_TYPES = {kind.model_fields["type"].default for kind in KINDS}
_KEYS = {name for kind in KINDS for name in kind.model_fields} - {"type"}
# No text under `type` can be equal to it.
_NESTED = tagged(tagged("nested"))


def _kind(value: Any) -> str | None:
    """Return the mark of what a value in a map of hyperparameters is; None if its `type` is not a string."""
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


def _ends(values: Any) -> tuple[float, float]:
    return values.minval, values.maxval


def _drawable(values: Any) -> bool:
    minval, maxval = _ends(values)
    if isinstance(values, Int):
        return maxval - minval < _WIDEST
    if isinstance(values, Log):
        return is_finite_power(values.base, minval) and is_finite_power(values.base, maxval)
    return math.isfinite(maxval - minval)
