"""A trial that keeps paths, enums, namespaces and functions in its checkpoints, and is interrupted once."""

import argparse
import collections
import enum
import pathlib

import torch
from torch import nn
from torch.utils.data import TensorDataset

import determined as det
from determined import pytorch


class Phase(enum.Enum):
    WARMUP = 1
    FULL = 2


class Options(dict):
    """Entries as attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def decay(step):
    return 0.9**step


class Head(nn.Linear):
    phase = Phase.WARMUP

    def get_extra_state(self):
        return self.phase

    def set_extra_state(self, state):
        self.phase = state


class DecayLR(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self.shape, self.options = decay, Options(floor=0.01)
        super().__init__(optimizer)

    def get_lr(self):
        return [max(rate * self.shape(self.last_epoch), self.options.floor) for rate in self.base_lrs]


class History(pytorch.PyTorchCallback):
    def __init__(self, args):
        self.args = args
        self.recent = collections.deque(maxlen=3)
        self.counts = collections.defaultdict(int)
        self.best = None
        self.loaded = None

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        self.recent.append(len(batch_metrics))
        self.counts["workloads"] += 1
        self.best = pathlib.Path("best") / str(self.counts["workloads"])

    def state_dict(self):
        return {"recent": self.recent, "counts": self.counts, "best": self.best}

    def load_state_dict(self, state_dict):
        self.recent, self.counts, self.best = state_dict["recent"], state_dict["counts"], state_dict["best"]

    def on_checkpoint_save_start(self, checkpoint):
        checkpoint["args"] = self.args
        checkpoint["phase_at_save"] = Phase.FULL
        checkpoint["decay"] = decay

    def on_checkpoint_load_start(self, checkpoint):
        self.loaded = checkpoint["args"], checkpoint["phase_at_save"], checkpoint["decay"]


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.args = argparse.Namespace(data=pathlib.Path("data"), layers=[1])
        self.history = History(self.args)
        self.model = context.wrap_model(Head(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        self.scheduler = DecayLR(self.optimizer)
        context.wrap_lr_scheduler(self.scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        info = det.get_cluster_info()
        self.fails = info is not None and info.latest_checkpoint is None

    def build_callbacks(self):
        return {"history": self.history}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.arange(8.0).reshape(8, 1) / 8
        return pytorch.DataLoader(TensorDataset(x, 2 * x), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, batch, epoch_idx, batch_idx):
        if self.fails and batch_idx == 4:
            raise RuntimeError("interrupted once")
        if batch_idx >= 4:
            assert self.history.loaded == (self.args, Phase.FULL, decay)
            assert self.model.phase is Phase.FULL
            assert type(self.scheduler.options) is Options
            assert self.scheduler.options.floor == 0.02
            assert self.history.recent.maxlen == 3
            assert self.history.counts["missing"] == 0
            assert isinstance(self.history.best, pathlib.Path)
        self.model.phase = Phase.FULL
        self.scheduler.options["floor"] = 0.02
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}


def train(batches, latest_checkpoint=None):
    with pytorch.init(hparams={"lr": 0.1, "global_batch_size": 4}) as context:
        pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Batch(batches), latest_checkpoint=latest_checkpoint
        )


if __name__ == "__main__":
    train(4)
    train(6, "latest")
