"""Models spread over ranks by FSDP2: the same training as in one process, and checkpoints for any number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import ranks
from cases import every
from det_command import run_det
from determined import pytorch
from determined.errors import InvalidCheckpointException, InvalidExperimentException
from determined.pytorch import Batch
from saving import change_file, reseal
from trials import LineTrial, assert_same, fit, latest_checkpoint, line_data, records, saved_at, state_in

pytestmark = pytest.mark.process

load = pytorch.load_trial_from_checkpoint_path


def make_model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.Linear(5, 1))


class FsdpTrial(LineTrial):
    """Fits a small network whose weights are spread over the ranks; what differs between tests is an attribute."""

    options: dict[str, Any] = {}
    clip: float | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.prepare(context)
        super().__init__(context)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_fsdp(**self.options)

    def make_model(self) -> nn.Module:
        return make_model()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip_grads if self.clip else None)
        return {"loss": loss}

    def clip_grads(self, parameters: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, self.clip)


class DdpTrial(FsdpTrial):
    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        pass


class ClippingTrial(FsdpTrial):
    """Most weights are those of the root, for which there is no unit."""

    options = {"units": [nn.Sequential]}
    clip = 0.1


class RecomputingTrial(FsdpTrial):
    options = {"activation_checkpointing": True}


class Drift(nn.Module):
    """Adds a buffer that follows the inputs of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.mean


class DropoutTrial(FsdpTrial):
    """Random numbers and buffers, which each rank has for itself."""

    def make_model(self) -> nn.Module:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Drift(), nn.Dropout(0.3), nn.Linear(8, 1))


class UnevenTrial(FsdpTrial):
    """Three validation batches for two ranks."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(10), batch_size=4)


class UnevenDdpTrial(UnevenTrial):
    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        pass


class FullDatasetTrial(UnevenTrial):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        losses = [self.loss([part.to(self.context.device) for part in batch]) for batch in data_loader]
        return {"validation_loss": torch.stack(losses).mean()}

    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def weights_after(batches: int, trial_class: type[LineTrial] = FsdpTrial, **init: Any) -> Any:
    with pytorch.init(exp_conf={"reproducibility": {"experiment_seed": 5}}, **init) as context:
        trial = trial_class(context)
        pytorch.Trainer(trial, context).fit(max_length=Batch(batches), checkpoint_policy="none")
        return whole_weights(trial.model)


def plain_weights(size: int, count: int, aggregation: int = 1, clip: float | None = None) -> dict[str, torch.Tensor]:
    """Train as one process on the mean of the losses of all ranks' batches."""
    loader = pytorch.DataLoader(line_data(), batch_size=4, shuffle=True).get_data_loader(repeat=True, seed=5)
    batches = iter(loader)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for index in range(count):
        losses = [nn.functional.mse_loss(model(x), y) for x, y in itertools.islice(batches, size)]
        (sum(losses) / size / aggregation).backward()  # type: ignore[union-attr]
        if (index + 1) % aggregation == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(aggregation):
                scheduler.step()
    return model.state_dict()


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trial_class", every(3, [FsdpTrial, ClippingTrial, RecomputingTrial]))
def test_ranks_train_what_one_process_would_on_all_their_batches(trial_class: type[FsdpTrial]) -> None:
    one, other = ranks.run(weights_after, 2, 6, trial_class)
    assert_same(one, other)
    assert_close(one, plain_weights(2, 6, clip=trial_class.clip))


