"""What a trial and its callbacks see when several ranks train it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import ranks
from cases import every
from determined import errors, pytorch
from determined.pytorch import Batch, Reducer
from trials import SEED, LineTrial, assert_same, fit, line_data, records, trainer

pytestmark = pytest.mark.process


class Spy(pytorch.PyTorchCallback):
    """Notes every call of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.calls.append(f"workload of {len(batch_metrics)}")
        self.averages = avg_metrics

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.calls.append("validation")
        self.metrics = metrics

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("save")

    def on_checkpoint_write_end(self, checkpoint_dir: Any) -> None:
        self.calls.append("write")

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.calls.append(f"upload {uuid}")

    def on_trial_shutdown(self) -> None:
        self.calls.append("shutdown")


class SpiedTrial(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.spy = Spy()
        self.order = context.wrap_reducer(lambda values: len(values), name="count")
        self.values = context.wrap_reducer(lambda values: {"order": [ord(one) for one in values]}, for_training=False)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"spy": self.spy}

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(list("abcde"), batch_size=1)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.order.update(1)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        (letter,) = batch
        self.order.update(1)
        self.values.update(letter)
        return {"code": float(ord(letter))}


def spied(batches: int) -> Any:
    spy = fit(SpiedTrial, max_length=Batch(batches)).spy
    return spy.calls, spy.averages, spy.metrics


def test_callbacks_run_on_every_rank_and_hear_the_same() -> None:
    chief, worker = ranks.run(spied, 2, 4)
    assert [call for call in chief[0] if call != "write"] == worker[0]
    assert "write" in chief[0]
    assert chief[1:] == worker[1:]


def test_validation_and_reducers_cover_all_batches_once_in_their_order() -> None:
    for _, averages, metrics in ranks.run(spied, 2, 4):
        assert metrics["code"] == sum(map(ord, "abcde")) / 5
        assert metrics["order"] == [ord(letter) for letter in "abcde"]
        assert metrics["count"] == 5
        assert averages["count"] == 8


class UploadTrial(LineTrial):
    """Only its second rank has a callback, which hears of checkpoints."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.heard: list[tuple[int, str]] = []

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        trial = self

        class Callback(pytorch.PyTorchCallback):
            def on_checkpoint_upload_end(self, uuid: str) -> None:
                trial.heard.append((len(trial.seen), uuid))

        return {"callback": Callback()} if self.context.distributed.rank == 1 else {}


def uploaded() -> list[tuple[int, str]]:
    return list(fit(UploadTrial, max_length=Batch(5), checkpoint_period=Batch(2)).heard)


def test_any_rank_hears_of_a_complete_checkpoint_at_its_batch() -> None:
    chief, worker = ranks.run(uploaded, 2)
    assert chief == []
    assert worker == [(one.steps_completed, one.uuid) for one in records().checkpoints()]


class OneBatchTrial(LineTrial):
    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(4), batch_size=4)

    def evaluation_reducer(self) -> Reducer:
        return Reducer.SUM

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"samples": len(batch[0])}


def test_ranks_without_a_validation_batch_take_part() -> None:
    ranks.run(trained, 3, OneBatchTrial)
    (validation,) = records().metrics(1, "validation")
    assert validation.metrics["samples"] == 4


def trained(kind: type[LineTrial], **arguments: Any) -> Any:
    trial = fit(kind, max_length=Batch(3), **arguments)
    return [parameter.detach().clone() for parameter in trial.model.parameters()]


class WholeTrial(LineTrial):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"rank": self.context.distributed.rank, "batches": len(data_loader)}


class UnequalWorkers(LineTrial):
    """Only one rank starts loader workers for a validation."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(16), batch_size=4, num_workers=self.context.distributed.rank)


def test_ranks_may_have_unequal_numbers_of_validation_workers() -> None:
    ranks.run(trained, 2, UnequalWorkers)
    assert len(records().metrics(1, "validation")) == 1


