"""A script that imports what programs for older versions of Determined import besides the API, and uses it."""

import logging
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import determined as det
from determined import core, pytorch, util
from determined.common import set_logger
from determined.common.experimental import Determined
from determined.experimental import test_one_batch
from determined.horovod import hvd

HPARAMS = {"lr": 0.1, "global_batch_size": 4}

try:
    from determined.keras import TFKerasTrial
except ImportError:
    TFKerasTrial = None


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        self.largest = context.wrap_reducer(max, name="largest")
        assert isinstance(self.largest, pytorch._SimpleReducer)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.arange(8.0).reshape(8, 1) / 8
        return pytorch.DataLoader(TensorDataset(x, 2 * x), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, batch, epoch_idx, batch_idx):
        assert self.context._epoch_len == 2
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.largest.update(loss.item())
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.largest.update(loss.item())
        return {"validation_loss": loss}


def train() -> None:
    with pytorch.init(hparams=HPARAMS, exp_conf={}) as context:
        if context.distributed.size > 1:
            assert hvd.size() == context.distributed.size
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(2))


def report_to_core() -> None:
    core_context = core.init(distributed=core.DummyDistributedContext())
    core_context.start()
    core_context.train.report_training_metrics(steps_completed=3, metrics={"loss": 0.5})
    core_context.alert(title="done", description="the loop ended", level="info")
    try:
        with core_context.checkpoint.restore_path("5c1f24a6-7a2c-4d5c-9a71-d6f3a2a0f0c1"):
            raise AssertionError("there is no such checkpoint")
    except det.errors.CheckpointNotFound:
        pass
    core_context.close()


if __name__ == "__main__":
    set_logger(False)
    assert logging.getLogger().level == logging.INFO
    assert util.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    Determined()
    train()
    report_to_core()
    if det.get_cluster_info() is None:
        test_one_batch(trial_class=Trial, config={"hyperparameters": HPARAMS})
    wrapped = [sys.executable, "-m", "determined.launch.wrap_rank", "3", "echo", "hello"]
    assert subprocess.run(wrapped, capture_output=True, text=True, check=True).stdout == "[rank=3] hello\n"