class SparinglyTrial(ClippingTrial):
    """Checks that ranks have exchanged no gradients before a batch that steps."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        return metrics


def aggregated() -> Any:
    return weights_after(6, SparinglyTrial, aggregation_frequency=3)


def test_aggregated_gradients_are_those_of_all_batches_and_ranks() -> None:
    one, other = ranks.run(aggregated, 2)
    assert_same(one, other)
    assert_close(one, plain_weights(2, 6, aggregation=3, clip=ClippingTrial.clip))


@pytest.mark.thorough
def test_metrics_are_those_of_all_ranks() -> None:
    ranks.run(weights_after, 2, 4)
    ours = [report.metrics for report in records().metrics(1)]
    ranks.run(weights_after, 2, 4, DdpTrial)
    theirs = [report.metrics for report in records().metrics(2)]
    assert ours == [pytest.approx(metrics, rel=1e-4) for metrics in theirs]


# Validation


def validated(trial_class: type[LineTrial], steps: list[int]) -> None:
    fit(trial_class, max_length=Batch(3), validation_period=Batch(steps))


def validation_of(trial_id: int) -> list[dict[str, Any]]:
    return [report.metrics for report in records().metrics(trial_id, "validation")]


def test_ranks_with_fewer_validation_batches_than_others_evaluate_to_the_end() -> None:
    ranks.run(validated, 2, UnevenTrial, [1, 3])
    ranks.run(validated, 2, UnevenDdpTrial, [1, 3])
    assert validation_of(1) == [pytest.approx(metrics, rel=1e-4) for metrics in validation_of(2)]


@pytest.mark.thorough
def test_a_whole_data_set_is_evaluated_by_all_ranks_together() -> None:
    ranks.run(validated, 2, FullDatasetTrial, [1, 3])
    assert [sorted(metrics) for metrics in validation_of(1)] == [["batches", "epochs", "validation_loss"]] * 2


class StoppingTrial(UnevenTrial):
    """One rank wants to stop in the middle of a validation."""

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.context.distributed.rank == 1:
            self.context.set_stop_requested(True)
        return super().evaluate_batch(batch, batch_idx)


@pytest.mark.thorough
def test_a_validation_ends_for_all_ranks_when_one_wants_to_stop() -> None:
    ranks.run(validated, 2, StoppingTrial, [1, 3])
    assert saved_at() == [1]
    assert validation_of(1) == []


class TooFewTrial(FsdpTrial):
    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(4), batch_size=4)


def test_too_few_validation_batches_end_all_ranks_with_the_remedy() -> None:
    with ranks.started(validated, 2, TooFewTrial, [1]) as processes:
        ended = processes.wait()
    assert [one.status for one in ended] == [1, 1]
    assert "gives batches to 1 of 2 processes" in ended[0].output + ended[1].output


# Checkpoints


def store() -> pathlib.Path:
    return pathlib.Path(os.environ["DET_HOME"], "checkpoints")


def whole(uuid: str) -> pathlib.Path:
    """Return a copy of a checkpoint with whole tensors."""
    target = store().parent / f"{uuid}-whole"
    done = run_det("checkpoint", "consolidate", uuid, target)
    assert done.exit_code == 0, done.output
    return target


def in_parts_and_without_a_break(trial_class: type[LineTrial], stop: int, end: int, init: dict[str, Any]) -> None:
    arguments = {"max_length": Batch(end), "reporting_period": Batch(2), "init": init}
    fit(trial_class, **arguments, checkpoint_period=Batch([stop]))
    fit(trial_class, **(arguments | {"max_length": Batch(stop)}))
    torch.manual_seed(0)  # nothing may depend on the state of this process
    fit(trial_class, **arguments, latest_checkpoint="latest")


@pytest.mark.parametrize(
    ("trial_class", "init"), every(2, [(DropoutTrial, {}), (ClippingTrial, {"aggregation_frequency": 3})])
)
def test_resume_with_as_many_ranks_is_exact(trial_class: type[LineTrial], init: dict[str, Any]) -> None:
    ranks.run(in_parts_and_without_a_break, 2, trial_class, 4, 9, init)
    _, in_one, _, in_parts = [checkpoint.uuid for checkpoint in records().checkpoints()]
    assert_same(state_in(whole(in_parts)), state_in(whole(in_one)))
    reports = [[(one.steps_completed, one.metrics) for one in records().metrics(trial)] for trial in (1, 3)]
    assert reports[1] == [report for report in reports[0] if report[0] > 4]


def saved(trial_class: type[LineTrial], batches: int = 4, **init: Any) -> None:
    fit(trial_class, init, max_length=Batch(batches))


def restored(trial_class: type[LineTrial], checkpoint: str | pathlib.Path) -> Any:
    """Return weights and optimizer state, both whole, of a trial that goes on and has nothing left to do."""
    with pytorch.init(exp_conf={"reproducibility": {"experiment_seed": 5}}) as context:
        trial = trial_class(context)
        pytorch.Trainer(trial, context).fit(max_length=Batch(4), latest_checkpoint=checkpoint)
        return as_whole([dict(trial.model.state_dict()), trial.optimizer.state_dict()["state"]])


def as_whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_whole(one) for one in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(checkpoint: pathlib.Path) -> Any:
    state = state_in(checkpoint)
    return [dict(state["models_state_dict"][0]), state["optimizers_state_dict"][0]["state"]]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint of two ranks, not to be changed."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(home))
        patch.setenv("DET_PROGRESS", "0")
        ranks.run(saved, 2, FsdpTrial)
        (folder,) = (home / "checkpoints").iterdir()
        whole(folder.name)
    return folder


@pytest.fixture(scope="module")
def consolidated(sharded: pathlib.Path) -> pathlib.Path:
    """The same checkpoint, with whole tensors."""
    return sharded.parents[1] / f"{sharded.name}-whole"


class FsdpTemperatureTrial(FsdpTrial):
    """Learns a temperature besides, in the same group as the weights that are spread; ranks begin with others."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.prepare(context)
        self.model = context.wrap_model(self.make_model())
        self.temperature = nn.Parameter(torch.tensor(2.0 + int(os.environ["RANK"])))
        parameters = [*self.model.parameters(), self.temperature]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(parameters, lr=0.05))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x) / self.temperature, y)


