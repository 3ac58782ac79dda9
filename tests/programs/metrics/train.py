"""A trial that returns whatever is at hand as metrics: lists, arrays, strings and nested mappings."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch


class Check(pytorch.PyTorchCallback):
    """Asserts what becomes of the metrics."""

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        assert abs(avg_metrics["lr"] - 0.1) < 1e-9
        assert avg_metrics["histogram"] == 2.0
        assert avg_metrics["phase"] is None
        assert avg_metrics["losses"] is None
        assert batch_metrics[0]["phase"] == "warm-up"

    def on_validation_end(self, metrics):
        assert metrics["per_class"] == 0.5
        assert metrics["label"] is None
        assert metrics["details"] is None
        assert metrics["scores"] is None


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        self.scheduler = context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def build_callbacks(self):
        return {"check": Check()}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.arange(8.0).reshape(8, 1) / 8
        return pytorch.DataLoader(TensorDataset(x, 2 * x), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {
            "loss": loss,
            "lr": self.scheduler.get_last_lr(),
            "histogram": np.array([1, 2, 3]),
            "phase": "warm-up",
            "losses": {"mse": loss, "nested": {"other": loss * 2}},
        }

    def evaluate_batch(self, batch, batch_idx):
        return {
            "validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1]),
            "per_class": torch.tensor([0.25, 0.75]),
            "label": "cat",
            "details": {"batch": {"index": batch_idx}},
            "scores": torch.ones(batch_idx + 1),
        }


if __name__ == "__main__":
    with pytorch.init(hparams={"lr": 0.1, "global_batch_size": 4}) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Epoch(2), validation_period=pytorch.Epoch(1))
