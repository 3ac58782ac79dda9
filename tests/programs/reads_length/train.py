"""A trial that plans its learning rate over the length of the training, which it reads from the experiment config."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        config = context.get_experiment_config()
        assert config["resources"]["slots_per_trial"] == 1
        epochs = config["searcher"]["max_length"]["epochs"]
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=epochs),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.arange(8.0).reshape(8, 1) / 8
        return pytorch.DataLoader(TensorDataset(x, 2 * x), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}


if __name__ == "__main__":
    length = {"epochs": 2}
    config = {"searcher": {"metric": "validation_loss", "max_length": length}, "resources": {"slots_per_trial": 1}}
    with pytorch.init(hparams={"lr": 0.1, "global_batch_size": 4}, exp_conf=config) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Epoch(2), validation_period=pytorch.Epoch(1))
