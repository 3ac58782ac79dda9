"""Whole batches as CUDA graphs: the same numbers as without, and a way out for what cannot be captured."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

from determined import pytorch
from determined.pytorch import Batch
from trials import LineTrial, assert_resumes_exactly, assert_same, fit, line_data, train_and_save

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:TensorFloat32 tensor cores"),
]
LENGTH = 40
RATE = 2.0**-6  # the same number as a tensor of fp32 and as one of Python


class Eager(LineTrial):
    """A network with random numbers in it, with a clipped optimizer and a schedule."""

    samples = 64
    uses_graphs = False
    options: dict[str, Any] = {}

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        self.prepare(context)
        if self.uses_graphs:
            context.experimental.use_cuda_graphs(**self.options)
        self.model = context.wrap_model(self.make_model())
        self.optimizer = context.wrap_optimizer(self.make_optimizer())
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.5)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.calls = 0

    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        """Set up the precision."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.calls += 1
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0, foreach=True))
        return {"loss": loss, "rate": self.optimizer.param_groups[0]["lr"] + torch.zeros_like(loss)}


class Half(Eager):
    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.float16)


class Brain(Eager):
    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.bfloat16)


class Momentum(Eager):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.5)


class OddEnd(Eager):
    """Epochs end with a smaller batch."""

    samples = 30


class Twice(Eager):
    """Two optimizers step one after the other."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.other = context.wrap_model(nn.Linear(4, 1))
        self.second = context.wrap_optimizer(torch.optim.Adam(self.other.parameters(), lr=RATE))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        with torch.no_grad():
            target = self.model(batch[0])
        distance = nn.functional.mse_loss(self.other(batch[0]), target)
        self.context.backward(distance)
        self.context.step_optimizer(self.second)
        return {**metrics, "distance": distance}


class Tempered(Eager):
    """Learns a temperature too, which belongs to no model."""

    place = "cuda"

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.temperature = nn.Parameter(torch.tensor(2.0, device=self.place))
        return torch.optim.AdamW([{"params": self.model.parameters()}, {"params": [self.temperature]}], lr=RATE)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x) / self.temperature, y)


class TemperedOnTheHost(Tempered):
    place = "cpu"


def graphed(kind: type[Eager], **options: Any) -> type[Eager]:
    return type(f"Graphed{kind.__name__}", (kind,), {"uses_graphs": True, "options": options})


def trained(kind: type[Eager], **arguments: Any) -> Any:
    init = arguments.pop("init", {})
    return fit(kind, init, max_length=Batch(LENGTH), reporting_period=Batch(10), **arguments)


def assert_same_training(ours: Eager, theirs: Eager) -> None:
    assert_same(ours.model.state_dict(), theirs.model.state_dict())
    assert_same(ours.optimizer.state_dict(), theirs.optimizer.state_dict())


@pytest.mark.parametrize("kind", [Eager, Half, Brain, Momentum, OddEnd, Twice, Tempered])
def test_replays_give_the_same_bits(kind: type[Eager], capsys: pytest.CaptureFixture[str]) -> None:
    ours = trained(graphed(kind))
    assert ours.calls < 12
    assert "replayed as a CUDA graph" in capsys.readouterr().out
    assert_same_training(ours, trained(kind))


@pytest.mark.parametrize("kind", [Eager, Half])
def test_aggregated_batches_give_the_same_bits(kind: type[Eager]) -> None:
    init = {"aggregation_frequency": 4}
    ours = trained(graphed(kind), init=init)
    assert ours.calls < 16
    assert_same_training(ours, trained(kind, init=init))


@pytest.mark.parametrize("kind", [Eager, Half, OddEnd, Tempered])
@pytest.mark.parametrize("aggregation", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(kind: type[Eager], aggregation: int) -> None:
    assert_resumes_exactly(graphed(kind), 17, 31, aggregation_frequency=aggregation)


def test_metrics_are_those_of_each_batch() -> None:
    class Keeping(Eager):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"keep": Keeper()}

    class Keeper(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
            kept.extend(batch_metrics)

    kept: list[dict[str, float]] = []
    trained(Keeping)
    plain, kept[:] = list(kept), []
    trained(graphed(Keeping))
    assert kept == plain
    assert len({metrics["rate"] for metrics in kept}) == LENGTH // 7 + 1


def test_the_host_never_waits_within_a_window() -> None:
    class NoWaiting(Eager):
        batches = 0

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(line_data(64), batch_size=4, collate_fn=self.collate)

        def collate(self, samples: Any) -> Any:
            """Allow no waiting from batch 12 until the last but one, after which the window is read."""
            self.batches += 1
            if self.batches in (12, LENGTH):
                torch.cuda.set_sync_debug_mode("error" if self.batches == 12 else "default")
            return torch.utils.data.default_collate(samples)

    try:
        assert fit(graphed(NoWaiting), max_length=Batch(LENGTH)).batches >= LENGTH
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Waiting(Eager):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if metrics["loss"].item() > 1e9:  # WAITS
            raise ValueError
        return metrics


class Branching(Eager):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx % 2 == 0:  # BRANCHES
            return super().train_batch(batch, epoch_idx, batch_idx)
        return {"loss": self.loss(batch), "rate": batch[0].sum()}


class Drawing(Eager):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, y = batch
        return super().train_batch((x * random.random(), y), epoch_idx, batch_idx)


class Sending(Eager):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.full((4,), 0.5)
        return super().train_batch((x + noise.to(x.device, non_blocking=True), y), epoch_idx, batch_idx)  # SENDS


class Counting(Eager):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), "count": self.calls}


class Reducing(Eager):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.reducer = context.wrap_reducer(lambda values: sum(values), "total")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.reducer.update(1)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Unsupported(Eager):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.model.parameters(), lr=RATE)


class LateWaiting(Eager):
    """Waits in the batch that is captured, and not before."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.calls += 1
        self.context.backward(loss)
        if self.calls > 3:
            loss.item()  # WAITS LATE
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class LateWaitingHalf(LateWaiting):
    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.float16)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Waiting, "# WAITS"),
        (Branching, "# BRANCHES"),
        (Drawing, "random numbers on the CPU"),
        (Sending, "copies a tensor"),
        (Counting, "'count'"),
        (Reducing, "reducer"),
        (Unsupported, "Adagrad"),
        (TemperedOnTheHost, "parameter of shape () in host memory"),
        (LateWaiting, "# WAITS LATE"),
        (LateWaitingHalf, "# WAITS LATE"),
    ],
)
def test_what_cannot_be_captured_is_trained_all_the_same(
    kind: type[Eager], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = trained(graphed(kind))
    said = [line for line in capsys.readouterr().out.splitlines() if "without CUDA graphs" in line]
    assert len(said) == 1
    assert reason in said[0]
    assert_same(ours.model.state_dict(), trained(kind).model.state_dict())


def test_a_failed_capture_leaves_no_memory_behind() -> None:
    class Large(LateWaiting):
        samples = 64

        def make_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 1))

    fit(graphed(Large), max_length=Batch(10))
    few = reserved_memory()
    fit(graphed(Large), max_length=Batch(200))
    assert reserved_memory() <= few + 2**21