def test_whole_data_set_is_evaluated_by_the_chief() -> None:
    ranks.run(trained, 2, WholeTrial)
    (validation,) = records().metrics(1, "validation")
    assert validation.metrics["rank"] == 0
    assert validation.metrics["batches"] == 2


class MetricTrial(LineTrial):
    """Has a metric of torchmetrics, which some ranks do not update in a validation."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        import torchmetrics

        self.total = context.wrap_reducer(torchmetrics.SumMetric(), name="total")

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(4), batch_size=4)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.total.update(1)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.total.update(1)
        return super().evaluate_batch(batch, batch_idx)


@pytest.mark.thorough
def test_torchmetrics_are_over_all_ranks() -> None:
    pytest.importorskip("torchmetrics")
    ranks.run(trained, 2, MetricTrial)
    assert records().metrics(1, "training")[0].metrics["total"] == 6
    assert records().metrics(1, "validation")[0].metrics["total"] == 1


def outputs() -> str:
    fit(max_length=Batch(2))
    return "trained"


def test_only_the_chief_shows_and_records_anything() -> None:
    with ranks.started(outputs, 2) as started:
        chief, worker = started.wait()
    assert "batch 2/2" in chief.output
    assert worker.output == ""
    assert len(records().experiments()) == 1
    assert len(records().checkpoints()) == 1


def ids() -> tuple[int, int, str]:
    with trainer() as (its_trainer, trial):
        its_trainer.fit(max_length=Batch(1))
        context = trial.context
        return context.get_experiment_id(), context.get_trial_id(), str(context.get_tensorboard_path())


def test_all_ranks_know_the_ids_of_the_run() -> None:
    chief, worker = ranks.run(ids, 2)
    assert chief == worker
    assert chief[:2] == (1, 1)


# Models


class GanTrial(LineTrial):
    """Two models with optimizers of their own; one trains through the other."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.critic = context.wrap_model(nn.Linear(1, 1))
        self.critic_optimizer = context.wrap_optimizer(torch.optim.SGD(self.critic.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, y = batch
        made = self.model(x)
        judged = (self.critic(made.detach()) - self.critic(y)).mean()
        self.context.backward(judged)
        self.context.step_optimizer(self.critic_optimizer)
        loss = self.critic(made).square().mean() + nn.functional.mse_loss(made, y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class UnusedTrial(LineTrial):
    """Leaves out a part of its model in every second batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_ddp(find_unused_parameters=True)
        super().__init__(context)

    def make_model(self) -> nn.Module:
        return Branches()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.parts[self.calls % 2](x)  # type: ignore[no-any-return]


class HalfTrial(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        self.model = context.wrap_model(self.make_model())
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.05), fp16_compression=True
        )
        self.seen = []


class FrozenTrial(LineTrial):
    """Trains one layer of two, and has a model that trains not at all."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.fixed = context.wrap_model(nn.Linear(2, 2).requires_grad_(False))

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model


@pytest.mark.parametrize("kind", every(3, [GanTrial, UnusedTrial, HalfTrial, FrozenTrial]))
def test_copies_stay_equal(kind: type[LineTrial]) -> None:
    first, *others = ranks.run(trained, 2, kind)
    for other in others:
        assert_same(other, first)


def counted_reductions(aggregation: int) -> int:
    """Train six batches, and return how often gradients were exchanged."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    exchanged: list[int] = []

    def reduce(state: Any, bucket: Any) -> Any:
        exchanged.append(bucket.index())
        return allreduce_hook(state, bucket)

    reduce.__annotations__.clear()  # DDP takes them for types, and they are text here

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.model.__dict__["_engine"][0].register_comm_hook(None, reduce)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Trial, init={"aggregation_frequency": aggregation}, max_length=Batch(6))
    return len(exchanged)


def test_aggregation_exchanges_gradients_only_when_it_steps() -> None:
    assert ranks.run(counted_reductions, 2, 1) == [6, 6]
    assert ranks.run(counted_reductions, 2, 3) == [2, 2]


def answers() -> Any:
    with trainer() as (_, trial):
        model = trial.model
        model.extra = 1
        return (
            model.in_features,
            sorted(model.state_dict()),
            [name for name, _ in model.named_parameters()],
            model.extra,
        )


def test_wrapped_model_answers_for_the_one_inside() -> None:
    assert ranks.run(answers, 2)[1] == (4, ["bias", "weight"], ["weight", "bias"], 1)


class BypassTrial(LineTrial):
    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(nn.functional.linear(x, self.model.weight, self.model.bias), y)


def test_training_past_the_wrapped_model_is_refused() -> None:
    with ranks.started(trained, 2, BypassTrial) as started:
        ended = started.wait()
    assert [one.status for one in ended] == [1, 1]
    assert any("Linear has gradients, but was not called itself" in one.output for one in ended)


def test_model_without_a_process_group_is_refused() -> None:
    from determined.pytorch._backends.ddp import NoGroup

    backend = NoGroup(torch.device("cpu"), 2)
    with pytest.raises(errors.InvalidExperimentException, match=r"Linear.*no process group.*init_process_group"):
        backend.wrap(nn.Linear(1, 1))


# Data that ranks iterate by themselves


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, first: int, step: int) -> None:
        self._range = range(first, 16, step)

    def __iter__(self) -> Any:
        return (torch.full((4,), float(number)) for number in self._range)


class StreamTrial(LineTrial):
    sharded = True

    def build_training_data_loader(self) -> pytorch.DataLoader:
        distributed = self.context.distributed
        first, step = (distributed.rank, distributed.size) if self.sharded else (0, 1)
        return pytorch.DataLoader(Numbers(first, step), batch_size=2)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.model(batch).square().mean()  # type: ignore[no-any-return]

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Numbers(0, 8), batch_size=2)


class SameStreamTrial(StreamTrial):
    sharded = False


@pytest.mark.parametrize(("kind", "told"), [(StreamTrial, False), (SameStreamTrial, True)])
def test_ranks_that_iterate_the_same_data_are_told(kind: type[LineTrial], told: bool) -> None:
    with ranks.started(warned, 2, kind) as started:
        chief, _ = started.wait()
    assert chief.status == 0, chief.output
    assert ("All 2 ranks start with the same batch" in chief.output) is told


def warned(kind: type[LineTrial]) -> None:
    import logging

    logging.basicConfig(level=logging.WARNING)
    trained(kind)


def loss_of_one_rank(value: float) -> float:
    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            own = value if self.context.distributed.rank == 1 else 1.0
            return {**metrics, "own": own}

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(Trial, max_length=Batch(2))
    return value


def test_metric_that_is_not_finite_on_one_rank_is_so_for_all() -> None:
    ranks.run(loss_of_one_rank, 2, math.nan)
    assert math.isnan(records().metrics(1, "training")[0].metrics["own"])


class CompiledTrial(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_compile(backend="eager")
        super().__init__(context)


def test_compiled_models_are_trained_together() -> None:
    compiled = ranks.run(trained, 2, CompiledTrial)
    plain = ranks.run(trained, 2, LineTrial)
    assert_same(compiled, plain)


def trained_by_config(**settings: Any) -> Any:
    return trained(LineTrial, init={"exp_conf": {**SEED, "optimizations": settings}})


def trained_compressed() -> Any:
    return trained_by_config(gradient_compression=True)


@pytest.mark.thorough
def test_config_compresses_gradients_as_an_optimizer_that_asks_for_it() -> None:
    compressed = ranks.run(trained_compressed, 2)
    assert_same(compressed, ranks.run(trained, 2, HalfTrial))
    assert not torch.equal(compressed[0][0], ranks.run(trained, 2, LineTrial)[0][0])
