"""From backward to step: whose optimizers, which gradients, in which order, and what outlives a batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cases import every
from determined import errors, pytorch
from trials import (
    SEED,
    LineTrial,
    assert_resumes_exactly,
    assert_same,
    fit,
    line_data,
    state_in,
    train_and_save,
    trainer,
)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def batches(count: int) -> Any:
    loader = pytorch.DataLoader(line_data(), batch_size=4, shuffle=True).get_data_loader(repeat=True, seed=5)
    return itertools.islice(loader, count)


def plain_model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Linear(4, 1)


# Which optimizers


def test_an_optimizer_that_is_not_wrapped_is_refused() -> None:
    with trainer() as (_, trial):
        stranger = torch.optim.SGD(trial.model.parameters(), lr=0.1)
        with pytest.raises(errors.InvalidExperimentException, match=r"not wrapped \(SGD\).*wrap_optimizer"):
            trial.context.step_optimizer(stranger)


def test_an_optimizer_steps_without_a_closure() -> None:
    calls: list[tuple[Any, ...]] = []

    class Listening(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))
            super().step(*args, **kwargs)

    class Trial(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.optimizer = context.wrap_optimizer(Listening(self.model.parameters(), lr=0.1))

    fit(Trial, max_length=pytorch.Batch(3))
    assert calls == [((), {})] * 3


def test_outside_of_a_run_an_optimizer_steps_at_once() -> None:
    with trainer() as (_, trial):
        before = trial.model.weight.clone()
        trial.context.backward(trial.loss(line_data(4).tensors))
        trial.context.step_optimizer(trial.optimizer)
        assert not torch.equal(trial.model.weight, before)


def test_outside_of_a_run_aggregation_has_no_meaning() -> None:
    with trainer(aggregation_frequency=2) as (_, trial), pytest.raises(errors.InternalException):
        trial.context.step_optimizer(trial.optimizer)


# Zeroing


class KeepsGradients(LineTrial):
    """Leaves gradients after a step; `zero_every` says on which batches it zeroes them by itself."""

    zero_every: int | None = None

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.zero_every and batch_idx % self.zero_every == 0:
            self.optimizer.zero_grad()
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
        return {"loss": loss}


@pytest.mark.parametrize("zero_every", [None, 1, 2])
def test_gradients_stay_where_asked(zero_every: int | None) -> None:
    trial = fit(type("Trial", (KeepsGradients,), {"zero_every": zero_every}))
    model = plain_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for number, (x, y) in enumerate(batches(6)):
        if zero_every and number % zero_every == 0:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert_same(trial.model.state_dict(), model.state_dict())
    assert_same(gradients_of(trial.model), gradients_of(model))


def test_gradients_are_dropped_after_a_step() -> None:
    assert gradients_of(fit(LineTrial).model) == [None, None]


@pytest.mark.parametrize("by_class", [True, False])
def test_an_optimizer_that_zeroes_gradients_in_its_own_way_does_so(by_class: bool) -> None:
    calls: list[bool] = []

    class Listening(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    class Trial(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            own = Listening(self.model.parameters(), lr=0.1)
            if not by_class:
                usual = torch.optim.SGD(self.model.parameters(), lr=0.1)
                usual.zero_grad = own.zero_grad  # type: ignore[method-assign]
                own = usual
            self.optimizer = context.wrap_optimizer(own)

    trial = fit(Trial, max_length=pytorch.Batch(3))
    assert calls == [True] * 3
    assert gradients_of(trial.model) == [None, None]


def test_only_the_gradients_of_the_optimizer_are_dropped() -> None:
    with trainer() as (_, trial):
        other = trial.context.wrap_model(nn.Linear(1, 1))
        trial.context.backward(other(trial.loss(line_data(4).tensors).reshape(1, 1)).sum())
        trial.context.step_optimizer(trial.optimizer)
        assert gradients_of(trial.model) == [None, None]
        assert all(gradient is not None for gradient in gradients_of(other))


def test_keeping_gradients_does_not_go_with_aggregation() -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"auto_zero_grads=False.*aggregation_frequency=3"):
        fit(KeepsGradients, {"aggregation_frequency": 3})


def test_keeping_gradients_does_not_go_with_batches_in_parts() -> None:
    with trainer(KeepsGradients) as (_, trial):
        trial.context.gradients.micro_batches = 2
        with pytest.raises(errors.InvalidExperimentException, match=r"trains in 2 parts.*get_per_slot_batch_size"):
            trial.train_batch(line_data(4).tensors, 0, 0)


# Clipping


class Clipping(LineTrial):
    """Notes what clipping was called with, on which batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        first, second = self.model.parameters()
        groups = [{"params": [second]}, {"params": [first]}]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(groups, lr=0.01))
        self.calls: list[tuple[int, Any]] = []
        self.gradients: list[Tensor] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=lambda given: self.clip(batch_idx, given))
        return {"loss": loss}

    def clip(self, batch_idx: int, parameters: Any) -> None:
        self.calls.append((batch_idx, parameters))
        self.gradients.append(self.model.weight.grad.clone())


