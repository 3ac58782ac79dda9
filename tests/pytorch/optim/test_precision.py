"""Mixed precision with use_amp, on a CPU; and that kinds of mixed precision do not mix."""

from __future__ import annotations

import collections
import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from determined import errors, pytorch
from trials import LineTrial, assert_resumes_exactly, fit, state_in, train_and_save, trainer

HALF = [torch.float16, torch.bfloat16]


def variant(base: type[LineTrial], **attributes: Any) -> type[LineTrial]:
    return type("Variant", (base,), attributes)


class Spy(nn.Module):
    """Remembers what its forward saw, and returns what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.seen: list[Any] = []
        self.fail = False

    def forward(self, x: Tensor, shape: str = "tensor") -> Any:
        output = self.linear(x)
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.seen.append((autocast, output.dtype))
        if self.fail:
            raise ArithmeticError("as the test asked")
        return _SHAPES[shape](output)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Named(collections.OrderedDict[str, Any]):
    """Stands for the output classes of model libraries."""


_SHAPES: dict[str, Any] = {
    "tensor": lambda output: output,
    "dict": lambda output: {"out": output, "inner": [output, (output,)]},
    "named": lambda output: Pair(output, output),
    "mapping": lambda output: Named(out=output),
    "double": lambda output: output.double(),
    "indices": lambda output: output.argmax(),
    "plain": lambda output: "no tensor",
}


class AmpTrial(LineTrial):
    """Trains under use_amp; `self.raw` is the model as it was made."""

    dtype: torch.dtype | None = torch.float16
    wrap_first = False

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        if not self.wrap_first:
            context.experimental.use_amp(dtype=self.dtype)
        super().__init__(context)
        if self.wrap_first:
            context.experimental.use_amp(dtype=self.dtype)

    def make_model(self) -> nn.Module:
        return Spy()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 0.01  # so that fp16 overflows only where a test wants it


# use_amp


@pytest.mark.parametrize("wrap_first", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_forward_runs_under_autocast(dtype: torch.dtype, wrap_first: bool) -> None:
    trial = fit(variant(AmpTrial, dtype=dtype, wrap_first=wrap_first))
    assert set(trial.model.seen) == {(dtype, dtype)}


def test_on_a_cpu_the_default_is_bfloat16() -> None:
    trial = fit(variant(AmpTrial, dtype=None))
    assert set(trial.model.seen) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("shape", ["tensor", "dict", "named", "mapping"])
@pytest.mark.parametrize("dtype", HALF)
def test_outputs_come_back_in_fp32(dtype: torch.dtype, shape: str) -> None:
    with trainer(variant(AmpTrial, dtype=dtype)) as (_, trial):
        output = trial.model(torch.ones(2, 4), shape)
    assert {tensor.dtype for tensor in tensors_in(output)} == {torch.float32}
    assert type(output) is type(_SHAPES[shape](torch.ones(1)))


def tensors_in(data: Any) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    parts = data.values() if isinstance(data, dict) else data
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize(("shape", "dtype"), [("double", torch.float64), ("indices", torch.int64)])
def test_outputs_that_are_not_half_stay_as_they_are(shape: str, dtype: torch.dtype) -> None:
    with trainer(AmpTrial) as (_, trial):
        assert trial.model(torch.ones(2, 4), shape).dtype == dtype


def test_outputs_without_tensors_stay_as_they_are() -> None:
    with trainer(AmpTrial) as (_, trial):
        assert trial.model(torch.ones(2, 4), "plain") == "no tensor"


def test_autocast_ends_with_the_forward() -> None:
    with trainer(AmpTrial) as (_, trial):
        trial.model(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")


def test_an_exception_in_forward_leaves_autocast_closed() -> None:
    with trainer(AmpTrial) as (_, trial):
        trial.model.fail = True
        with pytest.raises(ArithmeticError):
            trial.model(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")


def test_an_exception_in_an_earlier_hook_reaches_the_caller_alone() -> None:
    def refuse(module: nn.Module, args: Any) -> None:
        raise ArithmeticError("as the test asked")

    with trainer(AmpTrial) as (_, trial):
        trial.model.register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(ArithmeticError):
            trial.model(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")


def test_a_deep_copy_of_the_model_runs_under_autocast_by_itself() -> None:
    with trainer(AmpTrial) as (_, trial):
        twin = copy.deepcopy(trial.model)
        with torch.no_grad():
            twin.linear.weight.zero_()
        x = torch.ones(2, 4)
        assert torch.equal(twin(x), twin.linear.bias.half().float().expand(2, 1))
        assert not torch.equal(trial.model(x), twin(x))
        assert set(twin.seen) == {(torch.float16, torch.float16)}


def test_a_copy_made_within_forward_leaves_autocast_closed() -> None:
    class CopiesItself(Spy):
        def forward(self, x: Tensor, shape: str = "tensor") -> Any:
            return copy.deepcopy(self.linear)(x)

    with trainer(variant(AmpTrial, make_model=lambda self: CopiesItself())) as (_, trial):
        trial.model(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")


def test_wrapped_models_may_contain_wrapped_models() -> None:
    class Nested(AmpTrial):
        def make_model(self) -> nn.Module:
            return nn.Sequential(self.context.wrap_model(Spy()), self.context.wrap_model(nn.Linear(1, 1)))

    trial = fit(Nested)
    assert set(trial.model[0].seen) == {(torch.float16, torch.float16)}
    assert not torch.is_autocast_enabled("cpu")


def test_validation_runs_under_autocast_too() -> None:
    trial = fit(AmpTrial, max_length=pytorch.Batch(1))
    assert len(trial.model.seen) == 3  # one batch of training, two of validation


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_other_formats_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=rf"{dtype}.*torch\.float16 or torch\.bfloat16"):
        fit(variant(AmpTrial, dtype=dtype))


# Loss scaling


class Exploding(AmpTrial):
    """Has infinite gradients on the batches of `explode_on`, and keeps the weights after each batch."""

    explode_on: tuple[int, ...] = ()

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.weights: list[Tensor] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss * float("inf") if batch_idx in self.explode_on else loss)
        self.context.step_optimizer(self.optimizer)
        self.weights.append(self.model.linear.weight.detach().clone())
        return {"loss": loss}


def test_infinite_gradients_skip_the_step() -> None:
    trial = fit(variant(Exploding, explode_on=(2,)))
    moved = [not torch.equal(after, before) for before, after in zip(trial.weights, trial.weights[1:], strict=False)]
    assert moved == [True, False, True, True, True]


@pytest.mark.parametrize(("explode_on", "scale"), [((), 2.0**16), ((2,), 2.0**15), ((0, 3), 2.0**14)])
def test_infinite_gradients_halve_the_scale(explode_on: tuple[int, ...], scale: float) -> None:
    state = state_in(train_and_save(variant(Exploding, explode_on=explode_on), 5))
    assert state["scaler_state_dict"]["scale"] == scale


def test_infinite_gradients_are_not_carried_into_the_next_batch() -> None:
    trial = fit(variant(Exploding, explode_on=(2,)))
    assert all(weights.isfinite().all() for weights in trial.weights)


class TwoOptimizers(AmpTrial):
    """Steps two optimizers a batch, one of them twice."""

    steps = (0, 1)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.other = context.wrap_model(nn.Linear(4, 1))
        other = context.wrap_optimizer(torch.optim.SGD(self.other.parameters(), lr=0.01))
        self.both = [self.optimizer, other]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        for number in self.steps:
            loss = self.loss(batch) + 0.01 * nn.functional.mse_loss(self.other(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.both[number])
        return {"loss": loss}


def test_the_scaler_adapts_once_a_batch_after_the_steps_of_all_optimizers() -> None:
    state = state_in(train_and_save(TwoOptimizers, 5))
    assert state["scaler_state_dict"]["_growth_tracker"] == 5


def test_an_optimizer_may_step_twice_in_a_batch() -> None:
    trial = fit(variant(TwoOptimizers, steps=(0, 1, 0)))
    assert trial.optimizer.state_dict()["state"][0]["step"] == 12  # two steps in each of six batches


def test_the_scaler_rests_on_batches_without_a_step() -> None:
    state = state_in(train_and_save(AmpTrial, 6, aggregation_frequency=3))
    assert state["scaler_state_dict"]["_growth_tracker"] == 2


def test_bfloat16_has_no_scaler() -> None:
    assert "scaler_state_dict" not in state_in(train_and_save(variant(AmpTrial, dtype=torch.bfloat16), 2))


class Clipped(AmpTrial):
    """Keeps the norms that clipping saw."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.norms: list[float] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return {"loss": loss}

    def clip(self, parameters: list[nn.Parameter]) -> None:
        self.norms.append(nn.utils.clip_grad_norm_(parameters, 1.0).item())


