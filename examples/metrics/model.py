"""A perceptron for 8x8 digits, and the trial that trains and measures it."""

from __future__ import annotations

import sklearn.datasets
import sklearn.model_selection
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAUROC

from callbacks import EarlyStopping, LowerLearningRate, Pictures
from determined import pytorch
from reducers import ConfusionMatrix, ninetieth_percentile

Batch = tuple[torch.Tensor, torch.Tensor]


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return three quarters of the digits for training and the rest for validation."""
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    indices = range(len(labels))
    training, validation = sklearn.model_selection.train_test_split(indices, random_state=0, stratify=labels)
    return (
        TensorDataset(images[training], labels[training]),
        TensorDataset(images[validation], labels[validation]),
    )


class MetricsTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.training_data, self.validation_data = load_digits()
        width = context.get_hparam("width")
        self.model = context.wrap_model(
            nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        )
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("learning_rate"), momentum=0.9)
        )
        # Stepped by a callback, which sees the metric; see build_callbacks.
        self.scheduler = context.wrap_lr_scheduler(
            ReduceLROnPlateau(self.optimizer, factor=0.3, patience=2),
            step_mode=pytorch.LRScheduler.StepMode.MANUAL_STEP,
        )
        self.wrap_reducers()
        self.pictures = Pictures(context, self.confusion)

    def wrap_reducers(self) -> None:
        # A function gives one metric, so it needs a name.
        self.loss_percentile = self.context.wrap_reducer(
            ninetieth_percentile, name="validation_loss_90th_percentile", for_training=False
        )
        # This class gives several metrics, in a dict with their names. It measures training as well.
        self.confusion = self.context.wrap_reducer(ConfusionMatrix(classes=10))
        self.auroc = self.context.wrap_reducer(
            MulticlassAUROC(num_classes=10), name="validation_auroc", for_training=False
        )

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {
            "pictures": self.pictures,
            "lower_learning_rate": LowerLearningRate(self.scheduler),
            "early_stopping": EarlyStopping(self.context, patience=self.context.get_hparam("patience")),
        }

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.training_data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_data, batch_size=50)

    def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
        # These two come from evaluate_batch; the wrapped reducers look after themselves.
        return {"validation_loss": pytorch.Reducer.AVG, "misread": pytorch.Reducer.SUM}

    def train_batch(self, batch: Batch, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        loss = nn.functional.cross_entropy(scores, labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.confusion.update(scores.argmax(dim=1), labels)
        return {"loss": loss}

    def evaluate_batch(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        predicted = scores.argmax(dim=1)
        self.loss_percentile.update(losses.cpu())
        self.confusion.update(predicted, labels)
        self.auroc.update(scores.softmax(dim=1), labels)
        self.pictures.add_misread(images[predicted != labels])
        return {"validation_loss": losses.mean(), "misread": (predicted != labels).sum()}
