"""A convolutional network for 8x8 digits, and the trial that trains it."""

from __future__ import annotations

import sklearn.datasets
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

from determined import pytorch

Batch = tuple[torch.Tensor, torch.Tensor]


class DigitsNet(nn.Sequential):
    """Two convolutions and a linear layer: images of shape (N, 1, 8, 8) to scores of shape (N, 10)."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 4 * 4, 10),
        )


def load_digits() -> tuple[Dataset[Batch], Dataset[Batch]]:
    """Return the training images (1,437) and the validation images (360), always the same ones."""
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    training, validation = random_split(
        TensorDataset(images, labels), [1437, 360], generator=torch.Generator().manual_seed(0)
    )
    return training, validation


class DigitsTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.training_data, self.validation_data = load_digits()
        self.model = context.wrap_model(
            DigitsNet(channels=context.get_hparam("channels"), dropout=context.get_hparam("dropout"))
        )
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("learning_rate"))
        )
        self.loss = nn.CrossEntropyLoss()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.training_data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        # 60 divides 360: all batches weigh the same in the averages.
        return pytorch.DataLoader(self.validation_data, batch_size=60)

    def train_batch(self, batch: Batch, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = self.loss(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        return {
            "validation_loss": self.loss(scores, labels),
            "validation_accuracy": (scores.argmax(dim=1) == labels).float().mean(),
        }
