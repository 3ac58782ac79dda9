"""Trial classes that are forked from a warm process, on a GPU."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import torch

import determined as det
from determined._home import home
from determined.experiment.executors import EndReason, LocalExecutor, RunSpec, read_logs
from managed import record_trial

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SOURCES = pathlib.Path(det.__file__).parents[1]
CONFIG = {"name": "test", "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 20}}}
PROGRAM = """
import json, os, torch
from torch import nn
from torch.utils.data import TensorDataset
from determined import pytorch

facts = {"before": torch.cuda.is_initialized(), "seen": torch.cuda.device_count()}


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
        print("FACTS", json.dumps(facts | {"device": str(next(self.model.parameters()).device)}))

    def build_training_data_loader(self):
        x = torch.randn(64, 4)
        return pytorch.DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, num_workers=2)

    def build_validation_data_loader(self):
        return self.build_training_data_loader()

    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}
"""


def spec(folder: pathlib.Path, gpus: list[str]) -> RunSpec:
    trial = record_trial(home().database, CONFIG, {})
    info = det.ClusterInfo(trial=trial)
    run = folder / f"trial-{trial.trial_id}" / "run-1"
    code = folder / "code"
    return RunSpec(
        experiment_id=trial.experiment_id,
        trial_id=trial.trial_id,
        run_id=1,
        entrypoint="model_def:Trial",
        code=code,
        folder=run,
        environment=info.to_environment(),
        placement={"gpus": gpus},
    )


def test_trials_of_one_warm_process_see_the_gpus_that_they_are_given(tmp_path: pathlib.Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model_def.py").write_text(PROGRAM)
    found = []
    with LocalExecutor({**os.environ, "PYTHONPATH": str(SOURCES)}) as executor:
        for gpus in (["0"], [], ["0"]):
            run = spec(tmp_path, gpus)
            executor.start(run)
            (ended,) = executor.poll(120)
            text = "".join(f"{line.text}\n" for line in read_logs(run.folder.parent))
            assert ended.reason is EndReason.COMPLETED, text
            found.append(json.loads(text.partition("FACTS ")[2].partition("\n")[0]))
    on_gpu = {"before": False, "seen": 1, "device": "cuda:0"}
    assert found == [on_gpu, {"before": False, "seen": 0, "device": "cpu"}, on_gpu]
