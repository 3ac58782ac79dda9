"""The order in which a run calls what a trial brings."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import determined as det
import trials
from determined import pytorch
from determined.pytorch import Batch

HOOKS = [name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_") and name != "on_checkpoint_end"]
SHORT = {"on_trial_startup": "startup", "on_trial_shutdown": "shutdown", "on_training_start": "start"}


def short(hook: str) -> str:
    return SHORT.get(hook, hook.removeprefix("on_"))


def recording_hook(hook: str) -> Callable[..., None]:
    def call(self: Any, *args: Any) -> None:
        self.record(hook, *args)

    return call


class TrialWriter(pytorch.PyTorchCallback):
    """Writes down every call, with the numbers that arrive."""

    def __init__(self, trial: RecordedTrial) -> None:
        self.trial = trial

    def record(self, hook: str, *args: Any) -> None:
        numbers = [str(arg) for arg in args if isinstance(arg, int) or arg is None]
        self.trial.note(" ".join([short(hook), *numbers]))


for name in HOOKS:
    setattr(TrialWriter, name, recording_hook(name))


class RecordedTrial(trials.LineTrial):
    """Four batches an epoch, two validation batches; fails where a test says so."""

    samples = 16
    fails_at: str | None = None
    failure: BaseException = RuntimeError("as asked")

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise self.failure

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.note("build_callbacks")
        return {"recorder": TrialWriter(self)}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.note("build_training")
        return super().build_training_data_loader()

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        self.note("build_validation")
        return super().build_validation_data_loader()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.note(f"train {epoch_idx} {batch_idx}")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.note(f"evaluate {batch_idx}")
        return super().evaluate_batch(batch, batch_idx)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


BEGINNING = lines("""
    build_callbacks
    startup 0 None
    build_training
    build_validation
    start
""")
VALIDATION = lines("""
    validation_start
    validation_epoch_start
    evaluate 0
    evaluate 1
    validation_epoch_end
    validation_end
""")
CHECKPOINT = lines("""
    checkpoint_save_start
    checkpoint_write_end
    checkpoint_upload_end
