"""Making checkpoints of a run, and finding the one to go on from."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from determined import errors, storage, tracking
from determined._home import home
from determined.core import Context
from determined.core.checkpoint_gc import METADATA_FILE
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint import code, identity, objects, run_state
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint.snapshot import HostCopier
from determined.pytorch._checkpoint.writer import BackgroundWriter
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._loop.progress import Progress

if TYPE_CHECKING:
    from determined.pytorch._backends.fsdp_state import ShardWriter

logger = logging.getLogger("determined.pytorch")

_HOOKS_AFTER_WRITE = ("on_checkpoint_write_end", "on_checkpoint_end", "on_checkpoint_upload_end")

ProgramFiles = tuple[code.Program, list[pathlib.Path]]


class Saveable(Protocol):
    """A part of the loop whose state a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...


class Stateful(Saveable, Protocol):
    """A part of the loop that goes on by its saved state alone."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Saved(NamedTuple):
    """A checkpoint that was read."""

    uuid: str
    path: pathlib.Path
    state: dict[str, Any]


def is_of_another_trial(services: Context, saved: Saved) -> bool:
    """Say whether a managed trial begins anew with the weights of another one, as a warm start means."""
    if services.info is None or not (saved.path / storage.MANIFEST_FILE).exists():
        return False
    origin, own = storage.Manifest.read(saved.path).origin, services.recorder.origin
    return "trial_id" in origin and any(origin.get(name) != own[name] for name in ("database", "trial_id"))


CHECKPOINT_VARIABLE = "DET_LATEST_CHECKPOINT"
"""Environment variable: the checkpoint to continue from, in place of what the program passes to `fit`."""

LATEST = "latest"
"""What to pass as `latest_checkpoint` for the newest intact checkpoint of a run that this one continues."""


def find(
    services: Context, checkpoint: str | os.PathLike[str], description: Mapping[str, Any] | None = None
) -> Saved | None:
    """Return the checkpoint of an id, at a path, or the latest one; None if there is none to continue from.

    `description` is what a checkpoint of this run would say of it. The latest one is then one of a run with the same
    program, hyperparameters and data; other hyperparameters than those of a checkpoint that is named get a warning.
    """
    given = os.fspath(checkpoint)
    if given == LATEST:
        return _newest_intact(services, description=description)
    if services.info is not None and given == services.info.latest_checkpoint:
        # A trial that its runner starts again goes on by itself, from an older one if it must.
        return _newest_intact(services, given)
    folder = _folder_of(services, given)
    return _named(folder.resolve().name, folder, description)


def steps_to_resume(services: Context) -> int:
    """Return the batches of the checkpoint that the runner or the environment names to go on from; 0 without one.

    Only its metadata is read. What is wrong with the checkpoint is said when it is loaded.
    """
    if services.info is not None:
        return services.info.trial._steps_completed
    given = os.environ.get(CHECKPOINT_VARIABLE)
    if not given:
        return 0
    with contextlib.suppress(errors.DeterminedException, OSError, ValueError, LookupError, TypeError):
        if given == LATEST:
            return next((one.steps_completed for one in services.recorder.earlier_checkpoints()), 0)
        metadata = json.loads(storage.read_plain(_folder_of(services, given) / METADATA_FILE))
        return int(metadata["steps_completed"])
    return 0


def _folder_of(services: Context, given: str) -> pathlib.Path:
    """Return the folder of a checkpoint that is given by its id or its path."""
    path = pathlib.Path(given)
    if os.sep not in given and not path.is_dir():
        return services.checkpoint.store.path(given)
    if not path.is_dir():
        found = "a file, not a folder," if path.exists() else "nothing"
        raise errors.CheckpointNotFoundException(
            f"There is {found} at latest_checkpoint={given!r}; pass the folder of a checkpoint, or an id that "
            "`det checkpoint list` shows."
        )
    return path


def _named(uuid: str, folder: pathlib.Path, description: Mapping[str, Any] | None) -> Saved:
    """Return a checkpoint that the user chose; warn if it was saved with other hyperparameters."""
    saved = _saved(uuid, folder)
    there = identity.read_description(folder, checkpoint_format.LOAD_FILE)
    if description is None or there is None:
        return saved
    if found := identity.hyperparameter_differences(there, description):
        warnings.warn(
            f"Checkpoint {uuid} was saved with other hyperparameters ({identity.enumerated(found)}). Training "
            "continues from it, and its optimizers and schedulers keep the settings that they were saved with.",
            stacklevel=2,
        )
    return saved


def _saved(uuid: str, folder: pathlib.Path) -> Saved:
    checkpoint_format.verify(folder)
    return Saved(uuid, folder, _resumable(folder))


def _newest_intact(
    services: Context, first: str | None = None, description: Mapping[str, Any] | None = None
) -> Saved | None:
    """Return the newest checkpoint that can be read, trying `first` before all; say which ones cannot.

    With a description, only checkpoints of runs that this one continues count.
    """
    services.checkpoint.record_unrecorded()
    candidates: dict[str, pathlib.Path | None] = {} if first is None else {first: None}
    earlier = services.recorder.earlier_checkpoints()
    if description is not None:
        earlier = _continued(earlier, description)
    candidates |= {one.uuid: pathlib.Path(one.path) for one in earlier}
    for uuid, folder in candidates.items():
        try:
            return _saved(uuid, folder or services.checkpoint.store.path(uuid))
        except errors.InvalidCheckpointException as error:
            warnings.warn(f"Checkpoint {uuid} is passed over for an older one: {error}", stacklevel=2)
    if first is not None:
        raise errors.InvalidCheckpointException(
            f"Neither checkpoint {first} nor one before it can be read; start the trial anew without a checkpoint."
        )
    logger.info("There is no checkpoint to continue from yet, so training starts at batch 0.")
    return None


def _continued(
    checkpoints: list[tracking.CheckpointRecord], description: Mapping[str, Any]
) -> list[tracking.CheckpointRecord]:
    """Return those of runs that were described alike; if there are only others, warn how the newest one differs."""
    by_trial: dict[int, list[str]] = {}
    for one in checkpoints:
        if one.trial_id in by_trial:
            continue
        if (there := identity.read_description(pathlib.Path(one.path), checkpoint_format.LOAD_FILE)) is not None:
            by_trial[one.trial_id] = identity.differences(there, description)
    # One that does not say what it is of is damaged, or of an earlier version: reading it will tell.
    alike = [one for one in checkpoints if not by_trial.get(one.trial_id)]
    if checkpoints and not alike:
        newest = checkpoints[0]
        warnings.warn(
            f"The latest checkpoint, {newest.uuid} of trial {newest.trial_id}, is of another run "
            f"({identity.enumerated(by_trial[newest.trial_id])}), so training starts from the beginning. To continue "
            f"from it all the same, pass latest_checkpoint={newest.uuid!r}.",
            stacklevel=2,
        )
    return alike


def _resumable(folder: pathlib.Path) -> dict[str, Any]:
    state = checkpoint_format.read(folder)
    if missing := [key for key in ("loop", "rng_state") if key not in state]:
        raise errors.InvalidCheckpointException(
            f"The checkpoint in {folder} lacks {' and '.join(missing)}, without which training cannot go on; its "
            "models can be used with pytorch.load_trial_from_checkpoint_path()."
        )
    with checkpoint_format.reading(folder):
        run_state.check(state["loop"])
    return state


class Saver:
    """Saves the state of a run and puts it back: what is wrapped, callbacks, and the loop's own."""

    def __init__(
        self,
        trial_class: type,
        context: PyTorchTrialContext,
        callbacks: Callbacks,
        progress: Progress,
        loop_parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Saveable],
    ) -> None:
        self._trial_class = trial_class
        self._context = context
        self._callbacks = callbacks
        self._progress = progress
        self._loop_parts = loop_parts
        self._rank_parts = rank_parts
        self._rules = objects.Rules()
        self._warned: set[tuple[str, str]] = set()
        self._copier = HostCopier()
        self._writer = BackgroundWriter()
        wants = any(callbacks.wants(hook) for hook in _HOOKS_AFTER_WRITE)
        self._waits = any(context.distributed.allgather(wants))
        self._unshown: str | None = None
        self.latest: str | None = None
        """The id of the checkpoint saved or loaded last."""

    @rng.set_aside()  # what hooks draw here, a run that goes on from the checkpoint does not draw
    def save(self) -> None:
        """Take a snapshot of the run and begin to write it; `wait` must come before. All ranks must call this.

        Where a callback has a hook that comes after the write, this waits for the write too.
        """
        program = self._program  # found on this thread: git must not be started while another forks workers
        self._progress.last_ckpt = self._progress.batches_trained
        shards = self._context.backend.codec.shards()
        if shards is not None:
            self._context.backend.broadcast_buffers(self._context.models)
        per_rank = run_state.gather(
            self._context, {name: part.state_dict() for name, part in self._rank_parts.items()}, shards
        )
        state = checkpoint_format.snapshot(self._context)
        state["callbacks"] = self._callbacks.state_dict()
        loop: dict[str, Any] = {name: part.state_dict() for name, part in self._loop_parts.items()}
        loop |= {"seed": self._context.trial_seed, "circumstances": checkpoint_format.circumstances()}
        state["loop"] = loop
        if per_rank is not None:
            run_state.put_into(state, loop, per_rank)
        self._callbacks.run("on_checkpoint_save_start", state)
        if shards is not None:
            self._write(shards.take(self._encoded(state), ""), self._progress.batches_trained, program, shards)
        elif self._context.distributed.is_chief:
            self._begin_write(self._encoded(state), program)
        if self._waits:
            self.finish()
            self._callbacks.run("on_checkpoint_upload_end", self.latest)

    def _begin_write(self, state: dict[str, Any], program: ProgramFiles) -> None:
        write = functools.partial(self._write, self._copier.copy(state), self._progress.batches_trained, program)
        if self._waits:  # on this thread, where its hooks must run
            write()
        else:
            self._writer.start(write)

    def _encoded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state as plain data; warn, once, of each class in it that a resume would refuse."""
        encoder = objects.Encoder()
        plain: dict[str, Any] = encoder.encode(state)
        refused = {(".".join(one.place), one.name) for one in encoder.found if not self._rules.admits(one)}
        if self._context.distributed.is_chief:
            for place, name in sorted(refused - self._warned):
                logger.warning(
                    "Checkpoints hold a %s under %s, which a resume loads only if the program calls "
                    "torch.serialization.add_safe_globals([%s]) first.",
                    name,
                    place,
                    name.rpartition(".")[2],
                )
        self._warned |= refused
        return plain

    def check(self) -> None:
        """Look at all states before any work: refuse what could not be saved later, and note the classes in them."""
        fresh: dict[str, Any] = dict.fromkeys(("rng_state", "loop", "gradients", "callbacks"))
        for states in (
            lambda: checkpoint_format.snapshot(self._context),
            lambda: {"callbacks": self._callbacks.state_dict()},
        ):
            with contextlib.suppress(Exception):  # one may be able to tell its state only later
                fresh |= states()
        self._rules = checkpoint_format.rules_of(self._trial_class, fresh)
        callbacks = objects.Encoder().encode({"callbacks": fresh["callbacks"]})
        shards = self._context.backend.codec.shards()
        checkpoint_format.check(callbacks if shards is None else shards.take(callbacks, ""))

    def completed(self) -> str | None:
        """Return the id of a checkpoint that became complete since the last call."""
        if not self._writer.finished():
            return None
        uuid, self._unshown = self._unshown, None
        return uuid

    def wait(self) -> None:
        """Wait until the checkpoint that this rank writes is complete."""
        self._writer.wait()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete. All ranks must call this."""
        self.wait()
        self.latest = self._context.distributed.broadcast(self.latest)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def restore(self, saved: Saved) -> None:
        """Put the run into a saved state, all but random numbers, which opening the data may still draw."""
        whole = {name: value for name, value in saved.state.items() if name not in ("loop", "gradients")}
        whole = self._context.backend.codec.attach(whole)
        with checkpoint_format.reading(saved.path):
            saved.state.update(objects.decode(whole, self._rules))
        self._callbacks.run("on_checkpoint_load_start", saved.state)
        checkpoint_format.restore(self._context, saved.state)
        self._callbacks.load_state_dict(saved.state.get("callbacks", {}))
        with checkpoint_format.reading(saved.path):
            for name, part in self._loop_parts.items():
                if name in saved.state["loop"]:
                    part.load_state_dict(saved.state["loop"][name])
        self.latest = saved.uuid

    def _write(
        self, state: dict[str, Any], steps: int, program: ProgramFiles, shards: ShardWriter | None = None
    ) -> None:
        self._copier.ready()
        checkpoints = self._context.services.checkpoint
        try:
            with checkpoints.store_path(checkpoint_format.metadata(steps), shard=shards is not None) as (folder, uuid):
                if shards is not None:  # first, since all ranks must come here
                    shards.write(folder)
                if self._context.distributed.is_chief:
                    with storage.errors_naming(folder):
                        self._fill(folder, state, program)
                    self._callbacks.run("on_checkpoint_write_end", folder)
                    self._callbacks.run("on_checkpoint_end", str(folder))
        except errors.StorageException as error:
            safe = f"The last good checkpoint is {self.latest}." if self.latest else "There is none before it."
            raise errors.StorageException(f"The checkpoint of batch {steps} is not saved. {error} {safe}") from error
        self.latest = self._unshown = uuid

    def _fill(self, folder: pathlib.Path, state: dict[str, Any], program_files: ProgramFiles) -> None:
        program, files = program_files
        checkpoint_format.write(folder, state, checkpoint_format.description(self._context, program, self._trial_class))
        if program.root is not None:
            code.copy_program(program.root, files, folder / checkpoint_format.CODE_FOLDER)

    @functools.cached_property
    def _program(self) -> ProgramFiles:
        program = code.program_of(self._trial_class)
        if program.root is None:
            return program, []
        return program, code.program_files(program.root, [home().path, self._context.services.checkpoint.store.root])