class DdpTemperatureTrial(FsdpTemperatureTrial):
    prepare = DdpTrial.prepare


def temperatures() -> list[float]:
    init = {"aggregation_frequency": 2}
    arguments = {"init": init, "max_length": Batch(6)}
    trials = [fit(FsdpTemperatureTrial, **arguments)]
    fit(FsdpTemperatureTrial, init, max_length=Batch(3))
    trials.append(fit(FsdpTemperatureTrial, **arguments, latest_checkpoint="latest"))
    trials.append(fit(DdpTemperatureTrial, **arguments))
    return [trial.temperature.item() for trial in trials]


@pytest.mark.thorough
def test_parameters_of_no_model_are_trained_by_all_ranks_and_resumed_exactly() -> None:
    first, second = ranks.run(temperatures, 2)
    assert first == second
    in_one, in_parts, replicated = first
    assert in_one == in_parts == pytest.approx(replicated, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "trial_class"), [(1, FsdpTrial), (4, FsdpTrial), (2, DdpTrial)])
def test_another_number_of_ranks_or_whole_models_go_on_from_shards(
    size: int, trial_class: type[LineTrial], sharded: pathlib.Path, consolidated: pathlib.Path
) -> None:
    for state in ranks.run(restored, size, trial_class, sharded):
        assert_same(state, state_of(consolidated))


def test_one_process_without_a_group_goes_on_from_shards(sharded: pathlib.Path, consolidated: pathlib.Path) -> None:
    assert_same(restored(DdpTrial, sharded), state_of(consolidated))


def test_a_managed_trial_begins_with_the_weights_of_shards(
    sharded: pathlib.Path, consolidated: pathlib.Path, managed: Callable[..., None]
) -> None:
    managed({})
    began: list[dict[str, torch.Tensor]] = []

    class Beginning(DdpTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            began.append({name: value.clone() for name, value in self.model.state_dict().items()})
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Beginning, {"exp_conf": None}, max_length=Batch(1), latest_checkpoint=str(sharded))
    assert_same(began[0], state_of(consolidated)[0])


def test_spread_models_go_on_from_whole_ones() -> None:
    ranks.run(saved, 2, DdpTrial)
    uuid = latest_checkpoint()
    for state in ranks.run(restored, 2, FsdpTrial, uuid):
        assert_same(state, state_of(store() / uuid))


