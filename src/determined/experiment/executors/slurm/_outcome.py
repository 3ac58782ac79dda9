"""What the state of a job says about the run that it ran. Pure, but for the log that a job leaves."""

from __future__ import annotations

import dataclasses

from determined.experiment.executors._base import EndReason, RunExit, RunSpec

GOING = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "RESIZING", "SIGNALING"),
        *("STAGE_OUT", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
    }
)
"""The states of jobs that have not ended."""
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"})
_NOT_ITS_FAULT = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED", "DEADLINE", ""}) | _WAITING
_REMEDIES = {
    "TIMEOUT": "; it had no time to save: raise slurm.sbatch_args: [--time=...], or warn it earlier by "
    "[--signal=B:USR1@600]",
    "OUT_OF_MEMORY": "; raise slurm.sbatch_args: [--mem=...]",
}


def is_over(state: str, has_begun: bool) -> bool:
    """Return whether a job runs its run no longer; "" is the state of one that Slurm does not know."""
    return state not in GOING or (has_begun and state in _WAITING)


def settled_exit(exit: RunExit, state: str) -> RunExit:
    """Return the exit of a run that Slurm interrupted: canceled by somebody, or to go on later."""
    if exit.reason in (EndReason.COMPLETED, EndReason.INVALID_HP, EndReason.NOT_STARTED):
        return exit
    if state == "CANCELLED":
        return dataclasses.replace(exit, reason=EndReason.KILLED, message="its job was canceled, as by scancel")
    message = f"Slurm interrupted it{f' ({state})' if state else ''}"
    return dataclasses.replace(exit, reason=EndReason.INTERRUPTED, message=message)


def exit_without_file(spec: RunSpec, job: str, state: str, wanted: EndReason | None) -> RunExit:
    """Return the exit of a run whose job has ended without leaving one."""
    has_begun = spec.files.shim.exists()
    if wanted is not None:
        return RunExit.of(spec, wanted, "its job was ended" if has_begun else "before it had begun")
    if state == "CANCELLED":
        return RunExit.of(spec, EndReason.KILLED, f"its job {job} was canceled, as by scancel")
    if state in _NOT_ITS_FAULT:
        what = f"its job {job} was interrupted ({state or 'unknown to Slurm'})"
        return RunExit.of(spec, EndReason.INTERRUPTED, what)
    said = _last_words(spec)
    message = f"its job {job} ended as {state}{_REMEDIES.get(state, '')}{f': {said}' if said else ''}"
    return RunExit.of(spec, EndReason.FAILED, message)


def _last_words(spec: RunSpec) -> str:
    """Return the last line that a job printed itself, which says why it could not begin."""
    for log in sorted(spec.files.job_files.glob("*.err")):
        if lines := log.read_text(encoding="utf-8", errors="replace").split("\n"):
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
