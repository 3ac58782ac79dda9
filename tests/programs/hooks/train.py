"""A trial whose callbacks ask where training is, run the model, and read metrics as NumPy scalars."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch


class Watch(pytorch.PyTorchCallback):
    def __init__(self, trial):
        self.trial = trial
        self.context = trial.context

    def place(self):
        return self.context.current_train_batch(), self.context.current_train_epoch(), self.context.is_epoch_end()

    def on_training_epoch_end(self, epoch_idx):
        assert self.place() == (2 * epoch_idx + 1, epoch_idx, True)

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        assert avg_metrics["loss"].item() >= 0
        assert all(metrics["loss"].item() >= 0 for metrics in batch_metrics)

    def on_validation_start(self):
        assert self.place()[2]
        self.trial.images.update(1)

    def on_validation_end(self, metrics):
        assert metrics.keys() == {"validation_loss", "images"}, metrics
        assert metrics["images"].item() == 3  # two batches, and one of the hook
        self.predict()

    def on_checkpoint_save_start(self, checkpoint):
        self.predict()

    def on_trial_shutdown(self):
        assert self.place() == (3, 1, True)
        assert self.trial.norm.num_batches_tracked == 4  # those of training, not the ones of predict()

    def predict(self):
        """Run the model on an example, which neither counts for batch norm nor needs a graph."""
        assert not self.trial.model(torch.ones(1, 1)).requires_grad


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.norm = nn.BatchNorm1d(1)
        self.model = context.wrap_model(nn.Sequential(self.norm, nn.Linear(1, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        self.images = context.wrap_reducer(sum, "images", for_training=False)

    def build_callbacks(self):
        return {"watch": Watch(self)}

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
        assert self.context.is_epoch_end()
        self.images.update(1)
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}


if __name__ == "__main__":
    with pytorch.init(hparams={"lr": 0.1, "global_batch_size": 4}) as context:
        pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Epoch(2), validation_period=pytorch.Epoch(1), checkpoint_period=pytorch.Epoch(1)
        )
