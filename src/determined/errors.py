"""Every exception that Resolute raises on purpose, in one tree.

    DeterminedException
    ├── InvalidExperimentException      the program asks for something that cannot work
    ├── InternalException               a call came at a time when it has no meaning
    ├── InvalidCheckpointException      a checkpoint is damaged, incomplete or unusable
    │   └── CheckpointNotFoundException (also FileNotFoundError)
    ├── StorageException                a checkpoint store cannot be used as asked
    ├── TrackingException               the tracking database cannot be used
    │   └── SchemaVersionException      it was written by a newer Resolute
    ├── PeerLostException               another rank is gone, did not come, or could not take part
    ├── InvalidHP                       raised by user code: these hyperparameters make no sense
    └── MisuseError                     (also AssertionError and ValueError)

Programs written for Determined catch some mistakes as `AssertionError`; `MisuseError` serves them and
new code, which would expect a `ValueError`.
"""

from collections.abc import Iterable


class DeterminedException(Exception):
    """Base of all exceptions below."""


class InvalidExperimentException(DeterminedException):
    """The trial or its configuration asks for something that cannot work."""


class InternalException(DeterminedException):
    """A call came at a time when it has no meaning, such as before the training loop runs."""


class InvalidCheckpointException(DeterminedException):
    """A checkpoint is damaged, incomplete or does not fit the program."""


class CheckpointNotFoundException(InvalidCheckpointException, FileNotFoundError):
    """There is no checkpoint under the given id or path."""


class StorageException(DeterminedException):
    """A checkpoint store cannot be used as asked."""


class TrackingException(DeterminedException):
    """The tracking database cannot be read or written."""


class SchemaVersionException(TrackingException):
    """The tracking database was written by a newer Resolute than this one."""


class PeerLostException(DeterminedException):
    """Another rank is gone, did not come in time, or could not take part in a collective.

    `ranks` are the ranks it is about; empty if they are known by their place on a machine only.
    """

    def __init__(self, msg: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(msg)
        self.ranks = tuple(ranks)


class InvalidHP(DeterminedException):
    """Raised by user code to give up a trial whose hyperparameters make no sense."""

    def __init__(self, msg: str = "the trial gave up on its hyperparameters") -> None:
        super().__init__(msg)


class MisuseError(DeterminedException, AssertionError, ValueError):
    """A call breaks a rule of the API that programs may have caught as `AssertionError`."""
