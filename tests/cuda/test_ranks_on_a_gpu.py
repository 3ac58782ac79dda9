"""Several ranks on CUDA: DDP with mixed precision, exact resume, and no host that waits within a window.

Two ranks share one GPU, as if they were on two machines with one each. nccl does not allow that, so they use gloo; one
rank uses nccl.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ranks
from determined import pytorch
from determined.pytorch import Batch
from trials import LineTrial, assert_same, fit, saved_at

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GLOO = {"DET_DISTRIBUTED_BACKEND": "gloo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class AmpTrial(LineTrial):
    dtype: torch.dtype | None = torch.float16

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        if self.dtype is not None:
            context.experimental.use_amp(self.dtype)
        super().__init__(context)

    def make_model(self) -> Any:
        layers = [torch.nn.Linear(4, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)]
        return torch.nn.Sequential(*layers)


class BfloatTrial(AmpTrial):
    dtype = torch.bfloat16


class FullTrial(AmpTrial):
    dtype = None


def trained(kind: type[LineTrial], batches: int, checkpoint: str | None = None) -> Any:
    torch.use_deterministic_algorithms(True)
    trial = fit(kind, max_length=Batch(batches), latest_checkpoint=checkpoint, reporting_period=Batch(4))
    assert trial.context.device.type == "cuda"
    return {name: value.cpu() for name, value in trial.model.state_dict().items()}


@pytest.mark.parametrize("kind", [AmpTrial, BfloatTrial, FullTrial])
def test_ranks_train_and_resume_exactly(kind: type[LineTrial], tmp_path: Any) -> None:
    options = {"environment": GLOO, "one_a_machine": True}
    whole = ranks.run(trained, 2, kind, 12, **options)
    ranks.run(trained, 2, kind, 8, environment={**GLOO, "DET_HOME": str(tmp_path / "other")}, one_a_machine=True)
    (checkpoint,) = (tmp_path / "other" / "checkpoints").iterdir()
    resumed = ranks.run(trained, 2, kind, 12, str(checkpoint), **options)
    assert_same(whole[1], whole[0])
    assert_same(resumed[0], whole[0])


class WatchedTrial(FullTrial):
    """Lets nothing wait for the GPU between the first batches and the end of a window."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 4:
            torch.cuda.set_sync_debug_mode("error")
        if batch_idx == 15:
            torch.cuda.set_sync_debug_mode("default")
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


def watched() -> None:
    fit(WatchedTrial, max_length=Batch(20), reporting_period=Batch(20))


def test_one_rank_trains_by_nccl_without_waiting() -> None:
    ranks.run(watched, 1)
    assert saved_at() == [20]


def devices() -> tuple[str, str]:
    with pytorch.init() as context:
        return str(context.device), torch.distributed.get_backend()


def test_rank_takes_the_gpu_of_its_local_rank_and_nccl() -> None:
    assert ranks.run(devices, 1) == [("cuda:0", "nccl")]


def test_rank_without_a_gpu_of_its_own_is_refused() -> None:
    with ranks.started(devices, 2, environment={"LOCAL_RANK": "99"}) as started:
        ended = started.wait()
    assert "This machine has 1 GPUs, but the process of local rank 99" in ended[0].output


def test_rank_that_fails_under_nccl_says_only_why(run_program: Callable[..., Any]) -> None:
    program = "from determined import pytorch\nwith pytorch.init():\n    raise ValueError('broken')"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test"}
    ended = run_program(program, **rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert "ValueError: broken" in ended.stderr
    assert "destroy_process_group" not in ended.stderr


class SyncTrial(FullTrial):
    """Has batch norm over the batches of all ranks."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_ddp(sync_batch_norm=True)
        super().__init__(context)

    def make_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, y = batch
        x = x + 100 * self.context.distributed.rank  # each rank would see another mean by itself
        return super().train_batch((x, y), epoch_idx, batch_idx)


def running_mean() -> Any:
    trial = fit(SyncTrial, max_length=Batch(1))
    assert any(isinstance(module, torch.nn.SyncBatchNorm) for module in trial.model.modules())
    return trial.model.module[0].running_mean.cpu()


def test_batch_norm_is_over_all_ranks() -> None:
    first, second = ranks.run(running_mean, 2, environment=GLOO, one_a_machine=True)
    assert_same(first, second)
    assert (first > 4).all()  # a tenth of the mean over both ranks, which is about 50
