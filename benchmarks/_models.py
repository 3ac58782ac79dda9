"""Models and data of the benchmarks on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.projections(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.layers(self.norm(x))


class SmallGpt(nn.Module):
    """A language model of about ten million weights."""

    def __init__(self, vocabulary: int = 256, width: int = 320, depth: int = 8, heads: int = 8, length: int = 256):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]]))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """Three convolutions with a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layers(x) + self.shortcut(x))  # type: ignore[no-any-return]


def resnet50(classes: int = 1000) -> nn.Module:
    """Return a residual network of fifty layers for images of 224 by 224."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for index in range(depth):
            blocks.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
            inputs = 4 * width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def mlp() -> nn.Module:
    """Return a network so small that a GPU waits for Python."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, its data and its loss; `dtype` is what autocast computes in."""

    name: str
    make_model: Callable[[], nn.Module]
    make_data: Callable[[], Dataset[Any]]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    batches: int
    dtype: torch.dtype | None = None

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        with torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype is not None):
            return self.loss(model(inputs), targets)


class Samples(TensorDataset):
    """Tensors of which a batch is a slice, wherever its first sample falls, so that loading takes next to no time."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        first = indices[0] // len(indices) * len(indices)
        return self[first : first + len(indices)]


def tokens() -> Samples:
    text = torch.randint(0, 256, (64, 257), generator=torch.Generator().manual_seed(0))
    return Samples(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def images() -> Samples:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(256, 3, 224, 224, generator=generator)
    return Samples(pictures, torch.randint(0, 1000, (256,), generator=generator))


def points() -> Samples:
    generator = torch.Generator().manual_seed(0)
    return Samples(torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORKS = [
    Work("tiny MLP", mlp, points, nn.functional.cross_entropy, 64, 2000),
    Work("small GPT", SmallGpt, tokens, token_loss, 8, 200, torch.bfloat16),
    Work("ResNet-50", resnet50, images, nn.functional.cross_entropy, 64, 100, torch.bfloat16),
]
