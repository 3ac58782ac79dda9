"""The data of a resumed run goes on in the same order, whatever decides the order, and at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cases import every
from determined import pytorch
from determined.pytorch import Batch, samplers
from exactness import ExactTrial, Samples, check_exact, check_same_end, run

pytestmark = [
    # Python 3.12 and later say so of every loader worker that torch forks beside another thread.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    # So does torch on machines with few cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Reversed(Sampler[int]):
    """A sampler of the user's: no randomness."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(21, -1, -1))

    def __len__(self) -> int:
        return 22


class DrawingSampler(Reversed):
    """A sampler of the user's that draws from the global generators, while it is iterated."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(22):
            yield (random.randrange(22) + int(np.random.randint(22)) + int(torch.randint(22, ()))) % 22


class EpochSampler(Reversed):
    """A sampler of the user's with its own way to know the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % 22 for i in range(22)])


class OwnDraws(Reversed):
    """A sampler of the user's with a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.draws = np.random.RandomState(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.permutation(22).tolist())


class OwnOrder(Reversed):
    """A sampler of the user's that shuffles again what it shuffled."""

    def __init__(self) -> None:
        self.order = list(range(22))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


LOADERS: dict[str, Callable[[Dataset[Any]], pytorch.DataLoader]] = {
    "drop_last": lambda data: pytorch.DataLoader(data, 4, shuffle=True, drop_last=True),
    "one batch an epoch": lambda data: pytorch.DataLoader(data, 30, shuffle=True),
    "shuffle with generator": lambda data: pytorch.DataLoader(data, 4, shuffle=True, generator=generator()),
    "custom sampler": lambda data: pytorch.DataLoader(data, 4, sampler=Reversed()),
    "drawing sampler": lambda data: pytorch.DataLoader(data, 4, sampler=DrawingSampler()),
    "drawing sampler, workers": lambda data: pytorch.DataLoader(data, 4, sampler=DrawingSampler(), num_workers=2),
    "epoch sampler": lambda data: pytorch.DataLoader(data, 4, sampler=EpochSampler()),
    "sampler with draws of its own": lambda data: pytorch.DataLoader(data, 4, sampler=OwnDraws()),
    "sampler with an order of its own": lambda data: pytorch.DataLoader(data, 4, sampler=OwnOrder()),
    "batch_sampler with draws of its own": lambda data: pytorch.DataLoader(
        data, batch_sampler=BatchSampler(OwnDraws(), 5, True)
    ),
    "list as sampler": lambda data: pytorch.DataLoader(data, 4, sampler=list(range(0, 22, 2)) * 2),
    "batch_sampler": lambda data: pytorch.DataLoader(data, batch_sampler=BatchSampler(DrawingSampler(), 5, True)),
    "list as batch_sampler": lambda data: pytorch.DataLoader(data, batch_sampler=[[0, 1], [5, 7], [2, 3, 4], [6, 8]]),
    "random": lambda data: pytorch.DataLoader(data, 4, sampler=RandomSampler(data)),
    "random with generator": lambda data: pytorch.DataLoader(
        data,
        4,
        sampler=RandomSampler(data, generator=generator()),
    ),
    "random with replacement": lambda data: pytorch.DataLoader(
        data,
        4,
        sampler=RandomSampler(data, replacement=True, num_samples=18, generator=generator()),
    ),
    "weighted": lambda data: pytorch.DataLoader(
        data, 4, sampler=WeightedRandomSampler(list(range(1, 23)), 22, generator=generator())
    ),
    "subset": lambda data: pytorch.DataLoader(data, 4, sampler=SubsetRandomSampler(range(3, 21))),
    "reproducible": lambda data: pytorch.DataLoader(
        data, 4, sampler=samplers.ReproducibleShuffleSampler(SequentialSampler(range(22)), seed=3)
    ),
    "reproducible batches": lambda data: pytorch.DataLoader(
        data,
        batch_sampler=samplers.ReproducibleShuffleBatchSampler(
            BatchSampler(RandomSampler(range(22)), 4, False), seed=3
        ),
    ),
}


@pytest.mark.parametrize("name", every(3, LOADERS))
def test_sampler_goes_on(name: str) -> None:
    class Trial(ExactTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return LOADERS[name](Samples())

    whole = check_exact(Trial, [4, 6], max_length=Batch(11))
    assert len(whole.log) == 11


def test_drawing_epochs_again_is_said_with_the_way_to_avoid_it(caplog: pytest.LogCaptureFixture) -> None:
    stream = pytorch.DataLoader(range(22), 11, sampler=OwnDraws()).get_data_loader(repeat=True, skip=7)
    next(iter(stream))
    (message,) = caplog.messages
    assert "OwnDraws" in message
    assert "3 epochs" in message
    assert "set_epoch(epoch)" in message


def test_sampler_kept_by_the_program_goes_on_in_the_same_process() -> None:
    kept = RandomSampler(range(22), generator=generator())

    class Trial(ExactTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Samples(), 4, sampler=kept)

    check_exact(Trial, [8])


@pytest.mark.parametrize("noise", [True, False])
def test_validation_between_with_shuffle_and_workers_disturbs_nothing(noise: bool) -> None:
    class Trial(ExactTrial):
        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Samples(10, noise), 4, shuffle=True, num_workers=2)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": self.loss(batch[1:]), "first": batch[0][0]}

    check_exact(Trial, [4], validation_period=Batch(3))


