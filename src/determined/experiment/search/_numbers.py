"""Numbers as JSON that every reader accepts: JSON has no infinities and no NaN."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import numpy as np


def to_json(number: float) -> float | str:
    """Return what stands for the number in JSON; `float` reads it back."""
    return number if math.isfinite(number) else str(number)


def pack(numbers: Sequence[float]) -> str:
    """Return many numbers as one short text; `unpack` reads it back, bit for bit."""
    return base64.b64encode(np.asarray(numbers, "<f8").tobytes()).decode()


def unpack(text: str) -> list[float]:
    """Return the numbers that `pack` wrote."""
    numbers: list[float] = np.frombuffer(base64.b64decode(text), "<f8").tolist()
    return numbers
