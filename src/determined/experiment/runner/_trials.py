"""The trials of an experiment that have not ended, as its runner knows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from determined.experiment.runner._outcome import StopReason


@dataclasses.dataclass(slots=True)
class OpenTrial:
    """A trial that runs, or waits for slots."""

    id: int
    request_id: str
    hparams: Mapping[str, Any]
    seed: int
    run_id: int = 0
    """Of its latest run; 0 before the first."""
    restarts: int = 0
    ending: StopReason | None = None
    """Why it was asked to end, if it was."""
    is_running: bool = False
    is_on_record: bool = False
    """Whether the handle of its run is."""
    is_adopted: bool = False
    """Whether an earlier runner started its run."""

    @property
    def waits(self) -> bool:
        """Whether it could start."""
        return not self.is_running and self.ending is None


class OpenTrials:
    """All open trials, in the order of their creation."""

    def __init__(self) -> None:
        self._by_id: dict[int, OpenTrial] = {}
        self._by_request: dict[str, OpenTrial] = {}

    def __iter__(self) -> Iterator[OpenTrial]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, trial: OpenTrial) -> None:
        """Know a trial."""
        self._by_id[trial.id] = self._by_request[trial.request_id] = trial

    def remove(self, trial: OpenTrial) -> None:
        """Forget a trial that has ended."""
        del self._by_id[trial.id], self._by_request[trial.request_id]

    def get(self, trial_id: int) -> OpenTrial | None:
        """Return the open trial with an id."""
        return self._by_id.get(trial_id)

    def requested(self, request_id: str) -> OpenTrial | None:
        """Return the open trial that the search asked for by this id."""
        return self._by_request.get(request_id)

    def running(self) -> list[OpenTrial]:
        """Return those that run, the oldest first."""
        return [trial for trial in self if trial.is_running]

    def waiting(self) -> list[OpenTrial]:
        """Return those that could start, the oldest first."""
        return [trial for trial in self if trial.waits]
