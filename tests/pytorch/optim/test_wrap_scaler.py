"""A scaler that the trial uses by itself, as programs do that were written for a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from determined import errors, pytorch
from trials import LineTrial, assert_resumes_exactly, assert_same, fit, line_data, train_and_save


class ManualTrial(LineTrial):
    """Scales by itself, as programs do that bring their own scaler."""

    clip: Any = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3))
        super().__init__(context)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, y = batch
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(self.model(x).float(), y)
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, clip_grads=type(self).clip, scaler=self.scaler)
        if (batch_idx + 1) % self.context.aggregation_frequency == 0:
            self.scaler.update()
        return {"loss": loss}


def plain_manual_run(batches: int, aggregation: int, clip: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(11)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)
    loader = pytorch.DataLoader(line_data(), batch_size=4, shuffle=True).get_data_loader(repeat=True, seed=5)
    for number, (x, y) in zip(range(1, batches + 1), loader, strict=False):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        if number % aggregation:
            continue
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad /= aggregation
        if clip:
            clip(model.parameters())
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
    return model, scaler


def clip_norm(parameters: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.5)


@pytest.mark.parametrize("clip", [None, clip_norm])
@pytest.mark.parametrize("aggregation", [1, 3])
def test_a_scaler_of_the_trial_works_as_in_a_plain_loop(aggregation: int, clip: Any) -> None:
    init = {"aggregation_frequency": aggregation}
    trial = fit(
        type("Clipped", (ManualTrial,), {"clip": clip and staticmethod(clip)}), init, max_length=pytorch.Batch(20)
    )
    model, scaler = plain_manual_run(20, aggregation, clip)
    assert scaler.get_scale() < 2.0**30, "the test needs a scale that has moved"
    assert_same(trial.model.state_dict(), model.state_dict())
    assert_same(trial.scaler.state_dict(), scaler.state_dict())


def test_a_checkpoint_holds_the_scaler_of_the_trial() -> None:
    checkpoint = train_and_save(ManualTrial, 9)
    trial = fit(ManualTrial, max_length=pytorch.Batch(10), latest_checkpoint=checkpoint)
    whole = fit(ManualTrial, max_length=pytorch.Batch(10))
    assert_same(trial.scaler.state_dict(), whole.scaler.state_dict())


def test_wrap_scaler_returns_the_scaler_given() -> None:
    with pytorch.init() as context:
        scaler = torch.amp.GradScaler("cpu")
        assert context.wrap_scaler(scaler) is scaler


def test_wrap_scaler_after_a_model_is_refused() -> None:
    with pytorch.init() as context:
        context.wrap_model(nn.Linear(1, 1))
        with pytest.raises(errors.InvalidExperimentException, match="before any model"):
            context.wrap_scaler(torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("aggregation", [1, 3])
def test_wrap_scaler_resumes_exactly(aggregation: int) -> None:
    assert_resumes_exactly(ManualTrial, 7, 14, aggregation_frequency=aggregation)