def continued_in_mid_aggregation(first: type[LineTrial], then: type[LineTrial]) -> None:
    saved(first, 4, aggregation_frequency=3)
    uuid = latest_checkpoint() if os.environ["RANK"] == "0" else "found by the chief"
    fit(then, {"aggregation_frequency": 3}, max_length=Batch(9), latest_checkpoint=uuid)


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "then"), [(FsdpTrial, DdpTrial), (DdpTrial, FsdpTrial)])
def test_gradients_between_aggregated_steps_are_kept_by_both_kinds(
    first: type[LineTrial], then: type[LineTrial]
) -> None:
    ranks.run(continued_in_mid_aggregation, 2, first, then)
    uuid = latest_checkpoint()
    weights, _ = state_of(whole(uuid) if then is FsdpTrial else store() / uuid)
    assert_close(weights, plain_weights(2, 9, aggregation=3))


@pytest.fixture
def folder(sharded: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint of two ranks, to be changed."""
    return pathlib.Path(shutil.copytree(sharded, tmp_path / sharded.name))


def test_each_rank_writes_its_own_shards(sharded: pathlib.Path) -> None:
    files = {path.name for path in (sharded / "shards").iterdir()}
    assert files == {".metadata", "index.json", "__0_0.distcp", "__1_0.distcp"}
    assert not any(path.name.startswith(".ranks") for path in sharded.iterdir())
    assert not any(isinstance(value, torch.Tensor) for value in state_in(sharded)["models_state_dict"][0].values())


def test_torch_itself_can_read_the_shards(sharded: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(sharded / "shards", tmp_path / "whole.pth")
    theirs = torch.load(tmp_path / "whole.pth", weights_only=True)
    ours = load(sharded, FsdpTrial).model.state_dict()  # type: ignore[attr-defined]
    assert_same(theirs[".models_state_dict.0.0.weight"], ours["0.weight"])


def test_a_trial_is_loaded_in_one_process_from_either_form(sharded: pathlib.Path, consolidated: pathlib.Path) -> None:
    for folder in (sharded, consolidated):
        weights = load(folder, FsdpTrial).model.state_dict()  # type: ignore[attr-defined]
        assert_same(dict(weights), state_of(consolidated)[0])


def test_a_consolidated_checkpoint_trains_like_any_other(consolidated: pathlib.Path) -> None:
    assert_same(restored(DdpTrial, consolidated), state_of(consolidated))
    assert not (consolidated / "shards").exists()


def test_a_checkpoint_of_whole_models_is_not_consolidated(tmp_path: pathlib.Path) -> None:
    saved(DdpTrial)
    done = run_det("checkpoint", "consolidate", latest_checkpoint(), tmp_path / "target")
    assert done.exit_code == 1
    assert "holds whole tensors already" in done.output
    assert not (tmp_path / "target").exists()


def test_a_damaged_shard_is_found(folder: pathlib.Path) -> None:
    path = folder / "shards" / "__1_0.distcp"
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    with pytest.raises(InvalidCheckpointException, match=r"__1_0\.distcp is damaged"):
        load(folder, FsdpTrial)


def saved_where_one_rank_cannot_write() -> None:
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    saved(FsdpTrial)


def test_shards_that_one_rank_cannot_write_leave_no_checkpoint() -> None:
    with ranks.started(saved_where_one_rank_cannot_write, 2) as processes:
        ended = processes.wait()
    assert [one.status for one in ended] == [1, 1]
    told = ended[0].output + ended[1].output
    assert "The checkpoint of batch 4 is not saved. rank 1 failed with" in told
    assert list(store().iterdir()) == []


# Harmful checkpoints


class Touching:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


@pytest.fixture
def canary(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path that harmful code would make a file of; there must be none in the end."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code of the checkpoint ran"


def test_code_in_the_description_of_torch_does_not_run(
    folder: pathlib.Path, canary: pathlib.Path, consolidated: pathlib.Path
) -> None:
    change_file(folder / "shards" / ".metadata", pickle.dumps(Touching(canary)))
    weights = load(folder, FsdpTrial).model.state_dict()  # type: ignore[attr-defined]
    assert_same(dict(weights), state_of(consolidated)[0])
    for state in ranks.run(restored, 1, FsdpTrial, folder):
        assert_same(state, state_of(consolidated))


def entries(folder: pathlib.Path) -> dict[str, Any]:
    return dict(json.loads((folder / "shards" / "index.json").read_text()))


def change_index(folder: pathlib.Path, **changes: Any) -> None:
    """Change what the index says of the first part of each tensor."""
    index = entries(folder)
    for entry in index["tensors"].values():
        entry["chunks"][0] |= {name: value for name, value in changes.items() if name in entry["chunks"][0]}
        entry |= {name: value for name, value in changes.items() if name in entry}
    change_file(folder / "shards" / "index.json", json.dumps(index))


@pytest.mark.parametrize("packed", [False, True])
def test_code_in_a_shard_does_not_run(folder: pathlib.Path, canary: pathlib.Path, packed: bool) -> None:
    path, contents = folder / "shards" / "__0_0.distcp", [Touching(canary), torch.zeros(4096)]
    if packed:
        torch.save(contents, path)
    else:
        path.write_bytes(pickle.dumps([contents[0], bytes(4096)]))
    change_index(folder, begin=0, length=path.stat().st_size)
    with pytest.raises(InvalidCheckpointException, match="shards cannot be read"):
        load(folder, FsdpTrial)


def test_a_shard_that_would_fill_the_memory_is_refused(folder: pathlib.Path) -> None:
    path = folder / "shards" / "__0_0.distcp"
    torch.save(torch.zeros(10**6), path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    change_index(folder, begin=0, length=path.stat().st_size)
    with pytest.raises(InvalidCheckpointException, match="it would unpack to"):
        load(folder, FsdpTrial)


def test_shards_are_looked_for_in_their_folder_only(folder: pathlib.Path) -> None:
    shutil.copy(folder / "shards" / "__0_0.distcp", folder / "outside.distcp")
    index = entries(folder)
    for chunk in (chunk for entry in index["tensors"].values() for chunk in entry["chunks"]):
        if chunk["file"] == "__0_0.distcp":
            chunk["file"] = "../outside.distcp"
    change_file(folder / "shards" / "index.json", json.dumps(index))
    with pytest.raises(InvalidCheckpointException, match=r"'\.\./outside\.distcp' is not the name"):
        load(folder, FsdpTrial)


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../state_dict.pth"},
        {"file": "/etc/passwd"},
        {"file": 3},
        {"begin": -1},
        {"length": 10**9},
        {"size": [10**12, 10**12]},
        {"sizes": [10**6]},
        {"offsets": [1]},
        {"offsets": "no"},
        {"dtype": "Tensor"},
        {"dtype": "float64"},
        {"chunks": []},
        {"chunks": None},
    ],
    ids=str,
)
def test_an_index_that_lies_is_refused(folder: pathlib.Path, changes: dict[str, Any]) -> None:
    change_index(folder, **changes)
    with pytest.raises(InvalidCheckpointException, match="shards cannot be read"):
        load(folder, FsdpTrial)


@pytest.mark.parametrize("mark", [["nowhere", 0], ["nowhere", "elsewhere"], ["nowhere"], 5])
def test_a_state_that_refers_to_nothing_is_refused(folder: pathlib.Path, mark: Any) -> None:
    state = state_in(folder)
    state["models_state_dict"][0]["0.weight"] = {"__shard__": mark}
    torch.save(state, folder / "state_dict.pth")
    reseal(folder)
    with pytest.raises(InvalidCheckpointException, match="cannot be read"):
        load(folder, FsdpTrial)


# Mistakes


def test_without_a_process_group_the_remedy_is_torchrun() -> None:
    with pytest.raises(InvalidExperimentException, match="torchrun --nproc-per-node"):
        fit(FsdpTrial)


def mistakes() -> list[str]:
    """Return what each mistake is told."""
    told = []
    attempts: list[Any] = [
        lambda context: (context.wrap_model(make_model()), context.experimental.use_fsdp()),
        lambda context: (context.experimental.use_fsdp(units=[nn.LSTM]), context.wrap_model(make_model())),
        lambda context: context.experimental.use_fsdp(units=3),
        lambda context: context.experimental.use_fsdp(units=[3]),
        lambda context: context.experimental.use_fsdp(mixed_precision=torch.float16),
        lambda context: context.experimental.use_fsdp(offload_to_cpu=True),
        lambda context: (context.experimental.use_fsdp(), context.experimental.use_ddp()),
        lambda context: (context.experimental.use_fsdp(), early_optimizer(context)),
        lambda context: (context.experimental.use_fsdp(), context.wrap_model(nn.Linear(2, 2, device="meta"))),
        lambda context: (context.experimental.use_fsdp(units=[nn.Embedding]), context.wrap_model(Tied())),
    ]
    for attempt in attempts:
        with pytorch.init() as context:
            try:
                attempt(context)
            except InvalidExperimentException as error:
                told.append(str(error))
    return told


def early_optimizer(context: pytorch.PyTorchTrialContext) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context.wrap_model(model)
    context.wrap_optimizer(optimizer)


class Tied(nn.Module):
    """Two modules of one list share their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.words = nn.Embedding(6, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 6, bias=False)])
        self.parts[1].weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](self.words(x.abs().long() % 6).mean(1)))[:, :1]


