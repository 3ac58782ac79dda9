"""What the folder of a run tells of its end."""

from __future__ import annotations

import contextlib

from determined._home import RUN_FOLDER_VARIABLE
from determined.experiment.executors._base import EndReason, RunExit, RunSpec
from determined.experiment.executors._environment import SERVER_VARIABLE
from determined.experiment.executors._files import read_json
from determined.experiment.executors._processes import Identity, sweep


def end_on_file(spec: RunSpec) -> RunExit | None:
    """Return the end that the keeper of a run has written; None if it has not."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if (value := read_json(spec.files.end)) is not None:
            return RunExit.from_json(value)
    return None


def end_without_keeper(spec: RunSpec, keeper: Identity, server: str) -> RunExit:
    """Return the end of a run whose keeper is gone; what it may have left is killed first."""
    if (ended := end_on_file(spec)) is not None:
        return ended
    folder = f"{RUN_FOLDER_VARIABLE}={spec.folder.absolute()}"
    sweep(keeper, own=folder, common=f"{SERVER_VARIABLE}={server}")
    with contextlib.suppress(OSError):
        reason = spec.files.invalid_hp.read_text(encoding="utf-8", errors="replace")
        return RunExit.of(spec, EndReason.INVALID_HP, reason)
    return RunExit.of(spec, EndReason.KILLED, "its keeper was killed, and the run with it")


def keeper_of_earlier(spec: RunSpec) -> tuple[Identity, str] | RunExit:
    """Return the keeper of a run of an earlier runner, with the token of its warm process, or how that run has ended.

    A run that was never started, or whose keeper nobody knows, counts as killed.
    """
    if (ended := end_on_file(spec)) is not None:
        return ended
    if not spec.files.keeper.exists():
        return RunExit.of(spec, EndReason.KILLED, "before it had begun")
    found = read_json(spec.files.keeper) or {}
    try:
        return Identity.from_json(found), str(found["server"])
    except (KeyError, TypeError, ValueError):
        return RunExit.of(spec, EndReason.KILLED, f"{spec.files.keeper} is damaged, so nobody knows its keeper")
