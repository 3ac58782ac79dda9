"""SIGTERM and SIGINT in every phase of a training, and what a resume makes of it."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics

from determined import pytorch
from determined.pytorch import Batch
from exactness import ExactTrial, Samples, plain
from trials import LineTrial, records, saved_at, steps_of, trainer

SIGNALS = [signal.SIGTERM, signal.SIGINT]


class Largest(pytorch.MetricReducer):
    """A reducer of the user's own, with plain attributes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.largest = -1.0

    def update(self, value: float) -> None:
        self.largest = max(self.largest, value)

    def per_slot_reduce(self) -> float:
        return self.largest

    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> float:
        return max(per_slot_metrics)


class Alarm:
    """Raises a signal when the moment comes: a phase, and how many times it is reached before."""

    def __init__(self, phase: str, count: int, signals: list[signal.Signals]) -> None:
        self.phase, self.count, self.signals = phase, count, signals

    def at(self, phase: str) -> None:
        if phase == self.phase:
            self.count -= 1
            if self.count == 0:
                for which in self.signals:
                    signal.raise_signal(which)


SILENT = Alarm("never", 0, [])


class SignalledSamples(Samples):
    alarm = SILENT

    def __getitem__(self, index: int) -> Any:
        self.alarm.at("loading")
        return super().__getitem__(index)


class Hooks(pytorch.PyTorchCallback):
    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm

    def on_training_start(self) -> None:
        self.alarm.at("training_start")

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.alarm.at("epoch_end")

    def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
        self.alarm.at("workload_end")

    def on_validation_start(self) -> None:
        self.alarm.at("validation_start")

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.alarm.at("validation_end")

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self.alarm.at("save")

    def on_checkpoint_write_end(self, checkpoint_dir: pathlib.Path) -> None:
        self.alarm.at("write")

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.alarm.at("upload")


class RichTrial(ExactTrial):
    """Has a scheduler, reducers of every kind in training and validation, and random numbers everywhere."""

    alarm = SILENT

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.function = context.wrap_reducer(sum, "sum of losses")
        self.own = context.wrap_reducer(Largest(), "largest")
        self.average = context.wrap_reducer(torchmetrics.MeanMetric(), "torchmetrics")

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {**super().build_callbacks(), "hooks": Hooks(self.alarm)}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        data = SignalledSamples(noise=True)
        data.alarm = self.alarm
        return pytorch.DataLoader(data, batch_size=4, shuffle=True)

    def update(self, loss: torch.Tensor) -> None:
        self.function.update(loss.item())
        self.own.update(loss.item())
        self.average.update(loss.detach())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.alarm.at("train")
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        self.update(metrics["loss"])
        return metrics

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.alarm.at("evaluate")
        loss = self.loss(batch) + torch.rand(1).item()
        self.update(loss)
        return {"validation_loss": loss}


FIT: dict[str, Any] = {
    "max_length": Batch(13),
    "reporting_period": Batch(5),
    "validation_period": Batch(4),
    "checkpoint_policy": "none",
}


def train(alarm: Alarm = SILENT, latest: str | None = None, base: type[RichTrial] = RichTrial, **fit: Any) -> Any:
    """Train a trial that gets signals, and return (all that a resume must bring back, the run's metrics, its id)."""
    trial_class = type("Trial", (base,), {"alarm": alarm})
    with trainer(trial_class) as (its_trainer, trial):
        its_trainer.fit(**(FIT | fit), latest_checkpoint=latest)
        trial_id = trial.context.get_trial_id()
        state = plain([part.state_dict() for part in (trial.model, trial.optimizer, *trial.context.lr_schedulers)])
    return state, trial.memory.state_dict()["losses"].tolist(), history(trial_id)


def history(trial_id: int) -> list[Any]:
    return [(r.group, r.steps_completed, r.metrics) for r in records().history(trial_id)]


def stop(phase: str, count: int, which: signal.Signals, **fit: Any) -> str:
    """Train until a signal stops it; return the id of the one checkpoint at which it did."""
    with pytest.raises(SystemExit) as caught:
        train(Alarm(phase, count, [which]), **fit)
    assert caught.value.code == 128 + which
    return records().checkpoints()[-1].uuid


PHASES = [
    ("training_start", 1, 0),
    ("loading", 15, 4),  # in batch 3 of four samples each; a validation is due when it ends
    ("train", 1, 1),
    ("train", 4, 4),  # a validation is due
    ("train", 5, 5),  # a report is due
    ("train", 7, 7),
    ("train", 13, 13),  # all is trained, and the last validation not done
    ("epoch_end", 1, 6),
    ("workload_end", 1, 4),
    ("validation_start", 1, 4),
    ("evaluate", 1, 4),
    ("evaluate", 4, 8),
    ("evaluate", 7, 13),  # in the last validation
    ("validation_end", 2, 8),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What a run without a break leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(tmp_path_factory.mktemp("whole")))
        patch.setenv("DET_PROGRESS", "0")
        torch.set_num_threads(1)
        yield train()