def test_mistakes_are_told_with_their_remedy() -> None:
    (told,) = ranks.run(mistakes, 1)
    remedies = [
        "use_fsdp() came after wrap_model()",
        "chooses no module with weights inside Sequential, which has ['Linear', 'Sequential']",
        "use_fsdp(units=3): pass classes of modules",
        "use_fsdp(units=[3]): pass classes of modules",
        "pass torch.bfloat16",
        "offload_to_cpu=True",
        "use_ddp() does not go together with use_fsdp()",
        "make the optimizer after it, from self.model.parameters()",
        "build it on the CPU",
        "shares weights with other parts of Tied",
    ]
    assert len(told) == len(remedies)
    for text, remedy in zip(told, remedies, strict=True):
        assert remedy in text


# Weights


class DifferingTrial(FsdpTrial):
    """Ranks begin with weights of their own, some of them tied."""

    def make_model(self) -> nn.Module:
        return seeded_model(self.context.distributed.rank)


def seeded_model(seed: int) -> nn.Module:
    model = Tied()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def begun() -> Any:
    with pytorch.init() as context:
        model = DifferingTrial(context).model
        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        return whole_weights(model), own, sum(parameter.numel() for parameter in model.parameters())


def test_ranks_begin_with_the_weights_of_the_first_and_keep_a_part() -> None:
    (one, own, total), (other, others, _) = ranks.run(begun, 2)
    assert_same(one, other)
    assert_same(one, dict(seeded_model(0).state_dict()))
    assert own + others == total
    assert max(own, others) < 0.7 * total


def trained_in_bfloat16() -> Any:
    class Trial(FsdpTrial):
        options = {"mixed_precision": torch.bfloat16, "units": lambda module: isinstance(module, nn.Linear)}
        computed: list[torch.dtype] = []

        def make_model(self) -> nn.Module:
            model = make_model()
            model[0].register_forward_hook(lambda module, args, output: self.computed.append(output.dtype))  # type: ignore[index]
            return model

        def loss(self, batch: Any) -> torch.Tensor:
            loss = super().loss(batch)
            assert loss.dtype == torch.float32
            return loss

    weights = weights_after(6, Trial)
    return weights, set(Trial.computed)


def test_mixed_precision_computes_in_bfloat16_and_learns_like_full_precision() -> None:
    weights, kinds = ranks.run(trained_in_bfloat16, 2)[0]
    assert kinds == {torch.bfloat16}
    for name, value in plain_weights(2, 6).items():
        torch.testing.assert_close(weights[name], value, rtol=0.1, atol=0.05)
