"""`CheckpointLoadContext`: what a trial may ask for when it is built without a run."""

from __future__ import annotations

import textwrap

import pytest

import determined as det
from determined import pytorch
from saving import change_file, program_in, save
from trials import LineTrial

load = pytorch.load_trial_from_checkpoint_path


def test_context_has_the_saved_hparams_and_config() -> None:
    folder = save(hparams={"global_batch_size": 8}, exp_conf={"name": "lines"})
    context = load(folder).context
    assert isinstance(context, pytorch.CheckpointLoadContext)
    assert context.get_hparams() == {"global_batch_size": 8}
    assert context.get_per_slot_batch_size() == 8
    assert context.get_experiment_config() == {"name": "lines"}


@pytest.mark.parametrize(
    "call",
    [
        "get_experiment_id",
        "get_trial_id",
        "is_epoch_start",
        "is_epoch_end",
        "current_train_epoch",
        "current_train_batch",
        "get_tensorboard_path",
        "get_tensorboard_writer",
        "get_enable_tensorboard_logging",
    ],
)
def test_calls_that_need_a_run_say_so(call: str) -> None:
    with pytest.raises(det.errors.InternalException, match=r"not to train it|Trainer\.fit"):
        getattr(pytorch.CheckpointLoadContext(), call)()


def test_training_with_a_load_context_is_refused() -> None:
    context = pytorch.CheckpointLoadContext()
    its_trainer = pytorch.Trainer(LineTrial(context), context)
    with pytest.raises(det.errors.InternalException, match=r"pytorch\.init"):
        its_trainer.fit(max_length=pytorch.Batch(1))


def test_context_without_hparams_names_the_argument() -> None:
    with pytest.raises(ValueError, match="hparams"):
        pytorch.CheckpointLoadContext().get_hparams()


def test_trial_may_use_everything_of_the_context_that_a_constructor_uses() -> None:
    source = """
    class Rich(LineTrial):
        def __init__(self, context):
            context.experimental.use_amp()
            context.experimental.disable_dataset_reproducibility_checks()
            super().__init__(context)
            steps = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            context.wrap_lr_scheduler(steps, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)
            self.mean = context.wrap_reducer(lambda values: sum(values) / len(values), name="mean")
            self.seen_by = context.device, context.distributed.get_rank(), context.get_trial_seed()
    """
    folder = save()
    code = program_in(folder) / "trials.py"
    change_file(code, code.read_text() + "\n\n" + textwrap.dedent(source))
    description = folder / "load_data.json"
    change_file(description, description.read_text().replace("trials:LineTrial", "trials:Rich"))
    assert load(folder).seen_by[1] == 0
