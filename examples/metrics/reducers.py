"""Metrics that are not averages of batches."""

from __future__ import annotations

import torch

from determined import pytorch


def ninetieth_percentile(losses: list[torch.Tensor]) -> float:
    """Return the loss that only every tenth image exceeds.

    A function is the simplest reducer: it gets whatever `update` was given, of all batches of all processes.
    """
    return torch.quantile(torch.cat(losses), 0.9).item()


class ConfusionMatrix(pytorch.MetricReducer):
    """Counts how often each true class (row) was taken for each class (column).

    Use a class when the values would be too many to keep: this one keeps a single matrix.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.of_all_processes = torch.zeros(classes, classes, dtype=torch.long)
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(self.classes, self.classes, dtype=torch.long)

    def update(self, predicted: torch.Tensor, true: torch.Tensor) -> None:
        cells = (true * self.classes + predicted).cpu()
        self.counts += torch.bincount(cells, minlength=self.classes**2).view_as(self.counts)

    def per_slot_reduce(self) -> torch.Tensor:
        """Return what this process found."""
        return self.counts

    def cross_slot_reduce(self, per_slot_metrics: list[torch.Tensor]) -> dict[str, float]:
        """Return the metrics of what all processes found."""
        counts = self.of_all_processes = torch.stack(per_slot_metrics).sum(dim=0)
        recall = counts.diag() / counts.sum(dim=1).clamp(min=1)
        return {
            "accuracy": (counts.diag().sum() / counts.sum()).item(),
            "worst_class_recall": recall.min().item(),
        }