def reserved_memory() -> int:
    """Return what is reserved for good: without caches, and without cuBLAS's workspace for each stream."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_setting_that_changes_in_every_batch_ends_capturing(capsys: pytest.CaptureFixture[str]) -> None:
    class Cycle(Eager):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            cycle = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, RATE, total_steps=LENGTH + 1)
            context.wrap_lr_scheduler(cycle, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    trained(graphed(Cycle))
    assert "betas changes again and again" in capsys.readouterr().out


def test_forms_of_batches_beyond_the_limit_are_trained_without(capsys: pytest.CaptureFixture[str]) -> None:
    class Growing(Eager):
        samples = 600

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(line_data(self.samples), batch_size=4, collate_fn=self.collate)

        def collate(self, samples: Any) -> Any:
            count = 2 + int(abs(float(samples[0][0][0]) * 1000)) % 3
            return tuple(torch.stack(part) for part in zip(*samples[:count], strict=True))

    ours = trained(graphed(Growing, max_graphs=1))
    assert "more forms" in capsys.readouterr().out
    assert_same_training(ours, trained(Growing))


def test_verifying_finds_what_only_python_does(capsys: pytest.CaptureFixture[str]) -> None:
    class Fading(Eager):
        factor = 1.0

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            x, y = batch
            self.factor *= 0.9
            return super().train_batch((x * self.factor, y), epoch_idx, batch_idx)

    trained(graphed(Fading, verify=True))
    assert "differ in" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Half, Tempered])
def test_verifying_changes_nothing_where_all_is_well(kind: type[Eager], capsys: pytest.CaptureFixture[str]) -> None:
    ours = trained(graphed(kind, verify=True))
    assert "without CUDA graphs" not in capsys.readouterr().out
    assert_same_training(ours, trained(kind))


def test_frozen_parameters_stay_as_they_are() -> None:
    class Freezing(Eager):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"freeze": Freezer(self)}

    class Freezer(pytorch.PyTorchCallback):
        def __init__(self, trial: Any) -> None:
            self.trial = trial

        def on_training_epoch_end(self, epoch_idx: int) -> None:
            self.trial.model[0].requires_grad_(False)

    assert_same_training(trained(graphed(Freezing)), trained(Freezing))


@pytest.mark.parametrize(
    "init",
    [
        {"optimizations": {"cuda_graphs": True}},
        {"exp_conf": {"reproducibility": {"experiment_seed": 5}, "optimizations": {"cuda_graphs": {"warmup": 4}}}},
    ],
)
def test_graphs_need_no_change_of_the_program(init: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    trained(Eager, init=init)
    assert "replayed as a CUDA graph" in capsys.readouterr().out


def test_compiled_models_are_captured_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Compiled(Eager):
        def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
            context.experimental.use_compile()

    ours = trained(graphed(Compiled))
    assert "replayed as a CUDA graph" in capsys.readouterr().out
    assert ours.calls < 12


def test_optimizers_step_fused_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    ours = trained(Eager)
    assert "AdamW steps fused" in capsys.readouterr().out
    assert ours.optimizer.param_groups[0]["fused"] is True


def test_fused_steps_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    ours = trained(Eager, init={"optimizations": {"fused_optimizer": False}})
    assert "steps fused" not in capsys.readouterr().out
    assert ours.optimizer.param_groups[0]["fused"] is None


def test_a_run_without_fused_steps_goes_on_with_them() -> None:
    first = train_and_save(Eager, 5, optimizations={"fused_optimizer": False})
    ours = fit(Eager, max_length=Batch(10), latest_checkpoint=first)
    assert all(state["step"].is_cuda and state["step"] == 10 for state in ours.optimizer.state.values())
