"""Every exception that Resolute raises on purpose, in one tree.

    DeterminedException
    ├── InvalidExperimentException      the program asks for something that cannot work
    │   └── InvalidConfig               an experiment config breaks rules (also ValueError)
    ├── InternalException               a call came at a time when it has no meaning
    ├── InvalidCheckpointException      a checkpoint is damaged, incomplete or unusable
    │   ├── CheckpointNotFoundException (also FileNotFoundError)
    │   └── StateMismatchException      its state does not fit the trial (also RuntimeError)
    ├── StorageException                a checkpoint store cannot be used as asked
    ├── TrackingException               the tracking database did not do what was asked
    │   ├── DatabaseException           it is damaged, cannot be reached or cannot be written
    │   │   └── SchemaVersionException  it was written by a newer Resolute
    │   ├── ConflictException           its present state, or another process, does not allow it
    │   └── InvalidRequestException     the request makes no sense, whatever is stored
    │       └── NotOnRecordException    there is no experiment, trial or checkpoint of that id
    ├── PeerLostException               another rank is gone, did not come, or could not take part
    ├── InvalidHP                       raised by user code: these hyperparameters make no sense
    └── MisuseError                     (also AssertionError and ValueError)
        └── WrongRankError              a call came on a rank that may not make it (also RuntimeError)

Programs written for Determined catch some mistakes as `AssertionError`; `MisuseError` serves them and
new code, which would expect a `ValueError`.
"""

import dataclasses
from collections.abc import Iterable


class DeterminedException(Exception):
    """Base of all exceptions below."""


class InvalidExperimentException(DeterminedException):
    """The trial or its configuration asks for something that cannot work."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One rule that an experiment config breaks."""

    path: str
    """The key, such as `searcher.max_trials`; empty for the config as a whole."""
    rule: str
    """What is wrong with it, as a clause."""
    remedy: str
    """What to write instead, as a sentence."""
    line: int | None = None
    """The line of the text that the config was read from."""
    value: str | None = None
    """The value that arrived, on one line of limited length; None if none did. Secrets are masked."""

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        thing = " = ".join(part for part in (self.path, self.value) if part)
        return f"{': '.join(part for part in (line, thing, self.rule) if part)}. {self.remedy}"


class InvalidConfig(InvalidExperimentException, ValueError):
    """An experiment config breaks rules, all of which are in `problems`."""

    def __init__(self, msg: str, problems: Iterable[ConfigProblem] = ()) -> None:
        super().__init__(msg)
        self.problems = tuple(problems)


class InternalException(DeterminedException):
    """A call came at a time when it has no meaning, such as before the training loop runs."""


class InvalidCheckpointException(DeterminedException):
    """A checkpoint is damaged, incomplete or does not fit the program."""


class CheckpointNotFoundException(InvalidCheckpointException, FileNotFoundError):
    """There is no checkpoint under the given id or path."""


CheckpointNotFound = CheckpointNotFoundException
"""The name that some programs know it by."""


class StateMismatchException(InvalidCheckpointException, RuntimeError):
    """A checkpoint holds a state that does not fit the trial."""


class StorageException(DeterminedException):
    """A checkpoint store cannot be used as asked."""


class TrackingException(DeterminedException):
    """The tracking database did not do what was asked: see the three kinds of this exception."""


class DatabaseException(TrackingException):
    """The tracking database is damaged, cannot be reached, or cannot be read or written."""


class SchemaVersionException(DatabaseException):
    """The tracking database was written by a newer Resolute than this one."""


class ConflictException(TrackingException):
    """What is stored, or another process, does not allow it: a state has ended, a name is taken, a claim is held."""


class InvalidRequestException(TrackingException):
    """The request itself cannot be met: a value that is not allowed, or something that does not exist."""


class NotOnRecordException(InvalidRequestException):
    """The tracking database has no experiment, trial, checkpoint or model of that id."""


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


class WrongRankError(MisuseError, RuntimeError):
    """A call came on a rank that may not make it."""
