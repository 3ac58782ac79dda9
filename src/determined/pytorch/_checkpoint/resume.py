"""Find the checkpoint that a run continues from, and restore the run from it."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from determined import errors, storage, tracking
from determined.core import Context
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint import identity, objects, run_state
from determined.pytorch._checkpoint.format import Saved
from determined.pytorch._checkpoint.parts import MODELS, load_models
from determined.pytorch._checkpoint.run_state import RunState
from determined.pytorch._context import PyTorchTrialContext

logger = logging.getLogger("determined.pytorch")

CHECKPOINT_VARIABLE = "DET_LATEST_CHECKPOINT"
"""Environment variable: the checkpoint to continue from, in place of what the program passes to `fit`."""

LATEST = "latest"
"""The `latest_checkpoint` that stands for the newest intact checkpoint of a run that this one continues."""


def find(
    context: PyTorchTrialContext,
    trial_class: type,
    checkpoint: str | os.PathLike[str] | None,
    opened: contextlib.ExitStack,
) -> Saved | None:
    """Return the checkpoint of an id, at a path, or the latest one; None if there is none to continue from.

    "latest" considers runs with the same program, hyperparameters and data. The files can be read until `opened` is
    closed. All ranks must call this.
    """
    if checkpoint is None:
        return None
    services, ranks = context.services, context.distributed
    # A managed trial has one program and one set of hyperparameters; one that starts from another's may change them.
    description = checkpoint_format.run_description(context, trial_class) if services.info is None else None
    saved = _find(services, os.fspath(checkpoint), description, opened) if ranks.is_chief else None
    location = ranks.broadcast(None if saved is None else saved.source.location)
    if location is None:
        return None
    if saved is None:  # found and verified by the chief
        source = opened.enter_context(storage.open_at(location))
        saved = Saved(source, checkpoint_format.read(source.folder))
    steps = reported = 0
    if not is_of_another_trial(services, saved):
        steps = saved.batches_trained
        reported = steps - saved.state["loop"].get("window", {}).get("count", 0)
    services.recorder.put(tracking.Continued(checkpoint=saved.uuid, steps_completed=steps, reported_steps=reported))
    return saved


def rules_for(trial_class: type, context: PyTorchTrialContext, state: RunState) -> objects.Rules:
    """Return which classes a checkpoint may hold: those that the program holds before it loads any.

    Raises for states that could not be saved, before any work is done.
    """
    initial = state.initial_state()
    rules = checkpoint_format.rules_of(trial_class, initial)
    callbacks = objects.Encoder().encode({"callbacks": initial["callbacks"]})
    shards = context.backend.codec.shards()
    checkpoint_format.check(callbacks if shards is None else shards.take(callbacks, ""))
    return rules


def start(
    context: PyTorchTrialContext, callbacks: Callbacks, state: RunState, rules: objects.Rules, saved: Saved | None
) -> Callable[[], Any]:
    """Put a run into a saved state, if there is one, and return the function that fetches its next batch.

    All ranks must call this.
    """
    if saved is None:
        return state.start(None)
    entries = {name: value for name, value in saved.state.items() if name != "gradients"}
    loop = entries.pop("loop")  # the parts of other ranks stay references
    with checkpoint_format.reading(saved.path):
        entries = context.backend.codec.attach(entries) | {"loop": loop}
        saved.state.update(objects.decode(entries, rules))
    callbacks.run("on_checkpoint_load_start", saved.state)
    fetch = state.start(saved)
    saved.state.clear()
    return fetch


def load_weights(context: PyTorchTrialContext, trial_class: type, saved: Saved) -> None:
    """Load the weights of a checkpoint alone, for a warm start. All ranks must call this."""
    rules = checkpoint_format.rules_of(trial_class, {MODELS: [model.state_dict() for model in context.models]})
    with checkpoint_format.reading(saved.path):
        load_models(context, saved.state, rules)


def is_of_another_trial(services: Context, saved: Saved) -> bool:
    """Return whether a managed trial starts at batch 0 with the weights of another one (a warm start)."""
    if services.info is None or not saved.source.has_manifest:
        return False
    origin, own = saved.source.manifest.origin, services.recorder.origin
    return "trial_id" in origin and any(origin.get(name) != own[name] for name in ("database", "trial_id"))


def steps_to_resume(services: Context) -> int:
    """Return the batches trained in the checkpoint that the runner or the environment names; 0 if neither names one.

    Only its metadata is read. A checkpoint that is damaged is reported when it is loaded.
    """
    if services.info is not None:
        return services.info.trial._steps_completed
    given = os.environ.get(CHECKPOINT_VARIABLE)
    if not given:
        return 0
    with contextlib.suppress(errors.DeterminedException, OSError, ValueError, LookupError, TypeError):
        if given == LATEST:
            return next((one.steps_completed for one in services.recorder.earlier_checkpoints()), 0)
        with _open(services, given) as saved:
            return int(saved.metadata["steps_completed"])
    return 0


def _find(
    services: Context, given: str, description: Mapping[str, Any] | None, opened: contextlib.ExitStack
) -> Saved | None:
    """Return the checkpoint of an id, a path or "latest"; `description` describes this run."""
    if given == LATEST:
        return _newest_intact(services, opened, description=description)
    if services.info is not None and given == services.info.latest_checkpoint:
        # A trial that its runner restarts falls back to an older checkpoint if it must.
        return _newest_intact(services, opened, given)
    return _named(opened.enter_context(_open(services, given)), description)


def _open(services: Context, given: str) -> storage.SavedCheckpoint:
    """Return a checkpoint that is given by its id, its path or its URL."""
    if "://" in given:
        return storage.open_at(given)
    if os.sep not in given and not pathlib.Path(given).is_dir():
        return services.checkpoint.store.open(given)
    return storage.open_at(str(checkpoint_format.existing_folder(given).resolve()))


def _named(chosen: storage.SavedCheckpoint, description: Mapping[str, Any] | None) -> Saved:
    """Return a checkpoint that the user chose; warn if it was saved with other hyperparameters."""
    saved = _read(chosen)
    there = identity.read_description(chosen)
    if description is None or there is None:
        return saved
    if found := identity.hyperparameter_differences(there, description):
        warnings.warn(
            f"Checkpoint {saved.uuid} was saved with other hyperparameters ({identity.enumerated(found)}). Training "
            "continues from it, and its optimizers and schedulers keep the settings that they were saved with.",
            stacklevel=2,
        )
    return saved


def _newest_intact(
    services: Context,
    opened: contextlib.ExitStack,
    first: str | None = None,
    description: Mapping[str, Any] | None = None,
) -> Saved | None:
    """Return the newest checkpoint that can be read, trying `first` first; warn about those that cannot.

    With a description, only checkpoints of runs that this one continues count.
    """
    services.checkpoint.record_unrecorded()
    candidates: dict[str, str | None] = {} if first is None else {first: None}
    earlier = services.recorder.earlier_checkpoints()
    if description is not None:
        earlier = _continued(earlier, description)
    candidates |= {one.uuid: one.path for one in earlier}
    for uuid, location in candidates.items():
        try:
            candidate = services.checkpoint.store.open(uuid) if location is None else storage.open_at(location)
            return _read(opened.enter_context(candidate))
        except errors.InvalidCheckpointException as error:
            warnings.warn(f"Checkpoint {uuid} is passed over for an older one: {error}", stacklevel=2)
    if first is not None:
        raise errors.InvalidCheckpointException(
            f"Neither checkpoint {first} nor one before it can be read; start the trial again without a checkpoint."
        )
    logger.info("There is no checkpoint to continue from yet, so training starts at batch 0.")
    return None


def _continued(
    checkpoints: list[tracking.CheckpointRecord], description: Mapping[str, Any]
) -> list[tracking.CheckpointRecord]:
    """Return the checkpoints of runs with the same description; warn how the newest one differs if there are none."""
    by_trial: dict[int, list[str]] = {}
    for one in checkpoints:
        if one.trial_id in by_trial:
            continue
        with contextlib.suppress(errors.CheckpointNotFoundException), storage.open_at(one.path) as saved:
            if (there := identity.read_description(saved)) is not None:
                by_trial[one.trial_id] = identity.differences(there, description)
    # One without a description is damaged or of an earlier version; reading it shows which.
    alike = [one for one in checkpoints if not by_trial.get(one.trial_id)]
    if checkpoints and not alike:
        newest = checkpoints[0]
        warnings.warn(
            f"The latest checkpoint, {newest.uuid} of trial {newest.trial_id}, belongs to a different run "
            f"({identity.enumerated(by_trial[newest.trial_id])}), so training starts from the beginning. To continue "
            f"from it anyway, pass latest_checkpoint={newest.uuid!r}.",
            stacklevel=2,
        )
    return alike


def _read(source: storage.SavedCheckpoint) -> Saved:
    folder = source.folder
    checkpoint_format.verify(folder)
    state = checkpoint_format.read(folder)
    if missing := [key for key in ("loop", "rng_state") if key not in state]:
        raise errors.InvalidCheckpointException(
            f"The checkpoint in {folder} lacks {' and '.join(missing)}, without which training cannot continue; its "
            "models can be used with pytorch.load_trial_from_checkpoint_path()."
        )
    with checkpoint_format.reading(folder):
        run_state.check(state["loop"])
    return Saved(source, state)
