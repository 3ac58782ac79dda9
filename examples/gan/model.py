"""A generator and a discriminator of points in the plane, and the trial that trains them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ring
from determined import pytorch

LATENT = 16


def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def steepness(scores: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the mean squared slope of the scores. A flat discriminator keeps the generator on all modes."""
    (slopes,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
    return slopes.square().sum(dim=1).mean()


class GanTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")
        self.generator = context.wrap_model(perceptron(LATENT, width, outputs=2))
        self.discriminator = context.wrap_model(perceptron(2, width, outputs=1))
        self.generator_optimizer = self.wrapped_adam(self.generator)
        self.discriminator_optimizer = self.wrapped_adam(self.discriminator)
        self.loss = nn.BCEWithLogitsLoss()

    def wrapped_adam(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer for the model, with a learning rate that falls by a few percent each epoch."""
        optimizer = self.context.wrap_optimizer(
            torch.optim.Adam(model.parameters(), lr=self.context.get_hparam("learning_rate"), betas=(0.5, 0.99))
        )
        self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.93),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        return optimizer

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = TensorDataset(ring.sample(25_600, seed=1))
        return pytorch.DataLoader(points, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        # Validation needs no real points, only the same noise every time.
        noise = torch.randn(2_000, LATENT, generator=torch.Generator().manual_seed(2))
        return pytorch.DataLoader(TensorDataset(noise), batch_size=500)

    def train_batch(self, batch: list[torch.Tensor], epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        (real,) = batch
        noise = torch.randn(len(real), LATENT, device=self.context.device)
        fake = self.generator(noise)
        discriminator_loss = self.train_discriminator(real, fake.detach())
        generator_loss = self.train_generator(fake)
        return {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}

    def train_discriminator(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        # The generator's backward pass of the batch before left gradients here, too.
        self.discriminator_optimizer.zero_grad()
        points = torch.cat([real, fake]).requires_grad_()
        scores = self.discriminator(points)
        is_real = torch.cat([torch.ones_like(scores[: len(real)]), torch.zeros_like(scores[len(real) :])])
        loss = self.loss(scores, is_real) + self.context.get_hparam("penalty") * steepness(scores, points)
        self.context.backward(loss)
        self.context.step_optimizer(self.discriminator_optimizer)
        return loss

    def train_generator(self, fake: torch.Tensor) -> torch.Tensor:
        scores = self.discriminator(fake)
        loss = self.loss(scores, torch.ones_like(scores))
        self.context.backward(loss)
        self.context.step_optimizer(self.generator_optimizer)
        return loss

    def evaluate_full_dataset(self, data_loader: DataLoader) -> dict[str, float]:
        # Which Gaussians are covered shows only over all points together, so not batch by batch.
        points = torch.cat([self.generator(self.context.to_device(noise)) for (noise,) in data_loader])
        self.context.get_tensorboard_writer().add_image(
            "generated points", ring.picture(points), self.context.current_train_batch(), dataformats="HW"
        )
        return ring.resemblance(points)
