"""The optimization levels of configure_apex_amp, on a CPU, where half is bfloat16."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import every
from determined import errors, pytorch
from trials import LineTrial, assert_resumes_exactly, assert_same, fit, line_data, state_in, train_and_save, trainer

BF16 = torch.bfloat16
FP32 = torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class ApexTrial(LineTrial):
    """Trains at a level, with further settings."""

    settings: dict[str, Any] = {}
    clip: Any = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.model, self.optimizer = context.configure_apex_amp(self.model, self.optimizer, **self.settings)

    def make_model(self) -> nn.Module:
        return net()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=type(self).clip)
        return {"loss": loss}


def at(level: str, base: type[ApexTrial] = ApexTrial, clip: Any = None, **settings: Any) -> type[ApexTrial]:
    settings = {"opt_level": level, **settings}
    return type("AtLevel", (base,), {"settings": settings, "clip": clip and staticmethod(clip)})


def weights_of(trial: Any) -> list[Tensor]:
    return [parameter.detach() for parameter in trial.model.parameters()]


def optimized_by(trial: Any) -> list[Tensor]:
    return [parameter for group in trial.optimizer.param_groups for parameter in group["params"]]


def rounded_masters(trial: Any) -> list[Tensor]:
    return [m.detach().to(w.dtype) for m, w in zip(optimized_by(trial), weights_of(trial), strict=True)]


def distance(one: Any, other: Any) -> float:
    pairs = zip(weights_of(one), weights_of(other), strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


# What each level does to models and optimizers


@pytest.mark.parametrize(("level", "dtype"), [("O0", FP32), ("O1", FP32), ("O2", BF16), ("O3", BF16)])
def test_weights(level: str, dtype: torch.dtype) -> None:
    with trainer(at(level)) as (_, trial):
        assert {trial.model[0].weight.dtype, trial.model[3].bias.dtype} == {dtype}


@pytest.mark.parametrize(("level", "dtype"), [("O0", FP32), ("O1", FP32), ("O2", FP32), ("O3", BF16)])
def test_batch_norm(level: str, dtype: torch.dtype) -> None:
    with trainer(at(level)) as (_, trial):
        norm = trial.model[1]
        assert {norm.weight.dtype, norm.bias.dtype, norm.running_mean.dtype} == {dtype}
        assert norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(("keep", "dtype"), [(True, FP32), ("True", FP32), (False, BF16), ("False", BF16)])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_keep_batchnorm_fp32_overrides_the_level(level: str, keep: Any, dtype: torch.dtype) -> None:
    trial = fit(at(level, keep_batchnorm_fp32=keep))
    assert trial.model[1].weight.dtype == dtype


@pytest.mark.parametrize("level", LEVELS)
def test_forward_gives_fp32(level: str) -> None:
    with trainer(at(level)) as (_, trial):
        assert trial.model(torch.ones(2, 4)).dtype == FP32
        assert trial.model(input=torch.ones(2, 4)).dtype == FP32


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_cast_model_outputs_chooses_the_format_of_outputs(level: str) -> None:
    with trainer(at(level, cast_model_outputs=torch.float16)) as (_, trial):
        assert trial.model(torch.ones(2, 4)).dtype == torch.float16


def test_cast_model_type_chooses_the_half_format() -> None:
    with trainer(at("O2", cast_model_type=torch.float16)) as (_, trial):
        assert trial.model[0].weight.dtype == torch.float16


@pytest.mark.parametrize(("level", "active"), [("O0", False), ("O1", True), ("O2", False), ("O3", False)])
def test_autocast_is_for_the_first_level(level: str, active: bool) -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    asked: list[bool] = []
    fit(type("Trial", (at(level),), {"make_model": lambda self: Asks(4, 1)}))
    assert set(asked) == {active}


def test_patch_torch_functions_switches_autocast_off() -> None:
    assert_same(weights_of(fit(at("O1", patch_torch_functions=False))), weights_of(fit(at("O0"))))


def test_master_weights_are_fp32_copies_in_the_optimizer() -> None:
    trial = fit(at("O2"))
    masters = optimized_by(trial)
    assert {master.dtype for master in masters} == {FP32}
    assert all(master is not weight for master, weight in zip(masters, trial.model.parameters(), strict=True))
    assert_same(
        [master.detach().to(w.dtype) for master, w in zip(masters, weights_of(trial), strict=True)], weights_of(trial)
    )


def test_master_weights_hold_more_than_the_model() -> None:
    trial = fit(at("O2"))
    assert any(not torch.equal(m, w.float()) for m, w in zip(optimized_by(trial), weights_of(trial), strict=True))


@pytest.mark.parametrize(("level", "asked"), [("O3", None), ("O2", False)])
def test_without_master_weights_the_optimizer_steps_the_model(level: str, asked: bool | None) -> None:
    trial = fit(at(level, master_weights=asked))
    assert all(p is w for p, w in zip(optimized_by(trial), trial.model.parameters(), strict=True))


def test_master_weights_can_be_added_to_the_last_level() -> None:
    trial = fit(at("O3", master_weights=True))
    assert {parameter.dtype for parameter in optimized_by(trial)} == {FP32}


def test_frozen_weights_stay_frozen() -> None:
    class Frozen(ApexTrial):
        def make_model(self) -> nn.Module:
            model = net()
            model[0].requires_grad_(False)
            return model

    trial = fit(at("O2", Frozen))
    torch.manual_seed(11)
    assert torch.equal(trial.model[0].weight, net()[0].weight.to(BF16))
    assert [parameter.requires_grad for parameter in optimized_by(trial)] == [False, False, True, True, True, True]


def test_recurrent_models_give_fp32_throughout() -> None:
    with trainer(type("Recurrent", (at("O2"),), {"make_model": lambda self: nn.LSTM(4, 3)})) as (_, trial):
        output, (hidden, cell) = trial.model(torch.ones(5, 2, 4))
        assert {output.dtype, hidden.dtype, cell.dtype} == {FP32}
        assert {weights.dtype for weights in weights_of(trial)} == {BF16}


def test_a_deep_copy_of_a_model_works_by_itself() -> None:
    trial = fit(at("O2"))
    twin = copy.deepcopy(trial.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.ones(2, 4)
    assert torch.equal(twin(x), torch.zeros(2, 1))
    assert not torch.equal(trial.model(x), torch.zeros(2, 1))


# The shape of the result


@pytest.mark.parametrize("shape", [list, tuple, lambda parts: next(iter(parts))])
@pytest.mark.parametrize("level", LEVELS)
def test_models_and_optimizers_come_back_in_the_shape_given(level: str, shape: Any) -> None:
    with trainer() as (_, trial):
        models, optimizers = shape([trial.model]), shape([trial.optimizer])
        returned = trial.context.configure_apex_amp(models, optimizers, opt_level=level)
        assert returned == (models, optimizers)
        assert isinstance(returned, tuple)


def test_all_models_and_optimizers_of_a_list_take_part() -> None:
    with trainer() as (_, trial):
        second = trial.context.wrap_model(nn.Linear(2, 2))
        optimizer = trial.context.wrap_optimizer(torch.optim.SGD(second.parameters(), lr=0.1))
        trial.context.configure_apex_amp([trial.model, second], [trial.optimizer, optimizer], opt_level="O2")
        assert {trial.model.weight.dtype, second.weight.dtype} == {BF16}
        assert {group["params"][0].dtype for o in (trial.optimizer, optimizer) for group in o.param_groups} == {FP32}


def test_models_that_were_not_given_stay_as_they_are() -> None:
    with trainer() as (_, trial):
        other = trial.context.wrap_model(nn.Linear(2, 2))
        trial.context.configure_apex_amp(trial.model, trial.optimizer, opt_level="O3")
        assert other.weight.dtype == FP32
        assert other(torch.ones(1, 2)).dtype == FP32


@pytest.mark.parametrize("level", LEVELS)
def test_not_enabled_changes_nothing(level: str) -> None:
    plain = train_and_save(type("Plain", (LineTrial,), {"make_model": lambda self: net()}), 6)
    switched_off = train_and_save(at(level, enabled=False), 6)
    assert_same(state_in(switched_off), state_in(plain))


def test_not_enabled_leaves_room_for_another_kind() -> None:
    with trainer(at("O2", enabled=False)) as (_, trial):
        trial.context.experimental.use_amp()


# Mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opt_level": "O4"}, r"opt_level='O4'.*O0, O1, O2, O3"),
        ({"opt_level": 2}, r"opt_level=2"),
        ({"loss_scale": "often"}, r"loss_scale='often'.*dynamic"),
        ({"loss_scale": 0}, r"loss_scale=0"),
        ({"loss_scale": -2.0}, r"loss_scale=-2\.0"),
        ({"loss_scale": float("nan")}, r"loss_scale=nan"),
        ({"loss_scale": float("inf")}, r"loss_scale=inf"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, r"keep_batchnorm_fp32='yes'.*True or False"),
        ({"opt_level": "O3", "cast_model_type": torch.float16, "loss_scale": "dynamic"}, r"master_weights=True"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with trainer() as (_, trial), pytest.raises(errors.InvalidExperimentException, match=message):
        trial.context.configure_apex_amp(trial.model, trial.optimizer, **settings)


@pytest.mark.parametrize("unwrapped", ["model", "optimizer"])
def test_parts_that_are_not_wrapped_are_refused(unwrapped: str) -> None:
    with trainer() as (_, trial):
        model = nn.Linear(4, 1) if unwrapped == "model" else trial.model
        optimizer = trial.optimizer if unwrapped == "model" else torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(errors.InvalidExperimentException, match="not wrapped"):
            trial.context.configure_apex_amp(model, optimizer)


# Loss scaling


@pytest.mark.parametrize("scale", [128.0, 64, "32.0"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_fixed_power_of_two_as_scale_changes_no_bit(level: str, scale: Any) -> None:
    assert_same(weights_of(fit(at(level, loss_scale=scale))), weights_of(fit(at(level, loss_scale=1.0))))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_sees_unscaled_fp32_gradients(scale: float) -> None:
    seen: list[Tensor] = []

    def look(parameters: list[nn.Parameter]) -> None:
        seen.extend(p.grad.clone() for p in parameters if p.grad is not None)

    fit(at("O2", clip=look, loss_scale=scale), max_length=pytorch.Batch(1))
    assert {gradient.dtype for gradient in seen} == {FP32}
    assert 0.1 < max(gradient.abs().max().item() for gradient in seen) < 50


class Tiny(ApexTrial):
    """Has a loss so small that fp16 overflows only where a test wants it."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 1e-3


