"""Fork a process, and end it as the interpreter ends a program."""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from determined.processes import end_with_parent, reset_signals, signals_blocked

_HERE = str(pathlib.Path(__file__).parent)


def fork(body: Callable[[], None]) -> tuple[int, int, int]:
    """Run `body` in a child with nothing open but its output, which ends when this process does.

    Returns its id and the pipes of its output and its errors.
    """
    parent = os.getpid()
    pipes = [os.pipe() for _ in range(2)]
    with signals_blocked():
        pid = os.fork()
        if pid == 0:
            _run(parent, [writer for _, writer in pipes], body)
    for _, writer in pipes:
        os.close(writer)
    stdout, stderr = (reader for reader, _ in pipes)
    return pid, stdout, stderr


def _run(parent: int, writers: list[int], body: Callable[[], None]) -> NoReturn:
    try:
        _separate(parent, *writers)
        body()
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(70)  # a body ends the process itself


def _separate(parent: int, stdout: int, stderr: int) -> None:
    end_with_parent(parent)
    # A group of its own, so that a program that signals its whole group reaches none but its own processes.
    os.setpgid(0, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    reset_signals()


def run_to_end(program: Callable[[], object]) -> NoReturn:
    """Run a program and end this process as the interpreter would: errors shown, threads awaited, exits called."""
    status = _status_of_run(program)
    # Not by leaving the interpreter, which would take apart what all processes share, and take its time for it.
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # how the interpreter waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the program, or its reader is gone
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _status_of_run(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as leaving:
        return _status_of(leaving.code)
    except BaseException as error:
        show(error)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def show(error: BaseException) -> None:
    """Print a traceback that begins where the program does."""
    trace = _without_ours(error.__traceback__)
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:  # one that the program has set
        traceback.print_exc()
        traceback.print_exception(error)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def _status_of(code: Any) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1
