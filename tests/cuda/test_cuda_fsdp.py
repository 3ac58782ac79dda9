"""FSDP2 in one process on a GPU: mixed precision, recomputed activations, exact resume from shards."""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch
from determined._home import home
from determined.errors import InvalidExperimentException

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # Where torch offers another way to the same, of which users of this library need not hear.
    pytest.mark.filterwarnings("ignore:.*barrier\\(\\):UserWarning"),
]


@pytest.fixture(autouse=True)
def started_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only one of a job, as `torchrun --nproc-per-node 1` does; kernels are deterministic."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "DET_DISTRIBUTED_BACKEND": "cpu:gloo,cuda:nccl",  # offloading needs both
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.end = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


class GpuTrial(pytorch.PyTorchTrial):
    """A small network of repeated blocks; subclasses choose the options."""

    options: dict[str, Any] | None = {}
    amp: torch.dtype | None = None
    validated: list[float]

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        if self.options is not None:
            context.experimental.use_fsdp(**self.options)
        if self.amp is not None:
            context.experimental.use_amp(dtype=self.amp)
        torch.manual_seed(3)
        self.model = context.wrap_model(Network())
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.outputs: set[torch.dtype] = set()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"remember": Remember(type(self))}

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        output = self.model(x)
        self.outputs.add(output.dtype)
        return nn.functional.mse_loss(output, y)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.context.backward(loss)
        clip = torch.nn.utils.clip_grad_norm_
        self.context.step_optimizer(self.optimizer, clip_grads=lambda parameters: clip(parameters, 1.0))
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


class Remember(pytorch.PyTorchCallback):
    """Keeps the validation losses of a kind of trial."""

    def __init__(self, kind: type[GpuTrial]) -> None:
        self.kind = kind
        kind.validated = []

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.kind.validated.append(metrics["validation_loss"])


class Whole(GpuTrial):
    options = None


class Chosen(GpuTrial):
    options = {"units": [Block]}


class Bf16(GpuTrial):
    options = {"mixed_precision": torch.bfloat16}


class Recomputing(GpuTrial):
    options = {"activation_checkpointing": True}


class KeptWeights(GpuTrial):
    options = {"reshard_after_forward": False}


class Offloaded(GpuTrial):
    options = {"offload_to_cpu": True}


class AmpBf16(GpuTrial):
    amp = torch.bfloat16


class AmpFp16(GpuTrial):
    amp = torch.float16


class RecomputingBf16(GpuTrial):
    options = {"activation_checkpointing": True, "mixed_precision": torch.bfloat16}


KINDS = [GpuTrial, Chosen, Bf16, Recomputing, KeptWeights, Offloaded, AmpBf16, AmpFp16, RecomputingBf16]


def fit(
    trial_class: type[GpuTrial], batches: int, checkpoint: pathlib.Path | None = None, aggregation: int = 1
) -> tuple[Any, pathlib.Path]:
    """Train and return (whole weights, folder of the checkpoint that was left)."""
    store = home().checkpoints
    before = set(store.iterdir()) if store.exists() else set()
    settings = {"reproducibility": {"experiment_seed": 1}}
    with pytorch.init(exp_conf=settings, aggregation_frequency=aggregation) as context:
        trial = trial_class(context)
        trainer = pytorch.Trainer(trial, context)
        trainer.fit(max_length=pytorch.Batch(batches), latest_checkpoint=checkpoint, checkpoint_policy="none")
        weights = {name: whole(value) for name, value in trial.model.state_dict().items()}
        assert trial.outputs == {torch.float32}
        assert context.device.type == "cuda"
    (folder,) = set(store.iterdir()) - before
    return weights, folder


def whole(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach().cpu().clone()


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("trial_class", KINDS)
def test_resume_on_the_gpu_is_exact(trial_class: type[GpuTrial]) -> None:
    uninterrupted, _ = fit(trial_class, 13)
    _, checkpoint = fit(trial_class, 7)
    resumed, _ = fit(trial_class, 13, checkpoint)
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("trial_class", [GpuTrial, Bf16, Offloaded])
def test_resume_between_aggregated_steps_is_exact(trial_class: type[GpuTrial]) -> None:
    uninterrupted, _ = fit(trial_class, 9, aggregation=3)
    _, checkpoint = fit(trial_class, 5, aggregation=3)
    resumed, _ = fit(trial_class, 9, checkpoint, aggregation=3)
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("trial_class", [GpuTrial, Chosen, Recomputing, KeptWeights, Offloaded])
def test_training_in_full_precision_is_that_of_a_whole_model(trial_class: type[GpuTrial]) -> None:
    ours, _ = fit(trial_class, 10)
    theirs, _ = fit(Whole, 10)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("trial_class", [Bf16, AmpBf16, AmpFp16, RecomputingBf16])
def test_mixed_precision_learns_like_full_precision(trial_class: type[GpuTrial]) -> None:
    fit(trial_class, 80)
    fit(Whole, 80)
    assert trial_class.validated[-1] < 1.5 * Whole.validated[-1] + 0.05


def test_whole_models_go_on_from_shards_and_the_other_way_round() -> None:
    _, spread = fit(GpuTrial, 6)
    _, whole_again = fit(Whole, 8, spread)
    loaded = pytorch.load_trial_from_checkpoint_path(spread, GpuTrial)
    weights, _ = fit(GpuTrial, 10, whole_again)
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape
        for name, value in loaded.model.state_dict().items()  # type: ignore[attr-defined]
    }


def test_recomputing_needs_less_memory() -> None:
    def peak(trial_class: type[GpuTrial]) -> int:
        class Wide(trial_class):  # type: ignore[misc,valid-type]
            def build_training_data_loader(self) -> pytorch.DataLoader:
                x = torch.randn(32_768, 8, generator=torch.Generator().manual_seed(0))
                return pytorch.DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32_768)

        torch.cuda.reset_peak_memory_stats()
        fit(Wide, 2)
        return torch.cuda.max_memory_allocated()

    assert peak(Recomputing) < 0.8 * peak(GpuTrial)


def test_offloading_without_a_backend_for_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_BACKEND", "nccl")
    with pytest.raises(InvalidExperimentException, match="DET_DISTRIBUTED_BACKEND=cpu:gloo,cuda:nccl"):
        fit(Offloaded, 1)
    fit(GpuTrial, 1)
