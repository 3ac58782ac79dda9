"""One process that trains by itself."""

from __future__ import annotations

import torch

from determined.pytorch._backends.base import Backend


class SingleProcess(Backend):
    """One process on one device: the first GPU if there is one, else the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
