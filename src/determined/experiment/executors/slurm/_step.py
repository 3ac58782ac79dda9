"""Start a command on each node of a job, and pass the request to stop on to them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType

_RETRY_S = 5.0


def main(*command: str) -> int:
    """Run a command once on each node of this job; returns the exit status of `srun`.

    `srun` kills its tasks when it gets SIGTERM itself, so they get it from Slurm.
    """
    asked = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.set()

    signal.signal(signal.SIGTERM, ask)
    srun = subprocess.Popen(["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", *command])
    threading.Thread(target=_pass_on, args=(asked, srun), daemon=True).start()
    return srun.wait()


def _pass_on(asked: threading.Event, srun: subprocess.Popen[bytes]) -> None:
    asked.wait()
    # Without --batch, to all that `srun` has started, and not to the job itself.
    while srun.poll() is None:
        signalled = subprocess.run(["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]], check=False)
        if signalled.returncode == 0:
            return
        threading.Event().wait(_RETRY_S)
