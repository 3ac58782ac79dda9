"""A group of ranks: what one of them can do in it, and how messages name the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol, TypeVar

from determined import errors
from determined.core._handshake import Claim, Purpose

T = TypeVar("T")


class Star(Protocol):
    """What a rank of a group can do, wherever in the group it is."""

    def gather(self, call: str, item: T) -> list[T] | None:
        """Return all items on the first member, None elsewhere."""

    def allgather(self, call: str, item: T) -> list[T]:
        """Return all items."""

    def broadcast(self, call: str, item: T) -> T:
        """Return the first member's item."""

    def close(self) -> None:
        """Leave the group."""


class Alone:
    """The group of one rank: it has everything already."""

    def gather(self, call: str, item: T) -> list[T] | None:
        """Return the one item."""
        return [item]

    def allgather(self, call: str, item: T) -> list[T]:
        """Return the one item."""
        return [item]

    def broadcast(self, call: str, item: T) -> T:
        """Return the item."""
        return item

    def close(self) -> None:
        """Nobody is there to leave."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Which ranks a star connects, and how messages name them."""

    size: int
    index: int
    timeout: float
    machine: int | None = None
    """The machine whose ranks these are; None for all ranks."""

    @property
    def number(self) -> int:
        """The number by which the handshake tells groups apart."""
        return 0 if self.machine is None else 1 + self.machine

    def claim(self, purpose: Purpose) -> Claim:
        """Return what this process says about itself to the first member."""
        return Claim(purpose, self.number, self.size, self.index)

    def names(self, indices: Iterable[int]) -> str:
        """Return how messages name members."""
        chosen = sorted(indices)
        noun = "rank" if len(chosen) == 1 else "ranks"
        numbers = ", ".join(map(str, chosen))
        return f"{noun} {numbers}" if self.machine is None else f"local {noun} {numbers} of machine {self.machine}"

    def lost(self, indices: Iterable[int], text: str) -> errors.PeerLostException:
        """Return the error about members that are lost."""
        return errors.PeerLostException(text, sorted(indices) if self.machine is None else ())
