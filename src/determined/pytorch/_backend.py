"""Where a trial trains: which device, and how models get there."""

from __future__ import annotations

import os

import torch
from torch import nn


class SingleProcess:
    """One process on one device: the first GPU if there is one, else the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model, on the device."""
        return model.to(self.device)


def choose_backend() -> SingleProcess:
    """Return the backend that fits how this process was started."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise RuntimeError(
            f"WORLD_SIZE={size} in the environment: this version trains in one process. "
            "Start the program with `python`, or unset WORLD_SIZE."
        )
    return SingleProcess()
