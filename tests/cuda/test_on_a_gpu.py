"""What only a CUDA GPU shows: placement, mixed precision and exact resume there, and the examples unchanged."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import determined as det
from determined import pytorch, tracking
from determined._home import home

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class GpuTrial(pytorch.PyTorchTrial):
    """A small network with dropout and batch norm; subclasses choose the precision."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.before_wrapping()
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        self.model = context.wrap_model(network)
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01, eps=1e-4))
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.8), pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
        )
        self.after_wrapping()
        self.losses: list[float] = []

    def before_wrapping(self) -> None:
        """Choose a precision that comes before the models."""

    def after_wrapping(self) -> None:
        """Choose a precision that comes after the models."""

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        clip = torch.nn.utils.clip_grad_norm_
        self.context.step_optimizer(self.optimizer, clip_grads=lambda parameters: clip(parameters, 1.0))
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}


class Fp16(GpuTrial):
    def before_wrapping(self) -> None:
        self.context.experimental.use_amp()


class Bf16(GpuTrial):
    def before_wrapping(self) -> None:
        self.context.experimental.use_amp(dtype=torch.bfloat16)


class ApexO1(GpuTrial):
    level = "O1"

    def after_wrapping(self) -> None:
        self.model, self.optimizer = self.context.configure_apex_amp(self.model, self.optimizer, opt_level=self.level)


class ApexO2(ApexO1):
    level = "O2"


class ApexO3(ApexO1):
    level = "O3"


def fit(trial_class: type[GpuTrial], batches: int, checkpoint: str | None = None) -> tuple[Any, str]:
    """Train and return (trial, id of the last checkpoint)."""
    saved: list[str] = []

    class Remember(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            saved.append(uuid)

    with pytorch.init(exp_conf={"reproducibility": {"experiment_seed": 1}}) as context:
        trial = trial_class(context)
        trial.build_callbacks = lambda: {"remember": Remember()}  # type: ignore[method-assign]
        trainer = pytorch.Trainer(trial, context)
        trainer.fit(max_length=pytorch.Batch(batches), latest_checkpoint=checkpoint, checkpoint_policy="none")
    return trial, saved[-1] if saved else ""


def weights(trial: Any) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in trial.model.state_dict().values()]


PRECISIONS = [GpuTrial, Fp16, Bf16, ApexO1, ApexO2, ApexO3]


@pytest.mark.parametrize("trial_class", PRECISIONS)
def test_training_runs_on_the_gpu(trial_class: type[GpuTrial]) -> None:
    trial, _ = fit(trial_class, 3)
    assert {parameter.device.type for parameter in trial.model.parameters()} == {"cuda"}


