"""Training data that decides itself what comes next: iterable data sets and loaders of other makers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info
from torch.utils.data import DataLoader as TorchDataLoader

from cases import every
from determined import pytorch
from determined.pytorch import Batch, Epoch, samplers
from exactness import ExactTrial, Samples, check_exact, run
from trials import LineTrial, fit, line_data

pytestmark = [
    # Python 3.12 and later say so of every loader worker that torch forks beside another thread.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    # So does torch on machines with few cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Lines(IterableDataset[Any]):
    """The samples one after the other, shared between workers."""

    def __init__(self, size: int = 22) -> None:
        self.data = Samples(size)
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, len(self.data), step):
            self.reads += 1
            yield self.data[index]


class SizedLines(Lines):
    def __len__(self) -> int:
        return len(self.data)


class Remembering(Lines):
    """Knows its position, also that of the pass, and gives every pass another order."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            turn, place = divmod(self.position, len(self.data))
            self.reads += 1
            self.position += 1
            yield self.data[(place * 7 + turn) % len(self.data)]
            if self.position % len(self.data) == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Emptying(Remembering):
    """Says at the end of a pass that nothing is left of it, rather than that the next one begins."""

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.data):
            self.reads += 1
            self.position += 1
            yield self.data[self.position - 1]
        self.position = 0


class Noisy(Lines):
    """Draws random numbers in its workers."""

    def __iter__(self) -> Iterator[Any]:
        for index, x, y in super().__iter__():
            yield index, x + torch.rand(4), y


