"""Loader workers that die, and data sets of awkward lengths."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import forking
from determined import pytorch
from determined.pytorch import Batch, Epoch
from trials import LineTrial, fit, line_data, records, saved_at, steps_of


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Fail the test if a worker that it started is still alive some time after it."""
    forking.serve()  # its process stays for further tests
    before = set(psutil.Process().children(recursive=True))
    yield
    gc.collect()  # a loader ends its workers when nothing refers to it any more, not even a cycle
    started = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


class Faulty(Dataset[Any]):
    """Something happens when one sample is fetched in a worker."""

    def __init__(self, index: int, fault: str) -> None:
        self.x, self.y = line_data(24).tensors
        self.index = index
        self.fault = fault

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            getattr(self, self.fault)()
        return self.x[index], self.y[index]

    def nothing(self) -> None: ...

    def be_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def exit(self) -> None:
        os._exit(3)

    def run_out_of_memory(self) -> None:
        raise MemoryError("no memory for this sample")

    def fail(self) -> None:
        raise ZeroDivisionError("bad sample 9")


def faulty(fault: str, where: str = "training", index: int = 9, **options: Any) -> type[LineTrial]:
    """Returns a trial with a bad sample in one of its loaders."""

    class Trial(LineTrial):
        def loader(self, its_fault: str) -> pytorch.DataLoader:
            return pytorch.DataLoader(Faulty(index, its_fault), batch_size=4, **({"num_workers": 2} | options))

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return self.loader(fault if where == "training" else "nothing")

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return self.loader(fault if where == "validation" else "nothing")

    return Trial


@contextlib.contextmanager
def raising(error: type[Exception] | tuple[type[Exception], ...], message: str | None) -> Iterator[None]:
    """Expect an exception, and let go of what its frames hold, as the end of a program does."""
    with pytest.raises(error, match=message) as caught:
        yield
    traceback.clear_frames(caught.tb)


# What torch raises depends on whether a tensor of the dead worker was on its way.
LOST = (RuntimeError, ConnectionError, EOFError)


@pytest.mark.parametrize("where", ["training", "validation"])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("be_killed", LOST, None),
        ("exit", LOST, None),
        ("run_out_of_memory", MemoryError, "no memory for this sample"),
        ("fail", ZeroDivisionError, "bad sample 9"),
    ],
)
def test_fault_in_a_worker_ends_training(where: str, fault: str, error: Any, message: str | None) -> None:
    with raising(error, message):
        fit(faulty(fault, where))


def test_worker_that_stands_still_is_an_error_after_the_timeout() -> None:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(_wake_children)
        with raising(RuntimeError, "timed out after 1 seconds"):
            fit(faulty("stop", index=0, timeout=1))
    assert time.monotonic() - began < 60


def _wake_children() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.resume()


def _unsendable(samples: list[Any]) -> Any:
    return lambda: samples


def test_batch_that_cannot_be_sent_by_a_worker_is_an_error() -> None:
    with raising((AttributeError, pickle.PicklingError), "pickle"):
        fit(faulty("nothing", collate_fn=_unsendable))


@pytest.mark.parametrize("workers", [0, 2])
def test_error_of_a_sample_leaves_the_checkpoint_before_to_go_on_from(workers: int) -> None:
    with raising(ZeroDivisionError, "bad sample 9"):
        fit(faulty("fail", num_workers=workers), checkpoint_period=Batch(1))
    last = records().checkpoints()[-1]
    assert last.steps_completed == 2
    mended = fit(faulty("nothing", num_workers=workers), latest_checkpoint=last.uuid)
    assert mended.seen == [(0, 2), (0, 3), (0, 4), (0, 5)]


def test_record_says_that_a_run_with_a_dead_worker_failed() -> None:
    with raising(LOST, None):
        fit(faulty("be_killed"))
    assert records().trial(1).state.value == "ERROR"


# The end of the training process


BLOCKING_PROGRAM = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from determined import pytorch
from trials import LineTrial, fit

class Blocking(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(600)

class Trial(LineTrial):
    def __init__(self, context):
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self):
        make = {"ours": pytorch.DataLoader, "torch": DataLoader}[sys.argv[1]]
        return make(Blocking(), 4, num_workers=2, multiprocessing_context=sys.argv[2])

if __name__ == "__main__":
    fit(Trial)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process when its parent ends")
