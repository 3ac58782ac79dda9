"""The state of a run: an ordered list of named parts. Saving walks it, restoring walks it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from determined.core import DistributedContext
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint.format import Saved
from determined.pytorch._metrics.reducers import to_cpu

if TYPE_CHECKING:
    from determined.pytorch._backends.fsdp_state import ShardWriter

logger = logging.getLogger("determined.pytorch")

MAX_COUNT = 2**53

ABSENT: Any = object()
"""The value of a part that a checkpoint does not hold."""


Scope = Literal["shared", "per_rank"]
"""Whether all ranks have the same state, so that the chief's is saved, or each rank saves and restores its own."""


class Stateful(Protocol):
    """An object with a state: `load_state_dict` takes what `state_dict` returned."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A named part of a run's state: its owner, its scope, and where a checkpoint keeps it."""

    name: str
    owner: Stateful
    scope: Scope = "shared"
    _: dataclasses.KW_ONLY
    place: tuple[str, ...] = ()
    """Keys of a shared part in a checkpoint, outermost first; empty if its entries are entries of the checkpoint."""
    missing: Any = ABSENT
    """What to load if a checkpoint does not hold the part; with `ABSENT`, nothing is loaded."""
    merge: Callable[[Sequence[Any]], Any] = lambda values: values[0]
    """Returns what each rank loads if another number of ranks saved these values."""
    sharded: bool = False
    """Whether a checkpoint of sharded models keeps the tensors of each rank in a file of that rank."""
    runs_program: bool = False
    """Whether loading calls code of the program, whose errors are raised unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunState:
    """The parts of a run, in the order in which they are restored. The last one is the RNG."""

    parts: Sequence[Part]
    ranks: DistributedContext
    open_data: Callable[[], Callable[[], Any]]
    seed_rank: Callable[[], None]

    def state_dict(self, shards: ShardWriter | None) -> dict[str, Any]:
        """Return the state as a checkpoint holds it; the parts of each rank on the chief alone. All ranks must call it.

        `shards` takes the tensors that are too large for the chief to hold for all ranks.
        """
        own = {part.name: part.owner.state_dict() for part in self.parts if part.scope == "per_rank"}
        if shards is not None:
            own |= {part.name: shards.take_own(own[part.name], f".{part.name}") for part in self.parts if part.sharded}
        per_rank = self.ranks.gather(own if self.ranks.size == 1 else to_cpu(own))
        state: dict[str, Any] = {"loop": {}}
        for part in self._shared():
            _put(state, part.place, part.owner.state_dict())
        if per_rank is not None:
            put_rank_states(state, per_rank)
        return state

    def initial_state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint at the start; None for those that hold no objects of the program.

        A part that cannot return its state yet is left out.
        """
        state: dict[str, Any] = {}
        for part in self._shared():
            with contextlib.suppress(Exception):
                _put(state, part.place, part.owner.state_dict())
        return state | dict.fromkeys(("rng_state", "loop", "gradients")) | {"callbacks": state.get("callbacks")}

    def start(self, saved: Saved | None) -> Callable[[], Any]:
        """Restore every part from a checkpoint, if there is one, and return the function that fetches batches."""
        *parts, generators = self.parts
        if saved is not None:
            with checkpoint_format.reading(saved.path):
                own = self._rank_state(saved.state)
            for part in parts:
                self._load(part, saved, own)
        # The RNG comes last: opening the data shuffles it and starts loader workers, which draws random numbers.
        fetch = self.open_data()
        if saved is None:
            self.seed_rank()
        else:
            self._load(generators, saved, own)
        return fetch

    def _shared(self) -> list[Part]:
        return [part for part in self.parts if part.scope == "shared"]

    def _load(self, part: Part, saved: Saved, own: Mapping[str, Any]) -> None:
        with contextlib.nullcontext() if part.runs_program else checkpoint_format.reading(saved.path):
            state = _get(saved.state, part.place) if part.scope == "shared" else own.get(part.name, ABSENT)
            state = part.missing if state is ABSENT else state
            if state is not ABSENT:
                part.owner.load_state_dict(state)

    def _rank_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of this rank; if another number of ranks saved them, merged parts."""
        per_rank = rank_states(saved)
        if len(per_rank) == self.ranks.size:
            return per_rank[self.ranks.rank]
        if self.ranks.is_chief:
            logger.warning(
                "The checkpoint was saved by %d processes, and %d continue: the data continues at its position, but "
                "sums over ranks and random numbers differ from an uninterrupted run.",
                len(per_rank),
                self.ranks.size,
            )
        parts = [part for part in self.parts if all(part.name in one for one in per_rank)]
        return {part.name: part.merge([one[part.name] for one in per_rank]) for part in parts}


# Where a checkpoint keeps the parts


def _put(state: dict[str, Any], place: Sequence[str], value: Any) -> None:
    if not place:
        state.update(value)
        return
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = value


def _get(state: Mapping[str, Any], place: Sequence[str]) -> Any:
    found: Any = state
    for key in place:
        if key not in found:
            return ABSENT
        found = found[key]
    return found


def put_rank_states(state: dict[str, Any], per_rank: Sequence[dict[str, Any]]) -> None:
    """Put the parts of each rank into a checkpoint: the chief's in the place of those of a single process."""
    state["rng_state"] = [one.pop("rng") for one in per_rank]
    chief, *others = per_rank
    if gradients := chief.pop("gradients"):
        state["gradients"] = gradients
    state["loop"] |= {**chief, "ranks": len(per_rank)}
    if others:
        state["loop"]["others"] = others


def rank_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of each rank that `put_rank_states` put into a checkpoint, or of a checkpoint of Determined."""
    loop = state["loop"]
    chief = {name: loop[name] for name in ("data", "window", "reducers") if name in loop}
    per_rank = [chief | {"gradients": state.get("gradients", {})}, *map(dict, loop.get("others", []))]
    generators = state["rng_state"] if isinstance(state["rng_state"], list) else [state["rng_state"]]
    for one, generator in zip(per_rank, generators, strict=False):  # Determined saved only the chief's
        one["rng"] = generator
    return per_rank


_POSITIVE = ("ranks", "group", "micro_batches", "wanted", "processes", "length")
"""Counts in the position of the data that are never 0."""


def check(loop: Mapping[str, Any]) -> None:
    """Raise `ValueError` or `LookupError` for invalid counts and missing parts."""
    progress = loop["progress"]
    _check_count("batches_trained", progress["batches_trained"])
    _check_count("epochs_trained", progress.get("epochs_trained", 0))  # some versions of Determined saved none
    for name in ("last_val", "last_ckpt"):
        _check_count(name, progress[name] or 0)
    _check_count("seed", loop.get("seed", 0))
    for part in (loop, *loop.get("others", [])):
        for name in ("circumstances", "window", "data"):
            if not isinstance(part.get(name, {}), Mapping):
                raise ValueError(f"{name}={part[name]!r} is not a mapping")
        _check_count("count", part.get("window", {}).get("count", 0))
        for name, value in part.get("data", {}).items():
            if name != "loader":  # the state that a data set of the program returned
                _check_count(name, value, least=name in _POSITIVE)


def _check_count(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
        raise ValueError(f"{name}={value!r} is not an integer from {least} to {MAX_COUNT}")
