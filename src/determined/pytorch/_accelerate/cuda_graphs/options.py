"""What `use_cuda_graphs` was told."""

from __future__ import annotations

import dataclasses
from typing import Any

from determined import errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How batches are captured, checked."""

    warmup: int = 3
    max_graphs: int = 8
    verify: bool = False

    def __post_init__(self) -> None:
        _check_number("warmup", self.warmup, 3)
        _check_number("max_graphs", self.max_graphs, 1)
        if not isinstance(self.verify, bool):
            raise errors.InvalidExperimentException(f"use_cuda_graphs(verify={self.verify!r}): pass True or False.")


def _check_number(name: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise errors.InvalidExperimentException(
            f"use_cuda_graphs({name}={value!r}): pass an int of at least {smallest}."
        )
