"""The section `optimizations` of a config, for programs that say nothing of it themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import errors, pytorch
from determined.pytorch import Batch
from trials import SEED, LineTrial, assert_same, fit, trainer


def config(**settings: Any) -> dict[str, Any]:
    return {"exp_conf": {**SEED, "optimizations": settings}}


def weights(kind: type[LineTrial] = LineTrial, **settings: Any) -> Any:
    return fit(kind, init=config(**settings), max_length=Batch(4)).model.state_dict()


class AmpTrial(LineTrial):
    dtype: torch.dtype | None = torch.bfloat16

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(self.dtype)
        super().__init__(context)


class HalfTrial(LineTrial):
    """Asks for a level of apex by itself."""

    level = "O2"

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.model, self.optimizer = context.configure_apex_amp(self.model, self.optimizer, opt_level=self.level)


@pytest.mark.parametrize(("setting", "kind"), [("bf16", AmpTrial), ("O1", AmpTrial), ("O2", HalfTrial)])
def test_mixed_precision_is_that_of_a_program_that_asks_for_it(setting: str, kind: type[LineTrial]) -> None:
    assert_same(weights(mixed_precision=setting), weights(kind))


def test_o0_and_nothing_are_full_precision() -> None:
    assert_same(weights(mixed_precision="O0"), weights())
    assert not torch.equal(weights(mixed_precision="bf16")["weight"], weights()["weight"])


def test_precision_of_config_and_program_do_not_go_together() -> None:
    with pytest.raises(errors.InvalidExperimentException, match="use_amp does not go together with use_amp"):
        weights(AmpTrial, mixed_precision="bf16")


@pytest.mark.parametrize("setting", [True, {"dynamic": True}])
def test_models_are_compiled(setting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"backend": "eager"} | (setting if isinstance(setting, dict) else {})
    weights(compile=options)
    assert "compiles the models" in capsys.readouterr().out
    with trainer(**config(compile=setting)) as (_, trial):
        assert trial.context.experimental.compile_options == (setting if isinstance(setting, dict) else {})


class ImageTrial(LineTrial):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(1))

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        model = self.make_model()
        model(torch.ones(1, 3, 6, 6))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.seen: list[tuple[int, int]] = []
        self.last_were: list[bool] = []

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1))
        return pytorch.DataLoader(TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1)), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def loss(self, batch: Any) -> torch.Tensor:
        self.last_were.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return super().loss(batch)


def test_channels_last_is_for_models_and_batches() -> None:
    trial = fit(ImageTrial, init=config(channels_last=True), max_length=Batch(3))
    assert trial.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(trial.last_were)
    plain = fit(ImageTrial, max_length=Batch(3))
    assert not any(plain.last_were)
    for one, other in zip(trial.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("setting", "expected"), [(True, "high"), (False, "highest")])
def test_tf32_holds_for_the_time_of_the_run(setting: bool, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    with trainer(**config(tf32=setting)):
        assert torch.get_float32_matmul_precision() == expected
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'.*bf16, fp16, O0"),
        ({"compile": "yes"}, "compile='yes'.*true or false"),
        ({"tf32": 1}, "tf32=1.*true or false"),
        ({"channels_last": "on"}, "channels_last='on'.*true or false"),
        ({"compile": {"speed": 1}}, "use_compile"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=words):
        weights(**settings)


def test_section_that_is_no_map_is_refused() -> None:
    with pytest.raises(errors.InvalidExperimentException, match="optimizations=3"):
        fit(init={"exp_conf": {"optimizations": 3}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for graphs")
def test_graphs_without_a_gpu_are_left_out_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert_same(weights(cuda_graphs=True), weights())
    assert "without CUDA graphs: they need a CUDA GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("yes", "cuda_graphs='yes'"),
        ({"warmup": 1}, "warmup=1"),
        ({"max_graphs": True}, "max_graphs=True"),
        ({"verify": 1}, "verify=1"),
        ({"warm": 3}, "cuda_graphs.warm in the config: the options are warmup, max_graphs, verify"),
    ],
)
def test_wrong_options_of_graphs_are_named(value: Any, words: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=words):
        weights(cuda_graphs=value)


def test_settings_given_to_init_go_before_those_of_the_config() -> None:
    init = config(mixed_precision="O0") | {"optimizations": {"mixed_precision": "bf16"}}
    assert_same(fit(init=init, max_length=Batch(4)).model.state_dict(), weights(AmpTrial))


def test_unknown_settings_given_to_init_are_named() -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"'cuda_graph': .*cuda_graphs"):
        fit(init={"optimizations": {"cuda_graph": True}})


def test_settings_given_to_init_must_be_a_map() -> None:
    with pytest.raises(TypeError, match="optimizations='fast'"):
        fit(init={"optimizations": "fast"})
