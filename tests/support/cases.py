"""Choose which cases of a parametrized test `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases, of which `make test` leaves out all but each `step`-th.

    If the step and the number of values of a parameter have no common factor, all these values stay.
    """
    rest = pytest.mark.thorough
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=rest if number % step else ()) for number, case in enumerate(parts)]
