"""Questions a trial asks its context, before and during a run."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import determined as det
from determined import core, errors, pytorch
from determined.pytorch import Batch, PyTorchTrialContext
from trials import LineTrial, fit, latest_checkpoint, line_data, records

NEEDS_A_LOOP = (
    "is_epoch_start",
    "is_epoch_end",
    "current_train_epoch",
    "current_train_batch",
)


@pytest.fixture
def context() -> Iterator[PyTorchTrialContext]:
    with pytorch.init() as context:
        yield context


def asked(question: Callable[[PyTorchTrialContext], Any], **arguments: Any) -> list[Any]:
    """The answers to a question in each batch of a run."""
    answers: list[Any] = []

    class Asking(LineTrial):
        samples = 12

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            answers.append(question(self.context))
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Asking, **({"max_length": Batch(5)} | arguments))
    return answers


# Where training is


@pytest.mark.parametrize("call", NEEDS_A_LOOP)
def test_questions_about_the_loop_are_refused_before_it(context: PyTorchTrialContext, call: str) -> None:
    with pytest.raises(errors.InternalException, match=rf"{call}\(\) .*only while Trainer.fit\(\) runs"):
        getattr(context, call)()


@pytest.mark.parametrize("call", NEEDS_A_LOOP)
def test_questions_about_the_loop_are_refused_after_it(call: str) -> None:
    trial = fit(max_length=Batch(1))
    with pytest.raises(errors.InternalException, match=call):
        getattr(trial.context, call)()


def test_current_batch_and_epoch() -> None:
    answers = asked(lambda c: (c.current_train_epoch(), c.current_train_batch()))
    assert answers == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]


def test_epochs_start_and_end_with_the_first_and_last_batch_of_the_data() -> None:
    answers = asked(lambda c: (c.is_epoch_start(), c.is_epoch_end()), max_length=Batch(4))
    assert answers == [(True, False), (False, False), (False, True), (True, False)]


def test_data_without_a_length_never_ends_an_epoch() -> None:
    ends = []

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from line_data(8)

    class Trial(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Endless(), batch_size=4)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            ends.append((self.context.is_epoch_start(), self.context.is_epoch_end()))
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Trial, max_length=Batch(3))
    assert ends == [(True, False), (False, False), (False, False)]


def test_initial_batch_is_where_the_run_began() -> None:
    assert asked(lambda c: c.get_initial_batch(), max_length=Batch(2)) == [0, 0]
    assert asked(lambda c: c.get_initial_batch(), latest_checkpoint=latest_checkpoint()) == [2, 2, 2]


class AskingTrial(LineTrial):
    """Asks where the run begins wherever a trial builds something."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        self.answers = {"__init__": context.get_initial_batch()}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.answers["callbacks"] = self.context.get_initial_batch()
        return super().build_callbacks()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.answers["training"] = self.context.get_initial_batch()
        return super().build_training_data_loader()

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        self.answers["validation"] = self.context.get_initial_batch()
        return super().build_validation_data_loader()


def test_initial_batch_is_known_while_the_trial_is_built() -> None:
    builds = ("callbacks", "training", "validation")
    assert fit(AskingTrial, max_length=Batch(2)).answers == dict.fromkeys(("__init__", *builds), 0)
    resumed = fit(AskingTrial, max_length=Batch(3), latest_checkpoint=latest_checkpoint())
    assert resumed.answers == {"__init__": 0} | dict.fromkeys(builds, 2)
    assert resumed.seen == [(0, 2)]  # and with our loader asking changes nothing


