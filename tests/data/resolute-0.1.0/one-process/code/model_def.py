"""The program that wrote the checkpoints beside it."""

import torch

from determined import pytorch


class Counter(pytorch.PyTorchCallback):
    def __init__(self):
        self.windows = 0

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        self.windows += 1

    def state_dict(self):
        return {"windows": self.windows}

    def load_state_dict(self, state):
        self.windows = state["windows"]


class Trial(pytorch.PyTorchTrial):
    """Every part of a run's state matters here: noise, a scaler, a scheduler, a reducer, a parameter without a model."""

    stops_after = None

    def __init__(self, context):
        self.context = context
        self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        self.model = context.wrap_model(torch.nn.Linear(1, 3))
        self.offset = torch.nn.Parameter(torch.zeros(3))
        groups = [{"params": self.model.parameters()}, {"params": [self.offset]}]
        self.opt = context.wrap_optimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        schedule = torch.optim.lr_scheduler.StepLR(self.opt, 3, gamma=0.5)
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.largest = context.wrap_reducer(max, "largest", for_validation=False)
        self.counter = Counter()
        self.log = []

    def build_callbacks(self):
        return {"counter": self.counter}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.arange(20.0).reshape(-1, 1), batch_size=4, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.arange(4.0).reshape(-1, 1), batch_size=4)

    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == self.stops_after:
            raise pytorch.ShouldExit
        noise = torch.rand(1)
        self.log.append([epoch_idx, batch_idx, [int(one) for one in batch.flatten()], noise.item()])
        for value in batch.flatten().tolist():
            self.largest.update(value)
        loss = (self.model(batch / 20 + noise) + self.offset).square().mean()
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.opt, scaler=self.scaler)
        if (batch_idx + 1) % 2 == 0:
            self.scaler.update()
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.model(batch / 20).square().mean()}