""")
WINDOW = ["training_workload_end"]
END = ["shutdown"]


def calls_of(trial_class: type[RecordedTrial] = RecordedTrial, **fit: Any) -> list[str]:
    return list(trials.fit(trial_class, **fit).calls)


def test_everything_on_one_batch_comes_once_and_in_order() -> None:
    everything = calls_of(
        max_length=Batch(4),
        reporting_period=Batch(2),
        validation_period=Batch(4),
        checkpoint_period=Batch(4),
        checkpoint_policy="all",
    )
    assert everything == [
        *BEGINNING,
        "training_epoch_start 0",
        "train 0 0",
        "train 0 1",
        *WINDOW,
        "train 0 2",
        "train 0 3",
        "training_epoch_end 0",
        *WINDOW,
        *VALIDATION,
        *CHECKPOINT,
        *END,
    ]


def test_periodic_checkpoint_follows_validation() -> None:
    calls = calls_of(max_length=Batch(2), validation_period=Batch(1), checkpoint_period=Batch(1))
    batch = [*WINDOW, *VALIDATION, *CHECKPOINT]
    assert calls[len(BEGINNING) :] == ["training_epoch_start 0", "train 0 0", *batch, "train 0 1", *batch, *END]


def test_best_validation_is_saved_before_the_periodic_checkpoint_would_be() -> None:
    calls = calls_of(
        max_length=Batch(1), validation_period=Batch(1), checkpoint_period=Batch(1), checkpoint_policy="best"
    )
    assert calls[-11:] == [*WINDOW, *VALIDATION, *CHECKPOINT, *END]


def test_epochs_end_before_their_window_does() -> None:
    calls = calls_of(max_length=pytorch.Epoch(2), reporting_period=Batch(100))
    assert [call for call in calls if ("epoch" in call and "validation" not in call) or call in WINDOW] == [
        "training_epoch_start 0",
        "training_epoch_end 0",
        "training_epoch_start 1",
        "training_epoch_end 1",
        *WINDOW,
    ]


def test_step_zero_validation_comes_between_start_and_the_first_batch() -> None:
    calls = calls_of(max_length=Batch(1), step_zero_validation=True)
    train = ["training_epoch_start 0", "train 0 0", *WINDOW]
    assert calls == [*BEGINNING, *VALIDATION, *train, *VALIDATION, *CHECKPOINT, *END]


def latest_checkpoint() -> pathlib.Path:
    from determined import tracking
    from determined._home import home

    return pathlib.Path(tracking.TrackingReader(home().database).checkpoints()[-1].path)


@pytest.fixture
def half_trained() -> pathlib.Path:
    """A checkpoint after 2 batches, in the middle of the first epoch."""
    trials.fit(max_length=Batch(2), trial_class=RecordedTrial)
    return latest_checkpoint()


def test_resumed_run_loads_after_building_data_and_goes_on_within_the_epoch(half_trained: pathlib.Path) -> None:
    calls = calls_of(max_length=Batch(4), latest_checkpoint=str(half_trained), step_zero_validation=True)
    assert calls == [
        "build_callbacks",
        "startup 2",
        "build_training",
        "build_validation",
        "checkpoint_load_start",
        "start",
        "train 0 2",
        "train 0 3",
        "training_epoch_end 0",
        *WINDOW,
        *VALIDATION,
        *CHECKPOINT,
        *END,
    ]


def test_startup_is_told_the_checkpoint(half_trained: pathlib.Path) -> None:
    told = []

    class Told(trials.LineTrial):
        samples = 16

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            class Listener(pytorch.PyTorchCallback):
                def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
                    told.append((first_batch_idx, checkpoint_uuid))

            return {"listener": Listener()}

    trials.fit(Told, max_length=Batch(3), latest_checkpoint=half_trained.name)
    assert told == [(2, half_trained.name)]


def test_a_run_that_is_already_trained_does_nothing_twice(half_trained: pathlib.Path) -> None:
    calls = calls_of(max_length=Batch(2), latest_checkpoint=str(half_trained))
    assert calls[4:] == ["checkpoint_load_start", "start", *END]


def failing(where: str, error: BaseException | None = None) -> tuple[list[str], BaseException]:
    """The calls of a run that fails at a call, and what came out of it."""

    class Failing(RecordedTrial):
        fails_at = where
        failure = error or RuntimeError("as asked")

    kept: list[RecordedTrial] = []
    with pytest.raises(BaseException) as caught, trials.trainer(Failing) as (trainer, trial):  # noqa: PT012
        kept.append(trial)
        trainer.fit(
            max_length=Batch(4), validation_period=Batch(2), checkpoint_period=Batch(3), checkpoint_policy="none"
        )
    return kept[0].calls, caught.value


TO_VALIDATION = [*BEGINNING, "training_epoch_start 0", "train 0 0", "train 0 1", *WINDOW]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("build_callbacks", ["build_callbacks"]),
        ("startup 0 None", [*BEGINNING[:2], *END]),
        ("build_training", [*BEGINNING[:3], *END]),
        ("build_validation", [*BEGINNING[:4], *END]),
        ("start", [*BEGINNING, *END]),
        ("training_epoch_start 0", [*BEGINNING, "training_epoch_start 0", *END]),
        ("train 0 1", [*TO_VALIDATION[:-1], *END]),
        ("training_workload_end", [*TO_VALIDATION, *END]),
        ("validation_start", [*TO_VALIDATION, *VALIDATION[:1], *END]),
        ("evaluate 1", [*TO_VALIDATION, *VALIDATION[:4], *END]),
        ("validation_end", [*TO_VALIDATION, *VALIDATION, *END]),
    ],
)
def test_an_exception_saves_nothing_shuts_down_and_goes_on_unchanged(where: str, expected: list[str]) -> None:
    error = RuntimeError("as asked")
    calls, raised = failing(where, error)
    assert calls == expected
    assert raised is error


@pytest.mark.parametrize("where", ["checkpoint_save_start", "checkpoint_write_end"])
def test_an_exception_while_saving_leaves_no_checkpoint(where: str, tmp_path: pathlib.Path) -> None:
    calls, _ = failing(where)
    assert calls[-2:] == [where, *END]
    assert list((tmp_path / "det-home" / "checkpoints").glob("*")) == []


def test_an_exception_in_shutdown_goes_on() -> None:
    _, raised = failing("shutdown")
    assert str(raised) == "as asked"


@pytest.mark.parametrize("skip", [False, True])
def test_should_exit_from_a_batch_saves_unless_told_not_to(skip: bool) -> None:
    class Leaving(RecordedTrial):
        fails_at = "train 0 1"
        failure = pytorch.ShouldExit(skip_exit_checkpoint=skip)

    saved = [] if skip else CHECKPOINT
    calls = calls_of(Leaving, max_length=Batch(4))
    assert calls == [*BEGINNING, "training_epoch_start 0", "train 0 0", "train 0 1", *saved, *WINDOW, *END]


def test_should_exit_from_a_callback_after_a_validation_saves() -> None:
    class Leaving(RecordedTrial):
        fails_at = "validation_end"
        failure = pytorch.ShouldExit()

    calls = calls_of(Leaving, max_length=Batch(4), validation_period=Batch(2))
    assert calls == [*TO_VALIDATION, *VALIDATION, *CHECKPOINT, *END]


def test_should_exit_saves_only_what_is_not_saved_yet() -> None:
    class Leaving(RecordedTrial):
        fails_at = "checkpoint_upload_end"
        failure = pytorch.ShouldExit()

    calls = calls_of(Leaving, max_length=Batch(4), checkpoint_period=Batch(2))
    assert calls == [*TO_VALIDATION, *CHECKPOINT, *END]


class StoppingTrial(RecordedTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.context.set_stop_requested(True)
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_stop_request_finishes_the_batch_and_saves() -> None:
    calls = calls_of(StoppingTrial, max_length=Batch(4))
    assert calls == [*BEGINNING, "training_epoch_start 0", "train 0 0", "train 0 1", *CHECKPOINT, *WINDOW, *END]


def test_validation_that_is_due_at_the_batch_of_a_stop_request_is_left_for_the_resume() -> None:
    calls = calls_of(StoppingTrial, max_length=Batch(4), validation_period=Batch(2), checkpoint_period=Batch(2))
    assert calls == [*TO_VALIDATION, *CHECKPOINT, *END]


def test_invalid_hp_saves_and_ends_the_process_with_status_zero() -> None:
    calls, raised = failing("train 0 1", det.InvalidHP("lr is too large"))
    assert calls == [*TO_VALIDATION[:-1], *CHECKPOINT, *WINDOW, *END]
    assert isinstance(raised, SystemExit)
    assert raised.code == 0


def test_invalid_hp_does_not_save_what_is_saved() -> None:
    calls, _ = failing("checkpoint_upload_end", det.InvalidHP("no"))
    assert calls.count("checkpoint_save_start") == 1


def test_invalid_hp_leaves_fit_as_itself() -> None:
    class Failing(RecordedTrial):
        fails_at = "train 0 0"
        failure = det.InvalidHP("no")

    with trials.trainer(Failing) as (trainer, _), pytest.raises(det.InvalidHP, match="no"):
        trainer.fit(max_length=Batch(2))


def test_invalid_hp_is_recorded_as_an_early_exit() -> None:
    from determined import tracking
    from determined._home import home

    failing("build_training", det.InvalidHP("no data for this"))
    (trial,) = tracking.TrackingReader(home().database).trials(1)
    assert trial.status == det.core.EarlyExitReason.INVALID_HP.value
    assert trial.state is tracking.RunState.COMPLETED
    assert "no data for this" in str(trial.reason)


def test_epoch_hooks_without_argument_still_work() -> None:
    called = []

    class Old(pytorch.PyTorchCallback):
        def on_training_epoch_start(self) -> None:  # type: ignore[override]
            called.append("start")

        def on_training_epoch_end(self) -> None:  # type: ignore[override]
            called.append("end")

    class OldTrial(trials.LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"old": Old()}

    trials.fit(OldTrial, max_length=pytorch.Epoch(2))
    assert called == ["start", "end"] * 2


def test_old_checkpoint_hook_gets_the_folder_and_is_deprecated() -> None:
    folders = []

    class Old(pytorch.PyTorchCallback):
        def on_checkpoint_end(self, checkpoint_dir: str) -> None:
            folders.append(pathlib.Path(checkpoint_dir, "state_dict.pth").exists())

    class OldTrial(trials.LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"old": Old()}

    with pytest.warns(DeprecationWarning, match="on_checkpoint_end.*override on_checkpoint_write_end") as caught:
        trials.fit(OldTrial)
    assert folders == [True]
    assert caught[0].filename == trials.__file__, "the warning must point at the program's fit()"


def test_callbacks_without_the_old_hook_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trials.fit(RecordedTrial, max_length=Batch(1))


def test_evaluate_batch_without_index_still_works() -> None:
    class OldTrial(trials.LineTrial):
        def evaluate_batch(self, batch: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"validation_loss": self.loss(batch)}

    assert trials.fit(OldTrial, max_length=Batch(1)).seen == [(0, 0)]


def test_evaluate_batch_with_an_option_but_without_index_works() -> None:
    class OldTrial(trials.LineTrial):
        def evaluate_batch(self, batch: Any, *, flag: bool = True) -> dict[str, Any]:  # type: ignore[override]
            return {"validation_loss": self.loss(batch) if flag else None}

    assert trials.fit(OldTrial, max_length=Batch(1)).seen == [(0, 0)]


def test_callbacks_run_in_the_order_of_the_dict() -> None:
    order: list[str] = []

    class Named(pytorch.PyTorchCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_training_start(self) -> None:
            order.append(self.name)

    class Trial(trials.LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {name: Named(name) for name in ("b", "a", "c")}

    trials.fit(Trial, max_length=Batch(1))
    assert order == ["b", "a", "c"]