class Exploding(Tiny):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss * float("inf") if batch_idx == 2 else loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


FP16 = {"cast_model_type": torch.float16}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_infinite_gradients_skip_the_step_and_halve_a_dynamic_scale(level: str) -> None:
    state = state_in(train_and_save(at(level, Exploding, **FP16), 5))
    assert state["amp_state"]["scaler"]["scale"] == 2.0**15
    assert state["optimizers_state_dict"][0]["state"][0]["step"] == 4
    assert all(weights.isfinite().all() for weights in state["models_state_dict"][0].values())


@pytest.mark.parametrize(
    ("bounds", "scale"),
    [
        ({"max_loss_scale": 256.0}, 256.0),
        ({"min_loss_scale": 2.0**16}, 2.0**16),
        ({"min_loss_scale": 2.0**17}, 2.0**17),
    ],
)
def test_a_dynamic_scale_stays_within_its_bounds(bounds: dict[str, float], scale: float) -> None:
    checkpoint = train_and_save(at("O1", Exploding if "min_loss_scale" in bounds else Tiny, **FP16, **bounds), 4)
    assert state_in(checkpoint)["amp_state"]["scaler"]["scale"] == scale


def test_a_dynamic_scale_begins_within_its_bounds() -> None:
    with trainer(at("O1", min_loss_scale=1e5, **FP16)) as (_, trial):
        trial.context.backward(trial.model[3].bias.sum())
        assert trial.model[3].bias.grad.item() == 1e5


