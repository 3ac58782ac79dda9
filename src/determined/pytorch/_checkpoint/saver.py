"""Save checkpoints of a run."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from determined import errors, storage
from determined._home import home
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint import code, objects
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint.run_state import RunState
from determined.pytorch._checkpoint.snapshot import HostCopier
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._loop.progress import Progress

if TYPE_CHECKING:
    from determined.pytorch._backends.fsdp_state import ShardWriter

logger = logging.getLogger("determined.pytorch")

_HOOKS_AFTER_WRITE = ("on_checkpoint_write_end", "on_checkpoint_end", "on_checkpoint_upload_end")

ProgramFiles = tuple[code.Program, list[pathlib.Path]]


@dataclasses.dataclass
class Saver:
    """Saves the state of a run, in a background thread unless a callback has a hook that runs after the write."""

    trial_class: type
    context: PyTorchTrialContext
    callbacks: Callbacks
    progress: Progress
    run_state: RunState
    rules: objects.Rules
    """Which classes a resume would load."""
    show: Callable[[str], None]
    """Called with the id of each checkpoint that is complete."""
    latest: str | None
    """The id of the checkpoint saved or loaded last."""

    def __post_init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()
        self._copier = HostCopier()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resolute-writer")
        self._writing: Future[None] | None = None
        self._unshown: str | None = None
        wants = any(self.callbacks.wants(hook) for hook in _HOOKS_AFTER_WRITE)
        self._waits = any(self.context.distributed.allgather(wants))
        wants = self.callbacks.wants("on_checkpoint_upload_end")
        self._waits_for_upload = any(self.context.distributed.allgather(wants))

    @rng.set_aside()  # a run that continues from the checkpoint does not run these hooks
    def save(self) -> None:
        """Take a snapshot of the run and begin to write it; `wait` must come before. All ranks must call this.

        If a callback has a hook that runs after the write, this also waits for the write.
        """
        program = self._program  # found on this thread: git must not start while another thread forks workers
        self.progress.last_ckpt = self.progress.batches_trained
        shards = self.context.backend.codec.shards()
        if shards is not None:
            self.context.backend.broadcast_buffers(self.context.models)
        state = self.run_state.state_dict(shards)
        self.callbacks.run("on_checkpoint_save_start", state)
        if shards is not None:
            self._write(shards.take(self._encoded(state), ""), self.progress.batches_trained, program, shards)
        elif self.context.distributed.is_chief:
            self._begin_write(self._encoded(state), program)
        if self._waits:
            self.finish()
            if self._waits_for_upload and self.latest is not None:
                self.context.services.checkpoint.wait(self.latest)
            self.callbacks.run("on_checkpoint_upload_end", self.latest)
        self.poll()

    def poll(self) -> None:
        """Show a checkpoint that became complete since the last call."""
        if self._writing is None or self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that this rank writes is complete; raises the error of a failed write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        uuid, self._unshown = self._unshown, None
        if uuid is not None:
            self.show(uuid)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete. All ranks must call this."""
        self.wait()
        self.latest = self.context.distributed.broadcast(self.latest)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)

    def _encoded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state as plain data; warn, once, of each class in it that a resume would refuse."""
        encoder = objects.Encoder()
        plain: dict[str, Any] = encoder.encode(state)
        refused = {(".".join(one.place), one.name) for one in encoder.found if not self.rules.admits(one)}
        if self.context.distributed.is_chief:
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

    def _begin_write(self, state: dict[str, Any], program: ProgramFiles) -> None:
        write = functools.partial(self._write, self._copier.copy(state), self.progress.batches_trained, program)
        if self._waits:  # on this thread, where its hooks must run
            write()
        else:
            self._writing = self._thread.submit(write)

    def _write(
        self, state: dict[str, Any], steps: int, program: ProgramFiles, shards: ShardWriter | None = None
    ) -> None:
        self._copier.ready()
        checkpoints = self.context.services.checkpoint
        try:
            with checkpoints.store_path(checkpoint_format.metadata(steps), shard=shards is not None) as (folder, uuid):
                if shards is not None:  # first, since all ranks must come here
                    shards.write(folder)
                if self.context.distributed.is_chief:
                    with storage.errors_naming(folder):
                        self._fill(folder, state, program)
                    self.callbacks.run("on_checkpoint_write_end", folder)
                    self.callbacks.run("on_checkpoint_end", str(folder))
        except errors.StorageException as error:
            safe = f"The last good checkpoint is {self.latest}." if self.latest else "There is none before it."
            raise errors.StorageException(f"The checkpoint of batch {steps} is not saved. {error} {safe}") from error
        self.latest = self._unshown = uuid

    def _fill(self, folder: pathlib.Path, state: dict[str, Any], program_files: ProgramFiles) -> None:
        program, files = program_files
        checkpoint_format.write(folder, state, checkpoint_format.description(self.context, program, self.trial_class))
        if program.root is not None:
            code.copy_program(program.root, files, folder / checkpoint_format.CODE_FOLDER)

    @functools.cached_property
    def _program(self) -> ProgramFiles:
        program = code.program_of(self.trial_class)
        if program.root is None:
            return program, []
        location = self.context.services.checkpoint.store.location
        checkpoints = [] if "://" in location else [pathlib.Path(location)]
        return program, code.program_files(program.root, [home().path, *checkpoints])
