"""Compiled models: the same results, the same names in checkpoints, and a word about the first batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from determined import errors, pytorch
from determined.pytorch import Batch
from saving import save, state_in
from trials import LineTrial, assert_same, fit

compiled_models: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A compiler that changes nothing and counts what it is given."""
    compiled_models.append(graph)
    return graph


class PlainTrial(LineTrial):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


class CompiledTrial(PlainTrial):
    precision: torch.dtype | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_compile(backend=counting)
        if self.precision is not None:
            context.experimental.use_amp(self.precision)
        super().__init__(context)


class HalfTrial(CompiledTrial):
    precision = torch.bfloat16


class PlainHalfTrial(PlainTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.bfloat16)
        super().__init__(context)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    compiled_models.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "plain"), [(CompiledTrial, PlainTrial), (HalfTrial, PlainHalfTrial)])
def test_compiled_model_trains_as_a_plain_one(kind: type[LineTrial], plain: type[LineTrial]) -> None:
    trained = fit(kind, max_length=Batch(4), validation_period=Batch(2))
    assert compiled_models
    assert_same(
        trained.model.state_dict(), fit(plain, max_length=Batch(4), validation_period=Batch(2)).model.state_dict()
    )


def test_names_in_a_checkpoint_are_those_of_the_plain_model() -> None:
    (weights,) = state_in(save(CompiledTrial))["models_state_dict"]
    (expected,) = state_in(save(PlainTrial))["models_state_dict"]
    assert weights.keys() == expected.keys()


def test_compiled_model_resumes_exactly() -> None:
    whole = fit(CompiledTrial, max_length=Batch(5))
    checkpoint = save(CompiledTrial)
    resumed = fit(CompiledTrial, max_length=Batch(5), latest_checkpoint=checkpoint)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


def test_copy_of_a_compiled_model_computes_by_itself() -> None:
    trial = fit(CompiledTrial, max_length=Batch(2))
    copied = copy.deepcopy(trial.model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(copied(torch.ones(1, 4)), torch.zeros(1, 1))
        assert not torch.equal(trial.model(torch.ones(1, 4)), torch.zeros(1, 1))


def test_compiled_model_can_be_pickled() -> None:
    trial = fit(CompiledTrial, max_length=Batch(2))
    restored = pickle.loads(pickle.dumps(trial.model))
    assert_same(restored(torch.ones(1, 4)), trial.model(torch.ones(1, 4)))


def test_first_batch_is_said_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    fit(CompiledTrial, max_length=Batch(3))
    output = capsys.readouterr().out
    assert "The first batch compiles the models" in output
    assert "s with compiling." in output


def test_unknown_option_is_refused() -> None:
    class Trial(PlainTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            context.experimental.use_compile(speed="high")
            super().__init__(context)

    with pytest.raises(errors.InvalidExperimentException, match=r"use_compile\(speed=...\).*mode"):
        fit(Trial)