@pytest.mark.parametrize("named", ["uuid", "path", "latest"])
def test_initial_batch_is_known_in_the_constructor_of_a_run_that_the_environment_continues(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(AskingTrial, max_length=Batch(2))
    (saved,) = records().checkpoints()
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", {"uuid": saved.uuid, "path": saved.path, "latest": "latest"}[named])
    assert set(fit(AskingTrial, max_length=Batch(3)).answers.values()) == {2}


def test_initial_batch_of_a_missing_checkpoint_is_left_to_fit_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", "b3c4bc5e-5d9d-4dbb-a2a5-2ebd9a1f1a1b")
    with pytest.raises(errors.CheckpointNotFoundException, match="b3c4bc5e"):
        fit(AskingTrial)


def test_stop_requests_can_be_asked_for_and_taken_back(context: PyTorchTrialContext) -> None:
    answers = [context.get_stop_requested()]
    for request in (True, False):
        context.set_stop_requested(request)
        answers.append(context.get_stop_requested())
    assert answers == [False, True, False]


@pytest.mark.parametrize("value", [1, "yes", None])
def test_stop_request_takes_a_bool(context: PyTorchTrialContext, value: Any) -> None:
    with pytest.raises(AssertionError, match="pass True or False"):
        context.set_stop_requested(value)


# Hyperparameters and config


def test_hparams_are_given_back() -> None:
    with pytorch.init(hparams={"lr": 0.1, "net": {"width": 3}}) as context:
        assert context.get_hparams() == {"lr": 0.1, "net": {"width": 3}}
        assert context.get_hparam("lr") == 0.1


def test_hparams_that_the_program_changes_stay_changed_for_it_alone() -> None:
    given = {"net": {"width": 3}}
    with pytorch.init(hparams=given) as context:
        context.get_hparams()["net"]["width"] = 9
        assert context.get_hparam("net") == {"width": 9}
        assert context.get_hparams() is context.get_hparams()
    assert given == {"net": {"width": 3}}


def test_changing_a_returned_config_changes_nothing() -> None:
    with pytorch.init(exp_conf={"searcher": {"metric": "a"}}) as context:
        context.get_experiment_config()["searcher"]["metric"] = "b"
        assert context.get_experiment_config() == {"searcher": {"metric": "a"}}


@pytest.mark.parametrize(
    ("call", "argument"),
    [("get_hparams", "hparams"), ("get_experiment_config", "exp_conf"), ("get_data_config", "exp_conf")],
)
def test_what_was_not_given_names_the_argument_to_pass(context: PyTorchTrialContext, call: str, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"init\({argument}="):
        getattr(context, call)()


@pytest.mark.parametrize("call", ["get_global_batch_size", "get_per_slot_batch_size"])
def test_batch_sizes_need_the_hparam(call: str) -> None:
    with (
        pytorch.init(hparams={"lr": 1}) as context,
        pytest.raises(ValueError, match=r"'global_batch_size'; this run has \['lr'\]"),
    ):
        getattr(context, call)()


def test_data_config_is_the_free_section() -> None:
    with pytorch.init(exp_conf={"data": {"url": "x"}}) as context:
        assert context.get_data_config() == {"url": "x"}
    with pytorch.init(exp_conf={}) as context:
        assert context.get_data_config() == {}


def test_one_slot_gets_the_whole_batch() -> None:
    with pytorch.init(hparams={"global_batch_size": 7}) as context:
        assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (7, 7)


class OneOf(core.DistributedContext):
    """One of several ranks, by itself."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        self.rank, self.size = rank, size


def per_slot(whole: int, rank: int, size: int) -> int:
    context = det.TrialContext(distributed=OneOf(rank, size), hparams={"global_batch_size": whole}, exp_conf=None)
    return context.get_per_slot_batch_size()


def test_a_remainder_goes_to_the_first_ranks_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"global_batch_size=8 does not divide by 3.*first 2 get batches of 3"):
        sizes = [per_slot(8, rank, 3) for rank in range(3)]
    assert sizes == [3, 3, 2]


def test_a_batch_size_that_divides_warns_of_nothing() -> None:
    assert [per_slot(9, rank, 3) for rank in range(3)] == [3, 3, 3]


def test_a_batch_too_small_for_all_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=2 leaves nothing for some of 3 slots; use 3 or more"):
        per_slot(2, 2, 3)


def test_context_from_a_config_has_its_constant_hparams() -> None:
    config = {
        "hyperparameters": {
            "lr": {"type": "const", "val": 0.1},
            "width": 3,
            "depth": {"type": "int", "minval": 1, "maxval": 2},
            "net": {"kind": "a"},
            "optimizer": {"type": {"type": "const", "val": "sgd"}},
            "loss": {"type": "focal", "gamma": 2},
        }
    }
    context = det.TrialContext.from_config(config)
    assert context.get_hparams() == {
        "lr": 0.1,
        "width": 3,
        "net": {"kind": "a"},
        "optimizer": {"type": "sgd"},
        "loss": {"type": "focal", "gamma": 2},
    }
    assert context.get_experiment_config() == config


@pytest.mark.parametrize("kind", [pytorch.PyTorchTrialContext, pytorch.CheckpointLoadContext])
def test_trial_can_be_tried_out_with_a_context_from_a_config(kind: type[PyTorchTrialContext]) -> None:
    context = kind.from_config({"hyperparameters": {"global_batch_size": {"type": "const", "val": 4}}})
    assert context.get_per_slot_batch_size() == 4
    trial = LineTrial(context)
    before = trial.model.weight.clone()
    for batch_idx, batch in enumerate(trial.build_training_data_loader()):
        trial.train_batch(batch, 0, batch_idx)
    assert not torch.equal(trial.model.weight, before)
    assert context.get_initial_batch() == 0


def test_context_without_a_run_has_no_tensorboard_folder() -> None:
    with pytest.raises(ValueError, match="no run"):
        det.TrialContext.from_config({}).get_tensorboard_path()


# The run


def test_ids_count_the_runs_of_the_home_folder() -> None:
    ids = []
    for _ in range(2):
        with pytorch.init() as context:
            ids.append((context.get_experiment_id(), context.get_trial_id()))
    assert ids == [(1, 1), (2, 2)]


def test_seed_is_the_configured_one_and_seeds_torch() -> None:
    with pytorch.init(exp_conf={"reproducibility": {"experiment_seed": 42}}) as context:
        drawn = torch.rand(3)
        assert context.get_trial_seed() == 42
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(42)))


def test_device_is_the_cpu_without_a_gpu(context: PyTorchTrialContext) -> None:
    assert context.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_distributed_is_one_process(context: PyTorchTrialContext) -> None:
    assert (context.distributed.get_rank(), context.distributed.get_size()) == (0, 1)


def test_to_device_moves_nested_data(context: PyTorchTrialContext) -> None:
    moved = context.to_device({"x": [torch.ones(1)], "name": "a"})
    assert moved["x"][0].device.type == context.device.type
    assert moved["name"] == "a"


def test_wrapped_parts_are_listed_in_order(context: PyTorchTrialContext) -> None:
    models = [context.wrap_model(nn.Linear(1, 1)) for _ in range(2)]
    optimizers = [context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    assert context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.MANUAL_STEP) is scheduler
    assert (context.models, context.optimizers) == (models, optimizers)
    assert [type(one) for one in context.lr_schedulers] == [pytorch.LRScheduler]


def test_wrapping_a_model_twice_lists_it_once(context: PyTorchTrialContext) -> None:
    model = nn.Linear(1, 1)
    assert context.wrap_model(context.wrap_model(model)) is model
    assert len(context.models) == 1


def test_batches_stay_where_they_are_when_asked() -> None:
    class Batchlike:
        """Would have to be moved by a method it does not have."""

        def __init__(self, pair: Any) -> None:
            self.pair = pair

    def wrapped(samples: list[Any]) -> Batchlike:
        return Batchlike(torch.utils.data.default_collate(samples))

    class Trial(LineTrial):
        def __init__(self, context: PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.disable_auto_to_device()

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(line_data(), batch_size=4, collate_fn=wrapped)

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return self.build_training_data_loader()

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(self.context.to_device(batch.pair))

    assert len(fit(Trial, max_length=Batch(2)).seen) == 2


# TensorBoard


def test_tensorboard_path_is_a_folder_of_the_trial(context: PyTorchTrialContext, tmp_path: pathlib.Path) -> None:
    folder = context.get_tensorboard_path()
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path / "det-home" / "tensorboard")


def test_tensorboard_writer_is_one_summary_writer(context: PyTorchTrialContext) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = context.get_tensorboard_writer()
    assert isinstance(writer, SummaryWriter)
    assert context.get_tensorboard_writer() is writer
    writer.add_scalar("own/x", 1.0, 1)


def test_tensorboard_logging_can_be_switched(context: PyTorchTrialContext) -> None:
    answers = [context.get_enable_tensorboard_logging()]
    context.set_enable_tensorboard_logging(False)
    answers.append(context.get_enable_tensorboard_logging())
    assert answers == [True, False]


def test_init_sets_tensorboard_logging() -> None:
    with pytorch.init(enable_tensorboard_logging=False) as context:
        assert context.get_enable_tensorboard_logging() is False


# Contexts for loading


@pytest.mark.parametrize("call", ["get_experiment_id", "get_trial_id", "get_tensorboard_path"])
def test_a_context_for_loading_has_no_run(call: str) -> None:
    context = pytorch.CheckpointLoadContext(hparams={"lr": 1})
    with pytest.raises(errors.InternalException, match=r"with pytorch.init\(\)"):
        getattr(context, call)()


def test_a_context_for_loading_answers_for_hparams_and_config() -> None:
    context = pytorch.CheckpointLoadContext(hparams={"lr": 1}, exp_conf={"name": "x"})
    assert (context.get_hparam("lr"), context.get_experiment_config()) == (1, {"name": "x"})
