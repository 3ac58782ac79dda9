"""Trials that a runner has recorded, without a runner."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import determined as det
from determined import tracking

SEED = 77


def record_trial(database: pathlib.Path, config: Mapping[str, Any], hparams: Mapping[str, Any]) -> det.TrialInfo:
    """Record an experiment of one trial as a runner would; returns what the trial's processes get to know of it."""
    description = tracking.RunDescription(
        name="managed",
        config=dict(config),
        hparams=dict(hparams),
        seed=SEED,
        entrypoint="train.py",
        torch_version=None,
        resolute_version="0",
        git_commit=None,
        pid=os.getpid(),
        process_started=0.0,
        host="here",
    )
    with tracking.TrialWriter.start(database, description) as recorder:
        ids = {"experiment_id": recorder.experiment_id, "trial_id": recorder.trial_id}
    return det.TrialInfo(**ids, trial_seed=SEED, hparams=dict(hparams), _config=dict(config))