class StatefulLoader:
    """A loader of another maker that keeps its position."""

    def __init__(self) -> None:
        self.data, self.next, self.reads = Samples(), 0, 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        while self.next < 6:
            indices = range(4 * self.next, min(4 * self.next + 4, 22))
            self.next += 1
            self.reads += 1
            yield torch.utils.data.default_collate([self.data[index] for index in indices])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def trial_with(make: Callable[[], Any], *, checks: bool = True) -> type[ExactTrial]:
    """Return a trial that trains on the loader that `make` gives."""

    class Trial(ExactTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            if not checks:
                context.experimental.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            return make()

    return Trial


LOADERS: dict[str, Callable[[], Any]] = {
    "without a length": lambda: pytorch.DataLoader(Lines(), 4),
    "with a length": lambda: pytorch.DataLoader(SizedLines(), 4),
    "drop_last": lambda: pytorch.DataLoader(SizedLines(), 4, drop_last=True),
    "with state": lambda: pytorch.DataLoader(Remembering(), 4),
    "with a state that empties": lambda: pytorch.DataLoader(Emptying(), 4),
    "in workers": lambda: pytorch.DataLoader(Noisy(), 4, num_workers=2),
    "in persistent workers": lambda: pytorch.DataLoader(Noisy(), 4, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("name", every(3, LOADERS))
def test_iterable_data_goes_on_exactly(name: str) -> None:
    check_exact(trial_with(LOADERS[name]), [4, 6, 8])


OTHER_LOADERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: TorchDataLoader(Samples(), 4),
    "torch with shuffle": lambda: TorchDataLoader(Samples(noise=True), 4, shuffle=True),
    "torch with shuffle and generator": lambda: TorchDataLoader(
        Samples(noise=True), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "torch with shuffle and workers": lambda: TorchDataLoader(Samples(noise=True), 4, shuffle=True, num_workers=2),
    "torch with iterable data and state": lambda: TorchDataLoader(Emptying(), 4),
    "with state": StatefulLoader,
    "list": lambda: list(TorchDataLoader(Samples(), 4)),
}


@pytest.mark.parametrize("name", every(3, OTHER_LOADERS))
def test_loader_of_another_maker_goes_on_exactly(name: str) -> None:
    check_exact(trial_with(OTHER_LOADERS[name], checks=False), [4, 6, 8])


class SkippingTrial(ExactTrial):
    """Shards and skips by itself, with a loader of torch and no end."""

    asks_early = False

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()
        self.early_answer = context.get_initial_batch() if self.asks_early else None

    def build_training_data_loader(self) -> Any:
        skip = self.context.get_initial_batch() if self.early_answer is None else self.early_answer
        shuffled = samplers.ReproducibleShuffleSampler(range(22), seed=self.context.get_trial_seed())
        ranks = self.context.distributed
        batches = samplers.adapt_batch_sampler(
            BatchSampler(shuffled, 4, drop_last=False),
            repeat=True,
            skip=skip,
            num_replicas=ranks.get_size(),
            rank=ranks.get_rank(),
        )
        return TorchDataLoader(Samples(), batch_sampler=batches)


def test_loader_that_skips_by_itself_is_not_skipped_twice(caplog: pytest.LogCaptureFixture) -> None:
    check_exact(SkippingTrial, [4, 6, 8])
    assert "start after 8 batches" in caplog.text
    assert "read again" not in caplog.text


def test_loader_that_was_told_to_skip_nothing_is_read_to_its_position() -> None:
    class Trial(SkippingTrial):
        asks_early = True  # before fit() is given the checkpoint, which is too early in a local run

    check_exact(Trial, [4, 6, 8])


@pytest.mark.parametrize(
    ("data", "checks", "reads"), [(Remembering, True, 4), (Emptying, True, 4), (StatefulLoader, False, 1)]
)
def test_data_that_knows_its_position_is_not_read_again(
    data: Callable[[], Any], checks: bool, reads: int, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(data())
        return pytorch.DataLoader(made[-1], 4) if checks else made[-1]

    first = run(trial_with(make, checks=checks), max_length=Batch(8))
    run(trial_with(make, checks=checks), max_length=Batch(9), latest_checkpoint=first.checkpoints[8])
    assert made[-1].reads == reads
    assert "read again" not in caplog.text


def test_data_that_does_not_know_its_position_is_read_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first = run(trial_with(LOADERS["with a length"]), max_length=Batch(8))
    with caplog.at_level(logging.WARNING):
        run(trial_with(LOADERS["with a length"]), max_length=Batch(9), latest_checkpoint=first.checkpoints[8])
    assert "2 batches are read again" in caplog.text  # those of the second epoch
    assert "state_dict()" in caplog.text


@pytest.mark.parametrize(
    ("make", "checks"),
    [(LOADERS["with a length"], True), (OTHER_LOADERS["torch with shuffle"], False), (OTHER_LOADERS["list"], False)],
)
def test_resume_at_the_end_of_an_epoch_reads_nothing_again(
    make: Callable[[], Any], checks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trial_class = trial_with(make, checks=checks)
    check_exact(trial_class, [6], max_length=Batch(8))
    assert "read again" not in caplog.text


class Overestimating(Lines):
    def __len__(self) -> int:
        return 32  # 8 batches, of which a pass gives 6


class Underestimating(Lines):
    def __len__(self) -> int:
        return 16  # 4 batches, of which a pass gives 6


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize(("data", "length"), [(Overestimating, 8), (Underestimating, 4)])
def test_wrong_length_of_iterable_data_is_named_and_goes_on_exactly(
    data: type[Lines], length: int, caplog: pytest.LogCaptureFixture
) -> None:
    check_exact(trial_with(lambda: pytorch.DataLoader(data(), 4)), [6, 8, 10])
    assert f"had 6 batches, but its length, len(DataLoader), is {length}" in caplog.text


def test_data_with_a_length_has_epochs() -> None:
    assert [entry[:2] for entry in run(trial_with(LOADERS["with a length"]), max_length=Epoch(2)).log] == [
        (batch // 6, batch) for batch in range(12)
    ]


def test_data_without_a_length_has_one_endless_epoch() -> None:
    outcome = run(trial_with(LOADERS["without a length"]))
    assert [entry[:2] for entry in outcome.log] == [(0, batch) for batch in range(13)]
    assert outcome.events == [("start", 0)]


@pytest.mark.parametrize("argument", ["max_length", "validation_period", "checkpoint_period", "reporting_period"])
def test_epochs_of_data_without_a_length_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=r"Epoch\(2\).*no length.*pytorch\.Batch"):
        run(trial_with(LOADERS["without a length"]), **{argument: Epoch(2)})


@pytest.mark.parametrize("batches", [0, 3])
def test_data_that_gives_nothing_any_more_is_refused(batches: int) -> None:
    once = iter([(torch.zeros(2), torch.zeros(2, 4), torch.zeros(2, 1))] * batches)

    class Once:
        def __iter__(self) -> Iterator[Any]:
            return once

    with pytest.raises(ValueError, match="no batch in a whole pass"):
        run(trial_with(Once, checks=False))


def test_other_loader_without_batches_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="has no batches"):
        run(trial_with(lambda: TorchDataLoader(Samples(3), 4, drop_last=True), checks=False))


@pytest.mark.parametrize("method", ["build_training_data_loader", "build_validation_data_loader"])
def test_torch_loader_is_refused_naming_the_method_and_the_way_out(method: str) -> None:
    trial_class = type("Trial", (LineTrial,), {method: lambda self: TorchDataLoader(line_data(8), 4)})
    with pytest.raises(RuntimeError, match=rf"{method}\(\).*disable_dataset_reproducibility_checks\(\)"):
        fit(trial_class)


def test_torch_loaders_are_used_if_the_checks_are_off() -> None:
    class Trial(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            return TorchDataLoader(line_data(8), 4, shuffle=True)

        build_validation_data_loader = build_training_data_loader

    assert fit(Trial, max_length=Epoch(2)).seen == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_validation_data_may_be_iterable() -> None:
    class Trial(ExactTrial):
        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Lines(10), 4, num_workers=1)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": self.loss(batch[1:]), "samples": len(batch[0])}

        def evaluation_reducer(self) -> pytorch.Reducer:
            return pytorch.Reducer.SUM

    outcome = run(Trial, max_length=Batch(2))
    assert outcome.metrics[-1][2]["samples"] == 10
