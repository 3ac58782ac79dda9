"""What the tables of mistakes are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import trials
from determined import pytorch
from determined.pytorch import PyTorchTrialContext

Mistake = Callable[[], object]

_trained: list[int] = []


class Mistakes(list[Any]):
    """Rows for `pytest.mark.parametrize`; used as a decorator of the functions that make the mistakes."""

    def __call__(self, error: type[Exception], *words: str, trains: bool = False) -> Callable[[Mistake], Mistake]:
        """Add a mistake and what is said about it; `trains` says that only training can show it."""

        def add(make: Mistake) -> Mistake:
            self.append(pytest.param(make, error, words, trains, id=make.__name__))
            return make

        return add


def check(make: Mistake, error: type[Exception], words: tuple[str, ...], trains: bool) -> None:
    """Make a mistake and look at what comes of it."""
    _trained.clear()
    with pytest.raises(error) as caught:
        make()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert trains or not _trained, "it could have been refused before training"


class LineTrial(trials.LineTrial):
    """Counts the batches that it trained to their end."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        _trained.append(batch_idx)
        return metrics


def variant(**members: Any) -> type[LineTrial]:
    """Return a trial with some members replaced."""
    return type("Variant", (LineTrial,), members)


def with_setup(set_up: Callable[[Any, PyTorchTrialContext], Any]) -> type[LineTrial]:
    """Return a trial that does something more in its constructor."""

    def construct(self: Any, context: PyTorchTrialContext) -> None:
        LineTrial.__init__(self, context)
        set_up(self, context)

    return variant(__init__=construct)


def train(trial_class: type[pytorch.PyTorchTrial] = LineTrial, **arguments: Any) -> None:
    """Train a trial in a run of its own."""
    trials.fit(trial_class, **arguments)


def in_context(act: Callable[[PyTorchTrialContext], Any], **init: Any) -> None:
    """Do something with the context of a run."""
    with pytorch.init(**init) as context:
        act(context)


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, neither of them wrapped."""
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Unsized(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: int = 8) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from (trials.line_data(8)[i] for i in range(self.samples))