@pytest.mark.parametrize(("loader", "method"), [("ours", "fork"), ("torch", "forkserver")])
def test_workers_that_block_end_when_their_training_is_killed(loader: str, method: str, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "blocking.py"
    program.write_text(BLOCKING_PROGRAM)
    training = forking.start([str(program), loader, method], env=program_environment(), stdout=forking.PIPE)
    with training:
        try:
            assert training.stdout is not None
            workers = [psutil.Process(int(training.stdout.readline())) for _ in range(2)]
        finally:
            training.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        for worker in alive:
            worker.kill()
    assert alive == []


def program_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": forking.PYTHONPATH}


# Shared memory


SHARING_PROGRAM = """
import torch
from determined import pytorch
from trials import LineTrial, fit, line_data

def stacked(samples):
    return [torch.stack(column) for column in zip(*samples)]

class Trial(LineTrial):
    def build_training_data_loader(self):
        return pytorch.DataLoader(line_data(2**16), 2**15, num_workers=1, collate_fn=stacked)

fit(Trial)
"""


def test_too_little_shared_memory_is_an_error_with_the_remedy() -> None:
    in_own_mounts = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*in_own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets the test mount no small /dev/shm of its own")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:  # the test's own may be in /dev/shm itself
        ended = subprocess.run(
            [*in_own_mounts, sys.executable, "-c", SHARING_PROGRAM],
            env=program_environment() | {"DET_HOME": home},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    last_line = ended.stderr.strip().splitlines()[-1]
    assert "/dev/shm, which has 0 MiB" in last_line
    assert "--shm-size" in last_line


# Lengths


def of_length(samples: int, batch_size: int, **options: Any) -> type[LineTrial]:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(line_data(samples), batch_size=batch_size, shuffle=True, **options)

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(line_data(samples), batch_size=batch_size)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            return super().train_batch(batch, epoch_idx, batch_idx)

    sizes: list[int] = []
    Trial.sizes = sizes
    return Trial


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=st.integers(1, 9), batch_size=st.integers(1, 5), epochs=st.integers(1, 2))
def test_every_epoch_has_all_samples_of_any_data_set(samples: int, batch_size: int, epochs: int) -> None:
    trial_class = of_length(samples, batch_size)
    fit(trial_class, max_length=Epoch(epochs))
    full, rest = divmod(samples, batch_size)
    assert trial_class.sizes == ([batch_size] * full + [rest] * bool(rest)) * epochs


def test_one_sample_makes_one_batch_an_epoch() -> None:
    trial = fit(of_length(1, 8), max_length=Epoch(3))
    assert trial.seen == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_set_of_one_sample_resumes(workers: int) -> None:
    trial_class = of_length(1, 8, num_workers=workers)
    fit(trial_class, max_length=Batch(2))
    resumed = fit(trial_class, max_length=Batch(3), latest_checkpoint="latest")
    assert resumed.seen == [(2, 2)]


def test_last_batch_that_is_dropped_leaves_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match="no batches: batch_size is 8 and drop_last is True"):
        fit(of_length(7, 8, drop_last=True))


def test_empty_data_set_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"num_samples|no batches"):
        fit(of_length(0, 4))
    assert saved_at() == []


# Periods and lengths of training


@pytest.mark.parametrize("period", [Batch(100), Epoch(100)])
def test_period_longer_than_training_acts_once_at_the_end(period: Any) -> None:
    fit(
        max_length=Batch(5),
        reporting_period=period,
        validation_period=period,
        checkpoint_period=period,
    )
    assert steps_of("training") == steps_of("validation") == saved_at() == [5]


def test_period_longer_than_the_data_set_goes_over_epochs() -> None:
    fit(of_length(3, 2), max_length=Batch(10), checkpoint_period=Batch(4), validation_period=Batch(5))
    assert saved_at() == [4, 8, 10]
    assert steps_of("validation") == [5, 10]


@pytest.mark.parametrize("length", [1, 3, 4])
def test_length_that_was_reached_before_trains_nothing(length: int) -> None:
    before = fit(max_length=Batch(4))
    after = fit(max_length=Batch(length), latest_checkpoint="latest")
    assert after.seen == []
    assert torch.equal(after.model.weight, before.model.weight)
    assert steps_of("training", trial_id=2) == []
