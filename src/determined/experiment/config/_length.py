"""How long something is, in batches, records or epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from determined.experiment.config._section import LARGEST, Breach, Section, broken

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

    @property
    def unit(self) -> Unit:
        """What is counted."""
        return next(unit for unit in UNITS if getattr(self, unit) is not None)

    @property
    def count(self) -> int:
        """How many of the unit."""
        number: int = getattr(self, self.unit)
        return number

    def breaches(self) -> Iterator[Breach]:
        """Yield that there is not exactly one unit."""
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            held = " and ".join(given) or "none of them"
            yield Breach((), f"a length holds exactly one of {', '.join(UNITS)}, not {held}", f"Write {_EXAMPLES}.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _number_counts_batches(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"batches": value}
        if not isinstance(value, Mapping | Length):
            raise broken([Breach((), "it is not a length", f"Write {_EXAMPLES}.")])
        return value

    @pydantic.model_serializer
    def _one_unit(self) -> dict[str, int]:
        return {self.unit: self.count}
