"""Eight Gaussians on a ring: the data, and how well other points resemble it."""

from __future__ import annotations

import math

import torch

MODES = 8
RADIUS = 2.0
SPREAD = 0.1
VIEW = 1.25 * RADIUS  # half the side of the square that images show


def centres() -> torch.Tensor:
    """Return the middles of the Gaussians, shape (8, 2)."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


def sample(count: int, seed: int) -> torch.Tensor:
    """Return `count` points of the ring, shape (count, 2), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    modes = torch.randint(MODES, (count,), generator=generator)
    return centres()[modes] + SPREAD * torch.randn(count, 2, generator=generator)


def resemblance(points: torch.Tensor) -> dict[str, float]:
    """Return how many Gaussians the points cover, and which fraction lies within 3 deviations of one."""
    distance, nearest = torch.cdist(points, centres().to(points)).min(dim=1)
    close = distance < 3 * SPREAD
    counts = torch.bincount(nearest[close], minlength=MODES)
    # A Gaussian counts as covered when it gets at least a quarter of its fair share.
    covered = counts >= len(points) / MODES / 4
    return {"modes_covered": covered.sum().item(), "high_quality": close.float().mean().item()}


def picture(points: torch.Tensor, side: int = 160) -> torch.Tensor:
    """Return the points as dots on a white image, shape (side, side)."""
    pixels = ((points.cpu() / VIEW + 1) / 2 * side).long().clamp(0, side - 1)
    image = torch.ones(side, side)
    image[side - 1 - pixels[:, 1], pixels[:, 0]] = 0
    return image