def test_clipping_gets_the_parameters_of_the_optimizer() -> None:
    trial = fit(Clipping, max_length=pytorch.Batch(1))
    ((_, parameters),) = trial.calls
    expected = [trial.model.bias, trial.model.weight]
    assert isinstance(parameters, list)
    assert all(given is one for given, one in zip(parameters, expected, strict=True))


@pytest.mark.parametrize(("aggregation", "called_on"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3])])
def test_clipping_happens_before_each_step(aggregation: int, called_on: list[int]) -> None:
    trial = fit(Clipping, {"aggregation_frequency": aggregation})
    assert [batch_idx for batch_idx, _ in trial.calls] == called_on


def test_clipping_sees_the_average_of_aggregated_gradients() -> None:
    trial = fit(Clipping, {"aggregation_frequency": 3}, max_length=pytorch.Batch(3))
    model = plain_model()
    for x, y in batches(3):
        nn.functional.mse_loss(model(x), y).backward()
    assert torch.equal(trial.gradients[0], model.weight.grad / 3)


# Averaging


class Summed(LineTrial):
    average: bool | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(optimizer, average_aggregated_gradients=self.average)


def after_one_step(divisor: int) -> dict[str, Any]:
    model = plain_model()
    for x, y in batches(3):
        nn.functional.mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad /= divisor
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("average", "configured", "divisor"),
    [(None, None, 3), (True, None, 3), (False, None, 1), (None, False, 1), (None, True, 3), (True, False, 3)],
)
def test_averaging_is_the_default_and_the_program_wins_over_the_config(
    average: bool | None, configured: bool | None, divisor: int
) -> None:
    config = dict(SEED)
    if configured is not None:
        config["optimizations"] = {"average_aggregated_gradients": configured}
    init = {"aggregation_frequency": 3, "exp_conf": config}
    trial = fit(type("Trial", (Summed,), {"average": average}), init, max_length=pytorch.Batch(3))
    assert_same(trial.model.state_dict(), after_one_step(divisor))


def test_each_optimizer_has_its_own_averaging() -> None:
    class Both(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            sums = torch.optim.SGD([self.model.weight], lr=0.01)
            means = torch.optim.SGD([self.model.bias], lr=0.01)
            self.sums = context.wrap_optimizer(sums, average_aggregated_gradients=False)
            self.means = context.wrap_optimizer(means, average_aggregated_gradients=True)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.sums)
            self.context.step_optimizer(self.means)
            return {"loss": loss}

    trial = fit(Both, {"aggregation_frequency": 3}, max_length=pytorch.Batch(3))
    assert torch.equal(trial.model.weight, after_one_step(1)["weight"])
    assert torch.equal(trial.model.bias, after_one_step(3)["bias"])