@pytest.mark.parametrize(("phase", "count", "stopped_at"), PHASES)
def test_stop_in_any_phase_saves_once_at_a_batch_and_resumes_exactly(
    whole: Any, phase: str, count: int, stopped_at: int
) -> None:
    which = SIGNALS[count % 2]
    checkpoint = stop(phase, count, which)
    assert saved_at(1) == [stopped_at]
    torch.manual_seed(99)  # nothing may depend on the state of this process
    assert train(latest=checkpoint) == whole


@pytest.mark.parametrize("phase", ["save", "write", "upload"])
@pytest.mark.parametrize("which", SIGNALS)
def test_stop_while_saving_completes_that_checkpoint_and_saves_no_other(phase: str, which: signal.Signals) -> None:
    checkpoint = stop(phase, 1, which, checkpoint_period=Batch(3))
    assert saved_at(1) == [3]
    resumed, without_a_break = (train(latest=latest, checkpoint_period=Batch(3)) for latest in (checkpoint, None))
    assert resumed == without_a_break


def test_stops_one_after_another_resume_exactly(whole: Any) -> None:
    latest = None
    for phase, count in (("train", 2), ("evaluate", 1), ("train", 1), ("validation_end", 1), ("train", 2)):
        with pytest.raises(SystemExit):
            train(Alarm(phase, count, [signal.SIGTERM]), latest)
        latest = records().checkpoints()[-1].uuid
    assert saved_at(2) == [4]
    assert train(latest=latest) == whole


def test_stop_does_not_wait_for_the_reporting_period() -> None:
    stop("train", 3, signal.SIGTERM, reporting_period=Batch(1000), validation_period=None, max_length=Batch(5000))
    assert saved_at(1) == [3]
    assert steps_of("training") == [3]


def test_abandoned_validation_is_not_reported() -> None:
    stop("evaluate", 1, signal.SIGTERM)
    assert steps_of("validation") == []


def test_step_zero_validation_is_not_repeated_by_the_resume() -> None:
    checkpoint = stop("validation_end", 1, signal.SIGTERM, step_zero_validation=True)
    assert saved_at(1) == [0]
    *_, reports = train(latest=checkpoint, step_zero_validation=True)
    assert [step for group, step, _ in reports if group == "validation"] == [0, 4, 8, 12, 13]


def test_should_exit_after_a_validation_leaves_nothing_of_it_in_the_training_metrics() -> None:
    class Leaving(RichTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            class Leave(pytorch.PyTorchCallback):
                def on_validation_end(self, metrics: dict[str, Any]) -> None:
                    raise pytorch.ShouldExit

            return {**super().build_callbacks(), "leave": Leave()}

    train(base=Leaving)
    resumed = train(latest=records().checkpoints()[-1].uuid)
    assert resumed[2] == train()[2]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_interrupt_after_a_signal_interrupts_at_once(first: signal.Signals, phase: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Alarm(phase, 1, [first, signal.SIGINT]))
    assert saved_at(1) == []


@pytest.mark.parametrize("ending", [None, ZeroDivisionError("in the block")])
def test_handlers_are_given_back_when_init_ends(ending: Exception | None) -> None:
    def own(signum: int, frame: Any) -> None: ...

    before = {which: signal.signal(which, own) for which in SIGNALS}
    try:
        with contextlib.suppress(ZeroDivisionError), trainer():
            assert own not in [signal.getsignal(which) for which in SIGNALS]
            if ending is not None:
                raise ending
        assert [signal.getsignal(which) for which in SIGNALS] == [own, own]
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


@pytest.mark.parametrize("when", ["before fit", "after fit"])
def test_signal_while_no_fit_runs_goes_to_the_handler_before(when: str) -> None:
    heard: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda *arguments: heard.append(arguments))
    try:
        with trainer() as (its_trainer, _):
            if when == "after fit":
                its_trainer.fit(max_length=Batch(1))
            signal.raise_signal(signal.SIGTERM)
            if when == "before fit":
                its_trainer.fit(max_length=Batch(1))
    finally:
        signal.signal(signal.SIGTERM, before)
    ((signum, frame),) = heard
    assert signum == signal.SIGTERM
    assert frame is not None


def test_fit_on_a_thread_leaves_the_handlers_alone_and_trains() -> None:
    before = [signal.getsignal(which) for which in SIGNALS]
    during: list[Any] = []

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            during.append([signal.getsignal(which) for which in SIGNALS])
            return super().train_batch(batch, epoch_idx, batch_idx)

    def work() -> None:
        with trainer(Trial) as (its_trainer, _):
            its_trainer.fit(max_length=Batch(3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert during == [before] * 3
    assert saved_at() == [3]


def test_program_that_uses_sigusr1_keeps_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: heard.append(signum))
    try:
        with trainer():
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1] * 2
