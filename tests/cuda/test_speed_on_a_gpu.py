"""What makes training on a GPU fast, and must not make it wrong: batches that travel ahead, no waiting, compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from determined import pytorch
from determined.pytorch import Batch
from determined.pytorch._data.prefetch import MAX_BATCHES_AHEAD, MIN_BYTES, Prefetch
from trials import LineTrial, fit

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:TensorFloat32 tensor cores"),
]


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Any:
    yield
    torch.cuda.set_sync_debug_mode("default")


NUMBERS = 2**20
"""Numbers in a sample: enough for its batch to travel by itself."""


class Constants(Dataset[torch.Tensor]):
    """Sample `i` is full of the number `i`."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((NUMBERS,), float(index))


class Tagged:
    """A batch of a type of the user's."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> Tagged:
        return Tagged(self.values.to(device))


class ConstantTrial(LineTrial):
    """Reads each batch long after it came, when later ones are on their way already."""

    pin = False
    prefetches = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        if not self.prefetches:
            context.experimental.disable_prefetch()
        super().__init__(context)
        self.sums: list[torch.Tensor] = []

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Constants(), batch_size=1, pin_memory=self.pin, collate_fn=self.collate)

    def collate(self, samples: list[torch.Tensor]) -> Any:
        return {"values": torch.stack(samples), "more": (samples[0].numpy(), ["a name", 3])}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        torch.cuda._sleep(20_000_000)
        values, array = batch["values"], batch["more"][0]
        self.sums.append(values.mean() + array.mean())
        loss = self.model(values[:, :4]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class PinnedTrial(ConstantTrial):
    pin = True


class PlainTrial(ConstantTrial):
    prefetches = False


@pytest.mark.parametrize("kind", [ConstantTrial, PinnedTrial, PlainTrial])
def test_every_batch_arrives_whole_and_stays_until_it_was_read(kind: type[ConstantTrial]) -> None:
    trial = fit(kind, max_length=Batch(30))
    assert [value.item() for value in trial.sums] == [2.0 * index for index in range(30)]


def test_memory_is_that_of_few_batches() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fit(ConstantTrial, max_length=Batch(30))
    batch = 2 * NUMBERS * 4  # a tensor and an array
    assert torch.cuda.max_memory_allocated() - before < (MAX_BATCHES_AHEAD + 3) * batch


def prefetch() -> Prefetch:
    return Prefetch(lambda batch: pytorch.to_device(batch, torch.device("cuda")), torch.device("cuda", 0))


def test_batch_with_a_type_of_its_own_goes_the_plain_way() -> None:
    moved = prefetch()([Tagged(torch.ones(MIN_BYTES)), torch.ones(MIN_BYTES)])
    assert moved[0].values.is_cuda
    assert moved[1].is_cuda


def test_structure_is_kept() -> None:
    batch = {"a": [torch.ones(MIN_BYTES), (torch.zeros(3), "name", 4)], "b": None}
    moved = prefetch()(batch)
    assert moved["a"][1][1:] == ("name", 4)
    assert moved["b"] is None
    assert moved["a"][0].is_cuda
    assert moved["a"][1][0].is_cuda


class WatchedTrial(ConstantTrial):
    """Lets nothing wait for the GPU within a window, nor within a validation."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Constants(), batch_size=1, collate_fn=self.collate)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx in (4, 19):
            torch.cuda.set_sync_debug_mode("error" if batch_idx == 4 else "default")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx in (2, 38):
            torch.cuda.set_sync_debug_mode("error" if batch_idx == 2 else "default")
        return {"validation_loss": batch["values"].mean()}


def test_nothing_waits_for_the_gpu_between_reports() -> None:
    trial = fit(WatchedTrial, max_length=Batch(20), reporting_period=Batch(20))
    assert len(trial.sums) == 20


class CompiledTrial(LineTrial):
    dtype: torch.dtype | None = None
    compiles = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        if self.compiles:
            context.experimental.use_compile()
        if self.dtype is not None:
            context.experimental.use_amp(self.dtype)
        super().__init__(context)

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1))


class CompiledHalfTrial(CompiledTrial):
    dtype = torch.bfloat16


@pytest.mark.parametrize("kind", [CompiledTrial, CompiledHalfTrial])
def test_compiled_model_trains_as_an_eager_one(kind: type[CompiledTrial]) -> None:
    compiled = fit(kind, max_length=Batch(8))
    eager = fit(type("Eager", (kind,), {"compiles": False}), max_length=Batch(8))
    for one, other in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