# What training gives


def test_level_zero_is_plain_fp32() -> None:
    plain = fit(type("Plain", (LineTrial,), {"make_model": lambda self: net()}))
    assert_same(weights_of(fit(at("O0"))), weights_of(plain))


def test_level_one_is_autocast() -> None:
    class Amp(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.use_amp(dtype=BF16)

        def make_model(self) -> nn.Module:
            return net()

    assert_same(weights_of(fit(at("O1"))), weights_of(fit(Amp)))


class Slow(ApexTrial):
    """Takes steps so small that half weights lose most of them."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-4


def test_master_weights_keep_small_steps_that_half_weights_lose() -> None:
    length = pytorch.Batch(30)
    full, with_masters, all_half = (fit(at(level, Slow), max_length=length) for level in ("O0", "O2", "O3"))
    assert distance(with_masters, full) < 0.005
    assert distance(all_half, full) > distance(with_masters, full)


@pytest.mark.parametrize("clip", [None, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)])
@pytest.mark.parametrize("aggregation", [1, 3])
def test_level_two_equals_a_plain_loop_with_master_weights(aggregation: int, clip: Any) -> None:
    trial = fit(at("O2", clip=clip), {"aggregation_frequency": aggregation}, max_length=pytorch.Batch(10))
    torch.manual_seed(11)
    model = net()
    for number in (0, 3):
        model[number].to(BF16)
    masters = [nn.Parameter(parameter.detach().clone().float()) for parameter in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=0.05)
    loader = pytorch.DataLoader(line_data(), batch_size=4, shuffle=True).get_data_loader(repeat=True, seed=5)
    for number, (x, y) in enumerate(itertools.islice(loader, 10), start=1):
        nn.functional.mse_loss(model(x.to(BF16)).float(), y).backward()
        if number % aggregation:
            continue
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() / aggregation
            parameter.grad = None
        if clip:
            clip(masters)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    assert_same(trial.model.state_dict(), model.state_dict())
    assert_same([m.detach() for m in optimized_by(trial)], [m.detach() for m in masters])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_optimizer_clears_the_gradients_of_the_model(set_to_none: bool) -> None:
    with trainer(at("O2")) as (_, trial):
        trial.context.backward(trial.loss(line_data(4).tensors))
        trial.optimizer.zero_grad(set_to_none=set_to_none)
        gradients = [parameter.grad for parameter in trial.model.parameters()]
    assert all(gradient is None if set_to_none else not gradient.any() for gradient in gradients)


# Resume

RESUMED: dict[str, Any] = {
    "O0": at("O0"),
    "O0 scaled": at("O0", loss_scale=128.0),
    "O1": at("O1"),
    "O1 fp16": at("O1", Exploding, **FP16),
    "O2": at("O2"),
    "O2 scaled": at("O2", loss_scale=128.0),
    "O2 fp16": at("O2", Exploding, **FP16),
    "O3": at("O3"),
}


@pytest.mark.parametrize(("kind", "aggregation"), every(3, itertools.product(RESUMED, [1, 3])))
def test_resumes_exactly(kind: str, aggregation: int) -> None:
    assert_resumes_exactly(RESUMED[kind], 4, 9, aggregation_frequency=aggregation)


def test_a_checkpoint_holds_the_master_weights() -> None:
    checkpoint = train_and_save(at("O2"), 5)
    (masters,) = state_in(checkpoint)["amp_state"]["master_weights"]
    assert_same(masters, [master.detach() for master in optimized_by(fit(at("O2"), max_length=pytorch.Batch(5)))])


def test_a_checkpoint_of_full_precision_gives_the_master_weights() -> None:
    checkpoint = train_and_save(at("O0"), 5)
    with trainer(at("O2")) as (its_trainer, trial):
        its_trainer.fit(max_length=pytorch.Batch(5), latest_checkpoint=checkpoint)
    assert distance(trial, fit(at("O0"), max_length=pytorch.Batch(5))) < 0.01
    assert_same(
        [m.detach().to(w.dtype) for m, w in zip(optimized_by(trial), weights_of(trial), strict=True)], weights_of(trial)
    )
