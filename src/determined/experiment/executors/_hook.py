"""Run a program's `startup-hook.sh`, which installs or prepares what the program needs."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping

from determined import storage
from determined.experiment.executors._base import STARTUP_HOOK, RunSpec

# Variables that a shell sets for itself.
_OF_SHELLS = ("_", "OLDPWD", "PWD", "SHLVL")


def run_hook(spec: RunSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Run the startup hook of a program that has one; return the variables of the run with those that it exported.

    Hooks of one experiment run one after the other, since they install packages that all trials share. Raises
    RuntimeError if the hook fails.
    """
    if not spec.has_startup_hook:
        return dict(environment)
    with storage.locked(spec.code), tempfile.TemporaryFile() as exported:
        # Printed however the hook ends: it may call `exit`.
        script = f"trap 'env -0 >&{exported.fileno()}' EXIT; . ./{STARTUP_HOOK}"
        try:
            code = subprocess.run(
                ["bash", "-c", script, f"./{STARTUP_HOOK}"],
                cwd=spec.code,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[exported.fileno()],
                check=False,
            ).returncode
        except OSError as error:
            raise RuntimeError(f"{STARTUP_HOOK} cannot be run by bash: {error.strerror}") from error
        if code:
            how = f"exited with status {code}" if code > 0 else f"was killed by signal {-code}"
            raise RuntimeError(f"{STARTUP_HOOK} {how}")
        exported.seek(0)
        return {**environment, **_variables(exported.read())}


def _variables(content: bytes) -> dict[str, str]:
    """Return the variables that `env -0` printed, without those of the shell itself."""
    pairs = [os.fsdecode(pair).split("=", 1) for pair in content.split(b"\0") if b"=" in pair]
    return {name: value for name, value in pairs if name not in _OF_SHELLS}
