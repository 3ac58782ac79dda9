"""How long something is, in batches, records or epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, PrivateAttr

from determined.experiment.config._section import LARGEST, RuleViolation, Section, broken

Unit = Literal["batches", "records", "epochs"]
UNITS: tuple[Unit, ...] = ("batches", "records", "epochs")

_EXAMPLES = "{batches: 1000}, {epochs: 3} or {records: 60000}"
_Number = Annotated[int | None, Field(ge=0, le=LARGEST)]


class Length(Section):
    """A length holds exactly one of `batches`, `records` and `epochs`; a bare number counts batches.

    `records` become max(records // global_batch_size, 1) batches.
    """

    batches: Annotated[_Number, Field(description="Batches of training, over all slots.", examples=[1000])] = None
    records: Annotated[_Number, Field(description="Records of training, over all slots.", examples=[60000])] = None
    epochs: Annotated[_Number, Field(description="Passes over the training data.", examples=[3])] = None

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

    def breaches(self) -> Iterator[RuleViolation]:
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
            raise broken([RuleViolation((), "it is not a length", f"Write {_EXAMPLES}.")])
        return handler(value)

    @pydantic.model_serializer
    def _as_written(self) -> dict[str, int] | int:
        return self.count if self._is_bare else {self.unit: self.count}

    def __eq__(self, other: object) -> bool:
        # A bare number means the same as that number of batches.
        return isinstance(other, Length) and (self.unit, self.count) == (other.unit, other.count)

    def __hash__(self) -> int:
        return hash((self.unit, self.count))
