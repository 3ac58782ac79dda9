"""How training data reaches a trial: not empty, and on its device."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler

from determined import pytorch
from trials import LineTrial, fit, line_data


@pytest.mark.parametrize(
    "empty",
    [
        lambda: pytorch.DataLoader(line_data(3), 4, drop_last=True),
        lambda: pytorch.DataLoader([], 4),
        lambda: pytorch.DataLoader(line_data(3), batch_sampler=BatchSampler(range(3), 4, True)),
        lambda: pytorch.DataLoader(line_data(3), 4, sampler=[]),
    ],
)
def test_empty_training_data_is_refused_before_training(empty: Any) -> None:
    started: list[str] = []

    class Trial(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return empty()

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            class Start(pytorch.PyTorchCallback):
                def on_training_start(self) -> None:
                    started.append("training")

            return {"start": Start()}

    with pytest.raises(ValueError, match="no batches"):
        fit(Trial)
    assert not started


class WrongLength(BatchSampler):
    """Yields 6 batches of 4 indices, whatever it says."""

    def __init__(self, length: int) -> None:
        super().__init__(range(24), 4, drop_last=False)
        self.length = length

    def __len__(self) -> int:
        return self.length


def trial_with(batch_sampler: Any) -> type[LineTrial]:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(line_data(24), batch_sampler=batch_sampler)

    return Trial


def test_batch_sampler_with_fewer_batches_than_its_length_is_refused_before_the_first_batch() -> None:
    with pytest.raises(ValueError, match=r"len\(WrongLength\) is 7, but an epoch of it has 6 batches.*__len__"):
        fit(trial_with(WrongLength(7)), max_length=pytorch.Batch(1))


def test_batch_sampler_with_more_batches_than_its_length_is_named(caplog: pytest.LogCaptureFixture) -> None:
    fit(trial_with(WrongLength(5)), max_length=pytorch.Epoch(2))
    (message,) = [message for message in caplog.messages if "WrongLength" in message]
    assert "len(WrongLength) is 5, but it yields more batches" in message


def test_endless_sampler_of_ours_has_epochs_of_its_length(caplog: pytest.LogCaptureFixture) -> None:
    batches = pytorch.samplers.RepeatBatchSampler(BatchSampler(range(24), 4, drop_last=False))
    assert fit(trial_with(batches), max_length=pytorch.Epoch(2)).seen[-1] == (1, 11)
    assert "yields more" not in caplog.text


class NumpyBatches(LineTrial):
    """Gets its batches as NumPy arrays and notes the type that reaches it."""

    automatic = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.types: list[type] = []
        if not self.automatic:
            context.experimental.disable_auto_to_device()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(8), 4, collate_fn=_as_arrays)

    build_validation_data_loader = build_training_data_loader

    def loss(self, batch: Any) -> torch.Tensor:
        self.types.append(type(batch["x"]))
        moved = self.context.to_device(batch)
        return super().loss((moved["x"], moved["y"]))


def _as_arrays(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    return {"x": np.stack([x.numpy() for x, _ in samples]), "y": np.stack([y.numpy() for _, y in samples])}


def test_batches_come_as_tensors_on_the_device() -> None:
    assert set(fit(NumpyBatches).types) == {torch.Tensor}


def test_batches_come_as_they_are_if_asked_for() -> None:
    class Trial(NumpyBatches):
        automatic = False

    assert set(fit(Trial).types) == {np.ndarray}


def test_processes_are_started_by_the_training_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # A loader worker that is forked while another thread starts a process inherits that one's pipes, and the
    # other thread then waits for as long as the worker lives.
    starters: list[threading.Thread] = []

    class Noting(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            starters.append(threading.current_thread())
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Noting)
    fit(checkpoint_period=pytorch.Batch(2))
    assert set(starters) == {threading.main_thread()}
