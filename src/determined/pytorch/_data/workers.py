"""Worker processes of data loaders: their random numbers, their end, their errors."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from determined.processes import end_with_parent
from determined.pytorch._data import rng
from determined.pytorch._data.order import BatchKey

SHARED_MEMORY = "/dev/shm"
"""Where workers put their batches for the training process."""

# Parts of torch's messages in the training process when shared memory is full.
_NO_SHARED_MEMORY = ("shared memory(shm)", "killed by signal: Bus error", "unable to write to file </torch")


class _InWorkers:
    """Wraps the user's data set for loader workers and forwards attributes to it."""

    # Names that no data set uses.
    _keyed_dataset: Any
    _keyed_seed: int
    _keyed_pass: int | None

    def __init__(self, dataset: Any, seed: int) -> None:
        self._keyed_dataset = dataset
        self._keyed_seed = seed
        self._keyed_pass = None

    def __len__(self) -> int:
        return len(self._keyed_dataset)

    def __getattr__(self, name: str) -> Any:
        # Looked up by `__dict__`, since unpickling asks for attributes before any is set.
        if "_keyed_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_keyed_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _InWorkers.__annotations__:
            super().__setattr__(name, value)
        else:
            setattr(self._keyed_dataset, name, value)


class KeyedDataset(_InWorkers, Dataset[Any]):
    """A data set whose random numbers in loader workers depend on the batch alone, not on the worker's past."""

    def __getitems__(self, indices: list[Any]) -> Any:
        if isinstance(indices, BatchKey) and get_worker_info() is not None:
            rng.seed_all(rng.derive(self._keyed_seed, *indices.key))
        if callable(fetch := getattr(self._keyed_dataset, "__getitems__", None)):
            return fetch(indices)
        return [self._keyed_dataset[i] for i in indices]

    def __getitem__(self, index: Any) -> Any:
        return self._keyed_dataset[index]


class KeyedIterable(_InWorkers, IterableDataset[Any]):
    """An iterable data set whose random numbers in persistent workers depend on worker and pass, not on the past.

    Each worker counts passes, starting with the one that `begin_pass` set before the workers started. Without one, as
    in validation, all passes draw the same numbers.
    """

    def __iter__(self) -> Iterator[Any]:
        if (worker := get_worker_info()) is not None:
            rng.seed_all(rng.derive(self._keyed_seed, self._keyed_pass or 0, worker.id))
        if self._keyed_pass is not None:
            self._keyed_pass += 1
        return iter(self._keyed_dataset)


def begin_pass(loader: Any, number: int) -> int:
    """Let workers that start now begin with pass `number`. Return the pass that decides the seed torch gives them."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, KeyedIterable):
        return number
    dataset._keyed_pass = number
    return 0  # set once for all passes, so it must not depend on where the process began


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStart:
    """Prepares a loader worker, then calls the `worker_init_fn` of the user.

    The worker ignores SIGINT, exits when the training process ends in any way, and reports batches that cannot be sent.
    """

    init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)  # torchrun signals the process group, and a worker that dies would end the training
        if (training := multiprocessing.parent_process()) is not None:
            _end_with(training)
        multiprocessing.queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]  # its stub lacks it
        if self.init_fn is not None:
            self.init_fn(worker_id)


def _end_with(training: Any) -> None:
    """End this worker when the training process ends."""
    if sys.platform == "linux" and os.getppid() == training.pid:
        end_with_parent(training.pid)
    else:  # started by a fork server, which lives on while it has children
        threading.Thread(target=_exit_after, args=(training,), daemon=True).start()


def _exit_after(training: Any) -> None:
    training.join()
    os._exit(1)


def prepare_workers(loader: Any) -> Any:
    """Return the loader with `WorkerStart` as its `worker_init_fn`, if it is torch's and has workers."""
    starts_workers = isinstance(loader, TorchDataLoader) and loader.num_workers
    if starts_workers and not isinstance(loader.worker_init_fn, WorkerStart):
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
    return loader


def _send_error(queue: Any, error: Exception, item: Any) -> None:
    """Send the error in place of a batch that cannot be sent; a queue only prints it, and training would wait."""
    number = item[0] if isinstance(item, tuple) and len(item) == 2 else None
    if isinstance(number, int):
        details = type(error), error, error.__traceback__
        sent = ExceptionWrapper(details, "in a DataLoader worker process")  # type: ignore[no-untyped-call]  # of torch
        queue.put((number, sent))
    else:  # a queue of the program
        traceback.print_exception(error)


@contextlib.contextmanager
def explained_lack_of_shared_memory() -> Iterator[None]:
    """Add the remedy to an error that comes from too little shared memory for loader workers."""
    try:
        yield
    except Exception as error:
        if any(words in str(error) for words in _NO_SHARED_MEMORY) and os.path.isdir(SHARED_MEMORY):
            error.add_note(_shared_memory_remedy())
        raise


def _shared_memory_remedy() -> str:
    room = os.statvfs(SHARED_MEMORY)
    size, free = (blocks * room.f_frsize / 2**20 for blocks in (room.f_blocks, room.f_bavail))
    return (
        f"Loader workers hand over batches in {SHARED_MEMORY}, which has {size:.0f} MiB ({free:.0f} MiB free now), too "
        "few for num_workers * prefetch_factor batches. Enlarge it (docker run --shm-size=8g, or --ipc=host), or use "
        "fewer num_workers or a smaller prefetch_factor; num_workers=0 needs none of it."
    )
