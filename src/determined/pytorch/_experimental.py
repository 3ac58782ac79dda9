"""Opt-ins that a trial switches on in its constructor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from determined import errors
from determined.pytorch._precision import Autocast

if TYPE_CHECKING:
    from determined.pytorch._context import PyTorchTrialContext


class PyTorchExperimentalContext:
    """Opt-ins: automatic mixed precision, and leaving checks and moves to the trial."""

    def __init__(self, parent: PyTorchTrialContext) -> None:
        self._parent = parent
        self.dataset_checks = True
        """Whether a bare torch loader from a build method is refused."""
        self.auto_to_device = True
        """Whether the loop moves batches to the device."""

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Run every model's forward under autocast, scale losses, and step on unscaled gradients.

        `dtype` is `torch.float16` (the default on a GPU), with loss scaling, or `torch.bfloat16` (the default on
        a CPU), which needs none. Outputs of models come back in fp32.
        """
        device = self._parent.device.type
        dtype = dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
        if dtype not in (torch.float16, torch.bfloat16):
            raise errors.InvalidExperimentException(f"use_amp(dtype={dtype}): pass torch.float16 or torch.bfloat16.")
        scaler = torch.amp.GradScaler(device) if dtype == torch.float16 else None
        self._parent.set_precision(Autocast(device, dtype, scaler))

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from the build methods, such as a torch `DataLoader`.

        The trial then shards data over ranks by itself, and shuffled data may continue in another order after a
        resume.
        """
        self.dataset_checks = False

    def disable_auto_to_device(self) -> None:
        """Hand batches to the trial as the loader gave them; move them with `context.to_device`."""
        self.auto_to_device = False

    # Old places of calls that are the context's own now.

    def wrap_reducer(self, *args: Any, **kwargs: Any) -> Any:
        """Call `context.wrap_reducer`."""
        return self._parent.wrap_reducer(*args, **kwargs)

    def reset_reducers(self) -> None:
        """Call `context.reset_reducers`."""
        self._parent.reset_reducers()

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Call `context.reduce_metrics`."""
        return self._parent.reduce_metrics(for_training)
