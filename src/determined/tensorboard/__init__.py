"""Metrics for TensorBoard, one event file a process. Importing this imports neither torch nor TensorBoard."""

from determined.tensorboard._current import current, set_current
from determined.tensorboard._events import EventFile
from determined.tensorboard._writer import summary_writer

__all__ = ["EventFile", "current", "set_current", "summary_writer"]