def test_clipping_sees_unscaled_gradients() -> None:
    scaled, unscaled = fit(Clipped), fit(variant(Clipped, dtype=torch.bfloat16))
    assert scaled.norms[0] == pytest.approx(unscaled.norms[0], rel=0.02)


# One kind at a time


def use_scaler(context: pytorch.PyTorchTrialContext, model: Any, optimizer: Any) -> None:
    context.wrap_scaler(torch.amp.GradScaler("cpu"))


def use_amp(context: pytorch.PyTorchTrialContext, model: Any, optimizer: Any) -> None:
    context.experimental.use_amp()


def use_apex(context: pytorch.PyTorchTrialContext, model: Any, optimizer: Any) -> None:
    context.configure_apex_amp(model, optimizer, opt_level="O0")


KINDS = [use_scaler, use_amp, use_apex]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", [use_amp, use_apex])
def test_a_trial_has_one_kind_of_mixed_precision_set_once(first: Any, second: Any) -> None:
    with pytorch.init() as context:
        model = nn.Linear(1, 1)
        optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if first is use_scaler:
            first(context, model, optimizer)
        context.wrap_model(model)
        if first is not use_scaler:
            first(context, model, optimizer)
        with pytest.raises(errors.InvalidExperimentException, match="one kind of mixed precision"):
            second(context, model, optimizer)


@pytest.mark.parametrize("first", [use_scaler, use_amp])
def test_a_scaler_of_the_trial_does_not_go_with_another_kind(first: Any) -> None:
    with pytorch.init() as context:
        first(context, None, None)
        with pytest.raises(errors.InvalidExperimentException, match="one kind of mixed precision"):
            context.wrap_scaler(torch.amp.GradScaler("cpu"))


# Resume


@pytest.mark.parametrize("aggregation", [1, 3])
@pytest.mark.parametrize("dtype", HALF)
def test_use_amp_resumes_exactly(dtype: torch.dtype, aggregation: int) -> None:
    kind = variant(Exploding, dtype=dtype, explode_on=(1,) if dtype == torch.float16 else ())
    assert_resumes_exactly(kind, 4, 9, aggregation_frequency=aggregation)
