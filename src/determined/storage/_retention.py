"""Which checkpoints to keep. Pure: facts in, ids out."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from determined import errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many checkpoints stay: the best of the experiment, the best of each trial, the latest of each trial."""

    save_experiment_best: int = 0
    save_trial_best: int = 1
    save_trial_latest: int = 1

    @classmethod
    def of_section(cls, section: Mapping[str, Any]) -> Retention | None:
        """Return what a `checkpoint_storage` section asks for; None if it sets no retention."""
        names = [field.name for field in dataclasses.fields(cls)]
        given = {name: section[name] for name in names if section.get(name) is not None}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise errors.StorageException(
                    f"checkpoint_storage.{name}={value!r}: pass how many checkpoints to keep, an int >= 0."
                )
        return cls(**given) if given else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint, in the terms by which it is kept."""

    uuid: str
    trial_id: int
    steps_completed: int
    score: float | None
    """The compared metric of the validation at its step, smaller being better; None without a validation."""


def expired(candidates: Sequence[Candidate], keep: Retention, protected: Iterable[str] = ()) -> list[str]:
    """Return the ids of the checkpoints that need not stay, in the order given."""
    trials = defaultdict[int, list[Candidate]](list)
    for candidate in candidates:
        trials[candidate.trial_id].append(candidate)
    staying = {*protected, *_best(candidates, keep.save_experiment_best)}
    for own in trials.values():
        staying |= {*_best(own, keep.save_trial_best), *_latest(own, keep.save_trial_latest)}
    return [c.uuid for c in candidates if c.uuid not in staying]


def _best(candidates: Sequence[Candidate], count: int) -> list[str]:
    scored = [(_rankable(c.score), -c.steps_completed, c.uuid) for c in candidates if c.score is not None]
    return [uuid for *_, uuid in sorted(scored)[:count]]


def _latest(candidates: Sequence[Candidate], count: int) -> list[str]:
    return [c.uuid for c in sorted(candidates, key=lambda c: -c.steps_completed)[:count]]


def _rankable(score: float) -> float:
    """Return a score that sorts; one that is not finite is worse than all that are."""
    return score if math.isfinite(score) else math.inf
