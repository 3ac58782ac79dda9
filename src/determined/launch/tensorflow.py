"""Run a TensorFlow program, once on this machine: `python -m determined.launch.tensorflow [--] script.py [arguments]`.

The program finds the GPUs of its run by itself, as with `tf.distribute.MirroredStrategy`.
"""

from __future__ import annotations

import os
import sys

from determined._info import get_cluster_info
from determined.launch._command import UsageError, command_of_script
from determined.launch._supervisor import say


def command_of(words: list[str]) -> list[str]:
    """Return the command that a command line asks for."""
    program = words[1:] if words[:1] == ["--"] else words
    if not program:
        raise UsageError("there is no script to run.")
    if program[0].startswith("-"):
        raise UsageError(f"{program[0]} is not understood here; write a script. There are no TensorFlow trials.")
    info = get_cluster_info()
    if info is not None and len(info.container_addrs) > 1:
        raise UsageError(f"TensorFlow runs on one machine here, and this run has {len(info.container_addrs)}.")
    return command_of_script(program)


if __name__ == "__main__":
    try:
        command = command_of(sys.argv[1:])
    except UsageError as error:
        say(f"{error}\nusage: python -m determined.launch.tensorflow [--] script.py [arguments]")
        sys.exit(2)
    os.execvp(command[0], command)
