"""A transformer that predicts the next character, and the trial that trains it."""

from __future__ import annotations

import math

import torch
from torch import nn

import text
from determined import pytorch

Batch = tuple[torch.Tensor, torch.Tensor]


class CharTransformer(nn.Module):
    """Characters (N, length) to scores of the character that follows each of them (N, length, alphabet)."""

    def __init__(self, length: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.length = length
        self.characters = nn.Embedding(len(text.ALPHABET), width)
        self.positions = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=4 * width,
            dropout=dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, len(text.ALPHABET))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        length = characters.shape[1]
        positions = torch.arange(length, device=characters.device)
        future = nn.Transformer.generate_square_subsequent_mask(length, device=characters.device)
        hidden = self.characters(characters) + self.positions(positions)
        return self.scores(self.blocks(hidden, mask=future, is_causal=True))

    @torch.no_grad()
    def continue_text(self, prompt: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
        """Return the prompt, shape (1, length), with `count` characters drawn one after another."""
        self.eval()
        for _ in range(count):
            scores = self(prompt[:, -self.length :])[:, -1] / temperature
            prompt = torch.cat([prompt, torch.multinomial(scores.softmax(dim=-1), 1)], dim=1)
        return prompt


class CharTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.training_data, self.validation_data = text.split(context.get_hparam("length"))
        self.model = context.wrap_model(
            CharTransformer(
                length=context.get_hparam("length"),
                width=context.get_hparam("width"),
                layers=context.get_hparam("layers"),
                dropout=context.get_hparam("dropout"),
            )
        )
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("learning_rate"), weight_decay=0.1)
        )
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate_factor),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
        )

    def learning_rate_factor(self, step: int) -> float:
        """Rise in a line from near 0 to 1, then fall along a cosine to a tenth."""
        warmup, total = self.context.get_hparam("warmup_steps"), self.context.get_hparam("total_steps")
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(total - warmup, 1), 1.0)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(
            self.training_data,
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=True,
            drop_last=True,
        )

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_data, batch_size=self.context.get_per_slot_batch_size())

    def bits_per_character(self, batch: Batch) -> torch.Tensor:
        characters, following = batch
        scores = self.model(characters)
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten()) / math.log(2)

    def train_batch(self, batch: Batch, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.bits_per_character(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=clip_to_norm_1)
        return {"bits_per_character": loss}

    def evaluate_batch(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"validation_bits_per_character": self.bits_per_character(batch)}

    def sample(self, prompt: str, count: int) -> str:
        """Return the prompt and `count` characters that the model would have follow it."""
        start = self.context.to_device(text.encode(prompt)[None])
        return text.decode(self.model.continue_text(start, count, temperature=0.7)[0])


def clip_to_norm_1(parameters: list[torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
