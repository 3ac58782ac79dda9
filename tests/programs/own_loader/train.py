"""A trial with a loader of its own, which it shards and skips by itself, and which fails once."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from determined import pytorch
from determined.pytorch import samplers


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        context.experimental.disable_dataset_reproducibility_checks()
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        self.data = TensorDataset(torch.arange(12.0).reshape(12, 1))

    def build_training_data_loader(self) -> DataLoader:
        batches = BatchSampler(SequentialSampler(self.data), self.context.get_per_slot_batch_size(), drop_last=False)
        mine = samplers.adapt_batch_sampler(
            batches,
            repeat=True,
            skip=self.context.get_initial_batch(),
            num_replicas=self.context.distributed.get_size(),
            rank=self.context.distributed.get_rank(),
        )
        return DataLoader(self.data, batch_sampler=mine)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=4)

    def loss(self, batch):
        x = batch[0] / 12
        return nn.functional.mse_loss(self.model(x), 2 * x)

    def train_batch(self, batch, epoch_idx, batch_idx):
        assert batch[0].flatten().tolist() == [4 * (batch_idx % 3) + i for i in range(4)]
        if batch_idx == 4 and self.context.get_initial_batch() == 0:
            raise ConnectionError("the first run fails here")
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.loss(batch)}


def train() -> None:
    with pytorch.init(hparams={"lr": 0.1, "global_batch_size": 4}) as context:
        pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Batch(8), checkpoint_period=pytorch.Batch(1), latest_checkpoint="latest"
        )


if __name__ == "__main__":
    try:
        train()
    except ConnectionError:
        train()
    else:
        raise AssertionError("the first run did not fail")