class PartlyUsed(Clipping):
    """Has a layer that no loss reaches, and one that is frozen."""

    def make_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.idle = context.wrap_model(nn.Linear(2, 2))
        self.frozen = context.wrap_model(nn.Linear(2, 2).requires_grad_(False))
        parts = [*self.model.parameters(), *self.idle.parameters(), *self.frozen.parameters()]
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(parts, lr=0.1, weight_decay=0.1))
        self.at_start = [part.detach().clone() for part in parts[2:]]

    def clip(self, batch_idx: int, parameters: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize("aggregation", [1, 2])
def test_parameters_without_gradients_stay_as_they_are(aggregation: int) -> None:
    trial = fit(PartlyUsed, {"aggregation_frequency": aggregation})
    unused = [*trial.idle.parameters(), *trial.frozen.parameters()]
    assert_same([part.detach() for part in unused], trial.at_start)


def test_an_optimizer_may_step_without_any_gradient() -> None:
    class Idle(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.step_optimizer(self.optimizer)
            return {"loss": 0.0}

    assert_same(fit(Idle, {"aggregation_frequency": 2}).model.state_dict(), plain_model().state_dict())


# Sparse gradients


class Lookup(nn.Module):
    """Has a sparse gradient and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        self.linear = nn.Linear(3, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.linear(self.table(words)).mean()


WORDS = torch.tensor([[0, 1], [2, 3], [4, 4], [1, 5], [3, 0], [2, 2]])


class Sparse(LineTrial):
    average = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        self.model = context.wrap_model(Lookup())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.optimizer = context.wrap_optimizer(optimizer, average_aggregated_gradients=self.average)
        self.seen = []

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(WORDS), batch_size=1)

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch[0])

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 0.0}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("aggregation", [1, 3])
def test_sparse_gradients_aggregate_as_in_a_plain_loop(aggregation: int, average: bool) -> None:
    trial = fit(type("Trial", (Sparse,), {"average": average}), {"aggregation_frequency": aggregation})
    torch.manual_seed(11)
    model = Lookup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, words in enumerate(WORDS, start=1):
        model(words[None]).backward()
        if number % aggregation == 0:
            for parameter in model.parameters():
                parameter.grad = parameter.grad / (aggregation if average else 1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(trial.model.state_dict(), model.state_dict())


# Backward


def test_backward_keeps_the_graph_where_asked() -> None:
    with trainer() as (_, trial):
        loss = trial.loss(line_data(4).tensors)
        trial.context.backward(loss, retain_graph=True)
        trial.context.backward(loss)
        once = plain_model()
        nn.functional.mse_loss(once(line_data(4).tensors[0]), line_data(4).tensors[1]).backward()
        assert torch.equal(trial.model.weight.grad, once.weight.grad * 2)


def test_backward_takes_the_gradient_of_a_loss_with_many_values() -> None:
    with trainer() as (_, trial):
        outputs = trial.model(torch.ones(3, 4))
        trial.context.backward(outputs, gradient=torch.tensor([[1.0], [2.0], [3.0]]))
        assert torch.equal(trial.model.bias.grad, torch.tensor([6.0]))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")  # the advice of torch to avoid it
def test_backward_makes_a_graph_of_gradients_where_asked() -> None:
    with trainer() as (_, trial):
        trial.context.backward(trial.loss(line_data(4).tensors), create_graph=True)
        penalty = trial.model.weight.grad.square().sum()
        trial.model.weight.grad = None
        trial.context.backward(penalty)
        assert trial.model.weight.grad is not None


# What outlives a batch


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_gradients_between_aggregated_steps_are_saved(stop: int) -> None:
    state = state_in(train_and_save(LineTrial, stop, aggregation_frequency=3))
    model = plain_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for number, (x, y) in enumerate(batches(stop), start=1):
        nn.functional.mse_loss(model(x), y).backward()
        if number % 3 == 0:
            for parameter in model.parameters():
                parameter.grad /= 3
            optimizer.step()
            optimizer.zero_grad()
    expected = [gradient for gradient in gradients_of(model) if gradient is not None]
    assert_same(list(state.get("gradients", {}).values()), expected)


@pytest.mark.parametrize(
    ("kind", "stop"), every(5, itertools.product([LineTrial, Clipping, PartlyUsed, Sparse], [1, 4, 6, 7]))
)
def test_a_run_resumes_exactly_between_aggregated_steps(kind: Any, stop: int) -> None:
    assert_resumes_exactly(kind, stop, 9, aggregation_frequency=4)


def test_gradients_that_the_trial_keeps_are_restored() -> None:
    assert_resumes_exactly(KeepsGradients, 3, 6)
