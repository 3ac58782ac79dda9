"""Run a command with its rank before every line: `python -m determined.launch.wrap_rank RANK command [arguments]`.

RANK is a number, or the name of the environment variable that holds it. The exit status is that of the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import IO

from determined.launch._command import UsageError, command_of_script
from determined.launch._rank_shim import SIGNALS
from determined.launch._supervisor import say
from determined.processes import LineCutter, prefixed

_OF_SHELLS = 128


def main(words: list[str] | None = None) -> int:
    """Run what a command line asks for and return its exit status."""
    words = sys.argv[1:] if words is None else words
    try:
        prefix, command = _prefix(words), command_of_script(_program(words))
    except UsageError as error:
        say(f"{error}\nusage: python -m determined.launch.wrap_rank RANK command [arguments]")
        return 2
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for which in SIGNALS:
        signal.signal(which, lambda number, _: process.send_signal(number))
    assert process.stdout is not None
    assert process.stderr is not None
    copies = [
        threading.Thread(target=_copy, args=(source, target, prefix))
        for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
    ]
    for copy in copies:
        copy.start()
    status = process.wait()
    for copy in copies:
        copy.join()
    return status if status >= 0 else _OF_SHELLS - status


def _prefix(words: list[str]) -> bytes:
    rank = words[0] if words else ""
    number = rank if rank.isdecimal() else os.environ.get(rank, "")
    if not number.isdecimal():
        raise UsageError(f"{rank!r} is neither a rank nor an environment variable that holds one.")
    return f"[rank={number}] ".encode()


def _program(words: list[str]) -> list[str]:
    program = words[2:] if words[1:2] == ["--"] else words[1:]
    if not program:
        raise UsageError("there is no command to run.")
    return program


def _copy(source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
    cutter = LineCutter()
    while data := os.read(source.fileno(), 1 << 16):
        target.write(prefixed(prefix, cutter.feed(data)))
        target.flush()
    target.write(prefixed(prefix, cutter.end()))
    target.flush()


if __name__ == "__main__":
    sys.exit(main())
