"""Modules of Determined that Resolute does not have, and what to use in their place."""

from __future__ import annotations

from typing import NoReturn

_REPORT = "train with a loop of your own and report to `with determined.core.init() as core_context:`"

_INSTEAD = {
    "determined.common.api": "there is no master to call; use determined.experimental.client.",
    "determined.common.storage": "checkpoints are folders; use core_context.checkpoint, or the path that "
    "`det checkpoint describe` prints.",
    "determined.experimental.core_v2": "use determined.core: `with determined.core.init() as core_context:`.",
    "determined.keras": f"there are no Keras trials; {_REPORT}, or write a PyTorchTrial.",
    "determined.pytorch.deepspeed": "there are no DeepSpeed trials; write a PyTorchTrial, and call "
    "context.experimental.use_fsdp() for a model that is larger than a GPU.",
    "determined.pytorch.experimental": "there is no batch processing; load the trial with "
    "determined.pytorch.load_trial_from_checkpoint_path() and run its model over a DataLoader.",
    "determined.searcher": "a search method is a class that inherits from determined.experiment.search.SearchMethod "
    "and that the config names: `searcher: {name: custom, method: module:Class}`.",
    "determined.transformers": f"there is no callback for the Trainer of transformers; {_REPORT}, from a "
    "transformers.TrainerCallback of your own.",
}


def refuse(module: str) -> NoReturn:
    """Raise ImportError with what to use instead of a module."""
    raise ImportError(f"{module} is not part of Resolute: {_INSTEAD[module]}", name=module)
