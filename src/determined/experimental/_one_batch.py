"""Test a trial on one batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determined.pytorch import PyTorchTrial

_ASSUMED = {"name": "single", "metric": "validation_loss", "max_length": {"batches": 1}}


def test_one_batch(
    trial_class: type[PyTorchTrial] | None = None,  # noqa: PT028  # it is not a test
    config: Mapping[str, Any] | None = None,  # noqa: PT028
) -> PyTorchTrial:
    """Train and validate one batch of a trial in this process, save a checkpoint, and return the trial.

    Without `trial_class`, the `entrypoint` of the config names it. Hyperparameters that the config leaves to a search
    get the values of its first trial.
    """
    from determined import pytorch
    from determined.launch import load_class

    tree = dict(config or {})
    chosen = trial_class or load_class(str(tree.get("entrypoint")))
    with pytorch.init(hparams=_hparams(tree), exp_conf=tree) as context:
        trial = chosen(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(1), test_mode=True)
    return trial


test_one_batch.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _hparams(tree: Mapping[str, Any]) -> dict[str, Any]:
    from determined.experiment import first_trial
    from determined.experiment.config import from_map

    complete = {**tree, "searcher": {**_ASSUMED, **(tree.get("searcher") or {})}}
    return dict(first_trial(from_map(complete), os.getcwd()).hparams)