@pytest.mark.parametrize("trial_class", PRECISIONS)
def test_resume_on_the_gpu_is_exact(trial_class: type[GpuTrial]) -> None:
    whole, _ = fit(trial_class, 37)
    _, checkpoint = fit(trial_class, 21)
    resumed, _ = fit(trial_class, 37, checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


@pytest.mark.parametrize("trial_class", [Fp16, Bf16, ApexO1, ApexO2])
def test_mixed_precision_learns_like_full_precision(trial_class: type[GpuTrial]) -> None:
    def validation_loss(kind: type[GpuTrial]) -> float:
        trial, _ = fit(kind, 160)
        trial.model.eval()
        with torch.no_grad():
            x = torch.randn(256, 8, generator=torch.Generator().manual_seed(9)).cuda()
            return float(nn.functional.mse_loss(trial.model(x), x.sum(1, keepdim=True)))

    assert validation_loss(trial_class) < 1.5 * validation_loss(GpuTrial) + 0.05


def test_half_weights_have_the_types_of_their_level() -> None:
    trial, _ = fit(ApexO2, 2)
    kinds = {name: parameter.dtype for name, parameter in trial.model.named_parameters()}
    assert kinds["0.weight"] == torch.float16
    assert kinds["1.weight"] == torch.float32


def test_a_metric_changed_in_place_after_it_was_returned_is_noticed() -> None:
    class Accumulating(GpuTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"].detach()
            if batch_idx == 0:
                self.total = loss
                return {"total": self.total}
            self.total += loss
            return {"total": self.total}

    with pytest.warns(UserWarning, match="'total' was changed in place"):
        fit(Accumulating, 3)


def reported(group: str, *names: str) -> list[Any]:
    """Return the metrics of the only report of a group."""
    (report,) = tracking.TrackingReader(home().database).metrics(1, group)
    return [report.metrics[name] for name in names]


def test_metrics_may_be_computed_in_inference_mode() -> None:
    class Inferring(GpuTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            with torch.inference_mode():
                return metrics | {"index": torch.ones(2, device="cuda").sum() * batch_idx}

        @torch.inference_mode()
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            total = torch.zeros((), device="cuda") if batch_idx == 0 else self.total
            self.total = total.add_(1)  # changed in place in the batches that follow
            return super().evaluate_batch(batch, batch_idx) | {"count": self.total, "two": torch.ones(2).cuda() * 2}

    fit(Inferring, 3)
    assert reported("training", "index") == [2.0]
    assert reported("validation", "count", "two") == [8.5, 2.0]  # 16 batches: the mean of 1 to 16


def test_metrics_on_the_host_and_on_the_gpu_are_read_together() -> None:
    class Mixed(GpuTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"]
            here, there = torch.tensor(float(batch_idx)), torch.tensor(batch_idx, device="cuda")
            return {"loss": loss, "here": here, "there": there, "both": [here, there, 1.0], "vector": there.repeat(2)}

    fit(Mixed, 3)
    assert reported("training", "here", "there", "both", "vector") == [1.0, 1.0, 1.0, 1.0]


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


class OnTwoGpus(GpuTrial):
    """Draws random numbers on a second GPU, and reports a metric that lives there."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        noise = torch.rand((), device="cuda:1")
        x, y = batch
        metrics = super().train_batch((x * noise.to(x.device), y), epoch_idx, batch_idx)
        return metrics | {"noise": noise, "one": torch.ones(2, device="cuda:1")}


@needs_two
def test_metrics_of_two_gpus_are_read_together() -> None:
    fit(OnTwoGpus, 3)
    loss, noise, one = reported("training", "loss", "noise", "one")
    assert loss > 0
    assert 0 < noise < 1
    assert one == 1.0


@needs_two
def test_resume_with_random_numbers_of_a_second_gpu_is_exact() -> None:
    whole, _ = fit(OnTwoGpus, 20)
    _, checkpoint = fit(OnTwoGpus, 9)
    resumed, _ = fit(OnTwoGpus, 20, checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


@needs_two
def test_state_of_all_generators_opens_no_other_gpu() -> None:
    program = (
        "import torch; from determined.pytorch._data import rng; torch.ones(1, device='cuda:0'); "
        "rng.set_state(rng.get_state()); assert not torch._C._cuda_hasPrimaryContext(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_window_waits_for_the_gpu() -> None:
    class Watched(GpuTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            # Between the second batch and the last, after which the window is read.
            torch.cuda.set_sync_debug_mode("error" if 0 < batch_idx < 8 else "default")
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytorch.init() as context:
        try:
            pytorch.Trainer(Watched(context), context).fit(
                max_length=pytorch.Batch(9), reporting_period=pytorch.Batch(100)
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")


def use_amp(context: pytorch.PyTorchTrialContext) -> None:
    context.experimental.use_amp()


def use_bf16(context: pytorch.PyTorchTrialContext) -> None:
    context.experimental.use_amp(dtype=torch.bfloat16)


def use_o1(context: pytorch.PyTorchTrialContext) -> None:
    context.configure_apex_amp(context.models, context.optimizers, opt_level="O1")


def use_o2(context: pytorch.PyTorchTrialContext) -> None:
    context.configure_apex_amp(context.models, context.optimizers, opt_level="O2")


def as_it_is(context: pytorch.PyTorchTrialContext) -> None:
    """Leave the precision alone."""


def train_example(example: str, precision: Callable[..., None], batches: int, checkpoint: str | None) -> Any:
    """Train an example's own trial with its own settings, and return (weights of all models, last checkpoint)."""
    folder = EXAMPLES / example
    with det.import_from_path(folder):
        program = runpy.run_path(str(folder / "train.py"))
        trial_class = next(value for name, value in program.items() if name.endswith("Trial"))
        hparams = program["HPARAMS"] | {"total_steps": 100}
        with pytorch.init(hparams=hparams, exp_conf=program["CONFIG"]) as context:
            trial = trial_class(context)
            precision(context)
            trainer = pytorch.Trainer(trial, context)
            trainer.fit(max_length=pytorch.Batch(batches), latest_checkpoint=checkpoint, checkpoint_policy="none")
            experiment = context.get_experiment_id()
            weights = [t.detach().cpu() for model in context.models for t in model.state_dict().values()]
            devices = {p.device.type for model in context.models for p in model.parameters()}
    assert devices == {"cuda"}
    return weights, experiment


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.parametrize("precision", [as_it_is, use_amp, use_bf16, use_o1, use_o2])
@pytest.mark.parametrize("example", ["digits", "gan", "char_lm"])
def test_examples_train_and_resume_exactly_in_every_precision(example: str, precision: Callable[..., None]) -> None:
    if example == "digits":
        pytest.importorskip("sklearn")
    torch.use_deterministic_algorithms(True, warn_only=True)
    whole, _ = train_example(example, precision, 12, None)
    store = home().checkpoints
    before = set(store.iterdir())
    train_example(example, precision, 7, None)
    (half,) = set(store.iterdir()) - before
    resumed, _ = train_example(example, precision, 12, str(half))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
