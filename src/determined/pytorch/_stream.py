"""Training batches without end, from the position that training has reached."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from determined.pytorch import _rng
from determined.pytorch._data import DataLoader, batches_of
from determined.pytorch._order import in_epoch

logger = logging.getLogger("determined.pytorch")


class Stream(Protocol):
    """Endless training data that can tell, and go to, its position."""

    epoch_length: int | None
    """Batches an epoch; None if the data has no length."""

    def open(self, batches_trained: int, seed: int) -> Callable[[], Any]:
        """Go to the position after `batches_trained` batches and return the function that gets the next one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what finding the position needs beyond the number of batches."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; before `open`."""
        ...


class IndexedStream:
    """Data with indices: the position is computed."""

    def __init__(self, loader: DataLoader, num_replicas: int, rank: int) -> None:
        self._make = functools.partial(loader.get_data_loader, repeat=True, num_replicas=num_replicas, rank=rank)
        self.epoch_length = length_of(self._make())

    def open(self, batches_trained: int, seed: int) -> Callable[[], Any]:
        """Return the function that gets the next batch."""
        return batches_of(self._make(skip=batches_trained, seed=seed)).__next__

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the number of batches says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over nothing."""


class PassStream:
    """Data that only it itself knows: iterated pass after pass.

    If the loader or its data set has `state_dict` and `load_state_dict`, the position is theirs. Otherwise it
    is found again by reading past the batches of the pass that were trained.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._keeper = _position_keeper(loader)
        self._restored = False
        self._in_pass = 0
        self._passes = 0
        self.epoch_length = length_of(loader)
        if self.epoch_length == 0:
            raise ValueError(
                f"The training data loader has no batches: the length of {loader!r} is 0. Give it more data or a "
                "smaller batch size."
            )

    def open(self, batches_trained: int, seed: int) -> Callable[[], Any]:
        """Go to the position and return the function that gets the next batch."""
        if batches_trained and not self._restored:
            length = self.epoch_length
            self._passes, self._in_pass = divmod(batches_trained, length) if length else (0, batches_trained)
        batches = self._endless(seed)
        if not (self._keeper and self._restored):
            self._read_past(batches)
        return batches.__next__

    def state_dict(self) -> dict[str, Any]:
        """Return the position within the pass, and the data's own state if it can tell it."""
        own = {"loader": self._keeper.state_dict()} if self._keeper else {}
        return {"passes": self._passes, "in_pass": self._in_pass, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a position."""
        if "in_pass" not in state:
            return
        self._passes, self._in_pass = state["passes"], state["in_pass"]
        self._restored = True
        if self._keeper and "loader" in state:
            self._keeper.load_state_dict(state["loader"])

    def _endless(self, seed: int) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self._pass(seed):
                count += 1
                self._in_pass += 1
                yield batch
            if not count and not self._in_pass:
                raise ValueError(
                    "The training data loader yielded no batch in a whole pass; check that its data set is not empty "
                    "and that it starts anew whenever it is iterated."
                )
            self._in_pass = 0
            self._passes += 1

    def _pass(self, seed: int) -> Iterator[Any]:
        """Iterate over the loader once, in an order of seed and pass alone if torch's generators decide it."""
        with _rng.seeded(_rng.derive(seed, self._passes)), in_epoch(self._loader, self._passes):
            batches = iter(self._loader)
            # Samplers draw when the first batch is asked for. Data that keeps its position may be past that.
            first = [] if self._keeper else list(itertools.islice(batches, 1))
        return itertools.chain(first, batches)

    def _read_past(self, batches: Iterator[Any]) -> None:
        if behind := self._in_pass:
            logger.warning(
                "The training data cannot tell its position, so %d batches are read again to find it; this is exact "
                "only if its order depends on torch's generators alone. Give the data set state_dict() and "
                "load_state_dict() to go on at once.",
                behind,
            )
            self._in_pass = 0
            for _ in range(behind):
                next(batches)


def stream_of(loader: Any, num_replicas: int, rank: int) -> Stream:
    """Return the training stream over what `build_training_data_loader` gave."""
    if isinstance(loader, DataLoader) and not loader.is_iterable:
        return IndexedStream(loader, num_replicas, rank)
    return PassStream(loader.get_data_loader() if isinstance(loader, DataLoader) else loader)


def _position_keeper(loader: Any) -> Any:
    """Return the loader or its data set if it keeps its position, else None."""
    # Copies of the data set in worker processes move on by themselves; the one here does not.
    candidates = [loader] if getattr(loader, "num_workers", 0) else [loader, getattr(loader, "dataset", None)]
    for candidate in candidates:
        if callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None)):
            return candidate
    return None


def length_of(loader: Any) -> int | None:
    """Return the number of batches a pass, or None if the loader has no length."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # torch loaders have the method even where their data has no length
        return None
