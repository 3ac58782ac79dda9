"""How ranks share a batch, so that it keeps its size when their number changes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from determined.core import DistributedContext

logger = logging.getLogger("determined.pytorch")


@dataclasses.dataclass(frozen=True, slots=True)
class Sizing:
    """How a program chooses the size of batches."""

    planned_ranks: int | None = None
    """The number of ranks that the loader's batch size is for; None for those that there are."""
    accumulates: bool = True
    """Whether each rank may train a batch in several parts, with gradients that add up."""


AS_LOADED = Sizing()


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """How a batch is split: each rank trains it in `micro_batches`, each of which is a batch of its loader.

    Sizes count what the loader groups: samples, or the batches of a batch sampler.
    """

    ranks: int
    unit: int
    """The size of one micro-batch of all ranks together."""
    wanted: int
    """The size of a batch, to be kept where the number of ranks allows it."""
    micro_batches: int = 1
    accumulates: bool = True

    @classmethod
    def of(cls, ranks: int, unit: int, sizing: Sizing) -> Split:
        """Return the split at the start."""
        alone = cls(ranks, unit, unit, accumulates=sizing.accumulates)
        return alone._of_size(unit // ranks * sizing.planned_ranks) if sizing.planned_ranks else alone

    def is_changed(self, state: Mapping[str, Any]) -> bool:
        """Return whether another number of ranks saved a state."""
        return bool(state.get("processes", state["ranks"]) != self.ranks)

    def continued(self, state: Mapping[str, Any], scale: float = 1.0) -> Split:
        """Return the split that continues a saved one.

        `ranks` and `group` of the state are the number of loader batches in a batch, and their size. `scale` is what
        one of them counts now.
        """
        micro_batches, size = state.get("micro_batches", 1), state["ranks"] * state["group"]
        if self.is_changed(state):
            return self._of_size(max(1, round(state.get("wanted", size) * scale)))
        is_same = size == micro_batches * self.unit  # else the program has another batch size now
        wanted = state.get("wanted", size) if is_same else micro_batches * self.unit
        return dataclasses.replace(self, micro_batches=micro_batches, wanted=wanted)

    def state_dict(self) -> dict[str, int]:
        """Return what `continued` needs to know; nothing if each rank trains a batch at once, as at the start."""
        if (self.micro_batches, self.wanted) == (1, self.unit):
            return {}
        return {"micro_batches": self.micro_batches, "wanted": self.wanted, "processes": self.ranks}

    @property
    def size(self) -> int:
        """The size of a batch."""
        return self.unit * self.micro_batches

    def describe(self, ranks: DistributedContext) -> None:
        """Print how batches are trained if that is not at once."""
        if not ranks.is_chief:
            return
        if self.size != self.wanted:
            logger.warning(
                "A batch had a size of %d, which %d processes with loader batches of %d cannot keep, so it has %d now. "
                "Pass batch_size=context.get_per_slot_batch_size() to the loader to keep global_batch_size.",
                self.wanted,
                self.ranks,
                self.unit // self.ranks,
                self.size,
            )
        elif self.micro_batches > 1:
            logger.warning(
                "Each process trains %d batches of its loader for each batch, and optimizers step after the last one: "
                "so a batch keeps its size of %d with %d processes.",
                self.micro_batches,
                self.size,
                self.ranks,
            )

    def _of_size(self, wanted: int) -> Split:
        micro_batches = max(1, round(wanted / self.unit)) if self.accumulates else 1
        return dataclasses.replace(self, wanted=wanted, micro_batches=micro_batches)
