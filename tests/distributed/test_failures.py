"""A rank that fails, dies, hangs or is stopped: all ranks end soon, and say why."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
import torch

import ranks
from cases import every
from determined import InvalidHP, core, pytorch, tracking
from determined.pytorch import Batch
from trials import LineTrial, fit, records

pytestmark = pytest.mark.process

SOON = 10.0
"""Seconds within which all ranks must have ended after one has failed."""


def harm(how: str) -> None:
    if how == "raise":
        raise ValueError("boom on one rank")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        raise SystemExit(3)


class FailingTrial(LineTrial):
    """Rank 1 comes to harm in one phase of its training."""

    how = "raise"
    phase = "train"

    def reach(self, phase: str) -> None:
        if self.context.distributed.rank == 1 and phase == self.phase:
            print("harm at", time.time(), flush=True)
            harm(self.how)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.reach("init")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.reach("train")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.reach("validation")
        return super().evaluate_batch(batch, batch_idx)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        trial = self

        class Callback(pytorch.PyTorchCallback):
            def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
                trial.reach("save")

            def on_training_workload_end(self, *_: Any) -> None:
                trial.reach("report")

        return {"reach": Callback()}


def fail(how: str, phase: str) -> None:
    kind = type("Trial", (FailingTrial,), {"how": how, "phase": phase})
    fit(kind, max_length=Batch(6), reporting_period=Batch(2), validation_period=Batch(4), checkpoint_period=Batch(4))


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("raise", "init"),
        ("kill", "train"),
        ("raise", "report"),
        ("kill", "validation"),
        ("kill", "save"),
        pytest.param("kill", "init", marks=pytest.mark.thorough),
        pytest.param("raise", "train", marks=pytest.mark.thorough),
        pytest.param("kill", "report", marks=pytest.mark.thorough),
        pytest.param("raise", "validation", marks=pytest.mark.thorough),
        pytest.param("raise", "save", marks=pytest.mark.thorough),
    ],
)
def test_harm_to_one_rank_ends_all_within_seconds(how: str, phase: str) -> None:
    with ranks.started(fail, 2, how, phase) as started:
        ended = started.wait()
        harmed_at = float(ended[1].output.split("harm at ")[1].split()[0])
        assert time.time() - harmed_at < SOON, [one.output for one in ended]
    assert [one.status for one in ended] == [1, 1 if how == "raise" else -signal.SIGKILL]
    assert "Rank 0 stops because of rank 1" in ended[0].output
    if how == "raise":
        assert "ValueError: boom on one rank" in ended[0].output
        assert "Traceback" in ended[1].output
        assert "Traceback" not in ended[0].output
    (trial,) = records().trials(1)
    assert trial.state is tracking.RunState.ERROR


def test_status_of_a_program_that_exits_is_kept_and_ends_all() -> None:
    with ranks.started(fail, 2, "exit", "train") as started:
        ended = started.wait()
    assert ended[0].status == 1
    assert "SystemExit: 3" in ended[0].output


class SlowTrial(LineTrial):
    """Trains long enough to be stopped, and says where it is."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        print("batch", batch_idx, flush=True)
        time.sleep(0.01)
        self.between(batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def between(self, batch_idx: int) -> None:
        pass


def slow(kind: type[SlowTrial] = SlowTrial) -> Any:
    trial = fit(kind, max_length=Batch(100_000), reporting_period=Batch(1000))
    return len(trial.seen)


@pytest.mark.parametrize(
    ("rank", "signum"),
    [
        (0, signal.SIGTERM),
        (1, signal.SIGINT),
        pytest.param(0, signal.SIGINT, marks=pytest.mark.thorough),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.thorough),
    ],
)
def test_signal_to_one_rank_stops_all_at_the_same_batch(rank: int, signum: signal.Signals) -> None:
    with ranks.started(slow, 2) as started:
        started.await_output(rank, "batch 3\n")
        os.kill(started.processes[rank].pid, signum)
        ended = started.wait()
    assert [one.status for one in ended] == [128 + signum] * 2, [one.output for one in ended]
    (checkpoint,) = records().checkpoints()
    last = [one.output.split("batch ")[-1].split()[0] for one in ended]
    assert checkpoint.steps_completed < 200
    assert f"batch {checkpoint.steps_completed - 1}\n" in ended[1].output
    assert f"batch {checkpoint.steps_completed}\n" not in ended[1].output, last


def test_signals_to_all_ranks_make_one_checkpoint() -> None:
    with ranks.started(slow, 2) as started:
        started.await_output(1, "batch 3\n")
        for process in started.processes:
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGINT)  # as from the terminal and from the launcher
        ended = started.wait()
    assert [one.status for one in ended] == [130, 130], [one.output for one in ended]
    assert len(records().checkpoints()) == 1


