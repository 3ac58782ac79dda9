"""A checkpoint whose state has not the form that a training saves: refused by name, never a bare error."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from determined.errors import InvalidCheckpointException
from determined.pytorch import Batch
from saving import reseal, save, state_in, train

WRONG = ["text", -1, None, [], {}, 10**30]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of everything in a state."""
    if place:
        yield place
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*place, key))


def forged(state: dict[str, Any], place: tuple[Any, ...], wrong: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    return changed


@pytest.mark.filterwarnings("ignore::UserWarning")  # of other threads, versions and epochs, which are forged too
@pytest.mark.parametrize("part", ["loop", "rng_state"])
def test_wrong_values_anywhere_are_refused_or_harmless(part: str, tmp_path: Any) -> None:
    folder = save()
    state = state_in(folder)
    refused = 0
    for number, place in enumerate(places(state[part], (part,))):
        copied = tmp_path / str(number)
        shutil.copytree(folder, copied)
        torch.save(forged(state, place, WRONG[number % len(WRONG)]), copied / "state_dict.pth")
        reseal(copied)
        with contextlib.suppress(InvalidCheckpointException):
            train(latest_checkpoint=copied, max_length=Batch(2))
            continue
        refused += 1
    assert refused > 0
