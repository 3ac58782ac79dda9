"""A SummaryWriter whose records go into an event file that is already there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from determined.tensorboard._events import EventFile

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def summary_writer(event_file: EventFile) -> SummaryWriter:
    """Return a SummaryWriter that writes into `event_file`, whichever way others write into it too.

    Its `close` flushes and leaves the file open for them. What TensorBoard keeps in runs of their own
    (`add_hparams`, `add_scalars`) gets subfolders, as with any SummaryWriter. Needs `tensorboard`.
    """
    return _writer_factory()(event_file)


class _EventWriter:
    """What a `FileWriter` asks of TensorBoard's `EventFileWriter`, answered by an `EventFile`."""

    def __init__(self, event_file: EventFile) -> None:
        self._event_file = event_file

    def get_logdir(self) -> str:
        return str(self._event_file.folder)

    # Any: a protobuf message class of TensorBoard, which has no types.
    def add_event(self, event: Any) -> None:
        self._event_file.add_event_bytes(event.SerializeToString())

    def flush(self) -> None:
        self._event_file.flush()

    def close(self) -> None:
        # Not ours to close: the training loop would have to go on in a second file.
        self._event_file.flush()


# Defined on first use: the base classes cost an import of torch and TensorBoard.
@functools.cache
def _writer_factory() -> Callable[[EventFile], SummaryWriter]:
    try:
        from torch.utils import tensorboard
    except ImportError as error:
        raise ImportError(
            f"a SummaryWriter needs the tensorboard package, which cannot be imported here ({error}); "
            "run `pip install tensorboard`. Scalar metrics are still written without it.",
            name="tensorboard",
        ) from error

    class SharedFileWriter(tensorboard.FileWriter):
        def __init__(self, event_file: EventFile) -> None:
            # Without the base's constructor, which would create a second file.
            self.event_writer = _EventWriter(event_file)

    class SharedSummaryWriter(tensorboard.SummaryWriter):
        # Any: from its first assignment the base seems to hold nothing but None in them.
        file_writer: Any
        all_writers: Any

        def __init__(self, event_file: EventFile) -> None:
            self._event_file = event_file
            super().__init__(log_dir=str(event_file.folder))

        def _get_file_writer(self) -> Any:
            if self.file_writer is None:
                self.file_writer = SharedFileWriter(self._event_file)
                self.all_writers = {self.log_dir: self.file_writer}
            return self.file_writer

    return SharedSummaryWriter