def test_second_interrupt_ends_all_at_once() -> None:
    with ranks.started(slow, 2, StuckTrial) as started:
        started.await_output(1, "stuck")
        os.kill(started.processes[1].pid, signal.SIGINT)
        time.sleep(1.0)  # a second one at once would be taken for an echo of the first
        os.kill(started.processes[1].pid, signal.SIGINT)
        ended = started.wait(SOON)
    assert None not in [one.status for one in ended]
    assert 0 not in [one.status for one in ended]


class StuckTrial(SlowTrial):
    def between(self, batch_idx: int) -> None:
        if batch_idx == 3 and self.context.distributed.rank == 1:
            print("stuck", flush=True)
            time.sleep(60)


def test_rank_that_hangs_is_named_with_its_stack() -> None:
    with ranks.started(slow, 2, StuckTrial, environment={"DET_DISTRIBUTED_TIMEOUT": "3"}) as started:
        started.await_output(1, "stuck")
        began = time.monotonic()
        ended = started.wait()
        assert time.monotonic() - began < 3 + SOON
    assert [one.status for one in ended] == [1, 1]
    assert "Rank 1 has not come on for 3 seconds" in ended[0].output
    assert "in between" in ended[0].output
    assert "time.sleep(60)" in ended[0].output


def slow_with_own_timeout(seconds: float, port: int) -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    own = core.DistributedContext(
        rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1,
        pub_port=port, timeout=seconds,
    )  # fmt: skip
    fit(StuckTrial, {"distributed": own}, max_length=Batch(100_000), reporting_period=Batch(1000))


@pytest.mark.thorough
def test_timeout_of_the_given_context_is_that_of_the_hang_watch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ranks.started(slow_with_own_timeout, 2, 3.0, port) as started:
        started.await_output(1, "stuck")
        ended = started.wait(3 + SOON)
    assert [one.status for one in ended] == [1, 1]
    assert "Rank 1 has not come on for 3 seconds" in ended[0].output


def test_rank_that_is_frozen_is_given_up_after_the_timeout() -> None:
    with ranks.started(slow, 2, environment={"DET_PEER_TIMEOUT": "4"}) as started:
        started.await_output(1, "batch 3\n")
        os.kill(started.processes[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        started.processes[0].join(30)
        took = time.monotonic() - began
    assert started.processes[0].exitcode == 1
    assert 3 < took < 12
    # Its files are gone with the block.


class StoppingTrial(SlowTrial):
    def between(self, batch_idx: int) -> None:
        if batch_idx == 5 and self.context.distributed.rank == 1:
            self.context.set_stop_requested(True)


def test_stop_that_one_rank_asks_for_stops_all() -> None:
    first, second = ranks.run(slow, 2, StoppingTrial)
    assert first == second
    assert 6 <= first < 50


class LeavingTrial(SlowTrial):
    reason: type[Exception] = pytorch.ShouldExit
    leavers = (0, 1)

    def between(self, batch_idx: int) -> None:
        if batch_idx == 5 and self.context.distributed.rank in self.leavers:
            raise self.reason()


class InvalidTrial(LeavingTrial):
    reason = InvalidHP


class LonelyTrial(LeavingTrial):
    leavers = (1,)


class LonelyInvalidTrial(InvalidTrial):
    leavers = (1,)


def test_program_that_leaves_on_all_ranks_saves() -> None:
    assert ranks.run(slow, 2, LeavingTrial) == [5, 5]
    assert [one.steps_completed for one in records().checkpoints()] == [5]


@pytest.mark.parametrize("kind", every(2, [LonelyInvalidTrial, InvalidTrial]))
def test_invalid_hyperparameters_on_any_rank_end_all_without_an_error(kind: type[SlowTrial]) -> None:
    with ranks.started(slow, 2, kind) as started:
        ended = started.wait()
    assert [one.status for one in ended] == [0, 0], [one.output for one in ended]
    (trial,) = records().trials(1)
    assert "invalid hyperparameters" in str(trial.reason)


def test_program_that_leaves_on_one_rank_alone_is_an_error_that_says_so() -> None:
    with ranks.started(slow, 2, LonelyTrial) as started:
        ended = started.wait(SOON + 5)
    assert [one.status for one in ended] == [1, 1]
    assert "use context.set_stop_requested(True)" in ended[1].output


class NanTrial(LineTrial):
    """One rank's validation is not finite: all must come to the same decision about the best."""

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        value = float("nan") if self.context.distributed.rank == 1 else 1.0
        return {"validation_loss": torch.tensor(value)}


def best(kind: type[LineTrial]) -> None:
    import warnings

    warnings.simplefilter("ignore")
    fit(kind, max_length=Batch(4), validation_period=Batch(2), checkpoint_policy="best")


def test_one_ranks_nan_decides_the_same_everywhere() -> None:
    ranks.run(best, 2, NanTrial)
    assert [one.steps_completed for one in records().checkpoints()] == [4]