# Seeds


UNSEEDED: dict[str, Any] = {"exp_conf": None}


@pytest.fixture
def unseeded_process() -> Iterator[None]:
    """Torch's generator as a new process has it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(torch.Generator().initial_seed())
    yield
    torch.set_rng_state(before)


class UnseededTrial(ExactTrial):
    """Shuffles its validation data too, and does not seed anything itself."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        state = torch.get_rng_state()
        super().__init__(context)
        torch.set_rng_state(state)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Samples(10), 4, shuffle=True)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch[1:]), "order": (batch[0] * 100**batch_idx).sum()}


@pytest.mark.usefixtures("unseeded_process")
def test_seed_that_nobody_gave_is_taken_over() -> None:
    fit: dict[str, Any] = {"checkpoint_period": Batch([4]), "validation_period": Batch(3)}
    whole = run(UnseededTrial, UNSEEDED, **fit)
    torch.manual_seed(0)
    resumed = run(UnseededTrial, UNSEEDED, latest_checkpoint=whole.checkpoints[4], **fit)
    check_same_end(resumed, whole, 4)
    assert resumed.record.seed == whole.record.seed


class NoisyStream(IterableDataset[Any]):
    """Draws random numbers where it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Samples(noise=True))


@pytest.mark.usefixtures("unseeded_process")
def test_workers_of_iterable_data_go_on_by_the_seed_that_nobody_gave() -> None:
    class Trial(UnseededTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(NoisyStream(), 4, num_workers=1)

    whole = run(Trial, UNSEEDED, checkpoint_period=Batch([4]), max_length=Batch(8))
    torch.manual_seed(0)
    resumed = run(Trial, UNSEEDED, latest_checkpoint=whole.checkpoints[4], max_length=Batch(8))
    check_same_end(resumed, whole, 4)


@pytest.mark.usefixtures("unseeded_process")
def test_seed_of_the_program_itself_decides_the_order_and_is_taken_over() -> None:
    outcomes = []
    for seed in (31337, 31337, 31338):  # which no other test of this process has configured
        torch.manual_seed(seed)
        outcomes.append(run(UnseededTrial, UNSEEDED, checkpoint_period=Batch([4]), max_length=Batch(8)))
    orders = [[entry[2] for entry in outcome.log] for outcome in outcomes]
    assert orders[0] == orders[1] != orders[2]
    resumed = run(UnseededTrial, UNSEEDED, latest_checkpoint=outcomes[0].checkpoints[4], max_length=Batch(8))
    check_same_end(resumed, outcomes[0], 4)


def test_another_seed_now_does_not_change_the_order() -> None:
    whole = run(ExactTrial, checkpoint_period=Batch([4]))
    other = {"exp_conf": {"reproducibility": {"experiment_seed": 6}}}
    check_same_end(run(ExactTrial, other, latest_checkpoint=whole.checkpoints[4]), whole, 4)


# Far positions


FAR = 10**9


class Counting(Samples):
    """Counts what is read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        type(self).reads += 1
        return super().__getitem__(index)


class CountingSampler(EpochSampler):
    """Counts the index lists that are drawn."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        type(self).passes += 1
        return super().__iter__()


def test_going_to_a_far_position_reads_no_data_and_draws_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "reads", 0)
    monkeypatch.setattr(CountingSampler, "passes", 0)

    class Trial(ExactTrial):
        """Pretends in its checkpoint to have trained for long."""

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            class Pretend(pytorch.PyTorchCallback):
                def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
                    checkpoint["loop"]["progress"] |= {"batches_trained": FAR, "epochs_trained": FAR // 6}

            return {"pretend": Pretend()}

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Counting(), 4, sampler=CountingSampler())

    (uuid,) = run(Trial, max_length=Batch(1)).checkpoints.values()
    Counting.reads = CountingSampler.passes = 0
    resumed = run(Trial, max_length=Batch(FAR + 1), latest_checkpoint=uuid)
    assert [entry[:2] for entry in resumed.log] == [(FAR // 6, FAR)]
    assert Counting.reads == 4
    assert CountingSampler.passes == 1


def test_data_of_another_length_is_said() -> None:
    class Shorter(ExactTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Samples(8), 4)

    first = run(ExactTrial, max_length=Batch(8))
    with pytest.warns(UserWarning, match="another length"):
        resumed = run(Shorter, latest_checkpoint=first.checkpoints[8], max_length=Batch(10))
    assert [entry[:2] for entry in resumed.log] == [(4, 8), (4, 9)]


@pytest.mark.usefixtures("unseeded_process")
def test_seed_that_the_trial_gives_torch_makes_runs_repeat_and_is_recorded() -> None:
    class SeedingTrial(UnseededTrial):
        seed = 3

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            torch.manual_seed(self.seed)
            np.random.seed(self.seed)
            random.seed(self.seed)

    fit: dict[str, Any] = {"max_length": Batch(8)}
    first, again = run(SeedingTrial, UNSEEDED, **fit), run(SeedingTrial, UNSEEDED, **fit)
    SeedingTrial.seed = 4
    other = run(SeedingTrial, UNSEEDED, **fit)
    assert first.log == again.log != other.log
    assert [outcome.record.seed for outcome in (first, again, other)] == [3, 3, 4]
