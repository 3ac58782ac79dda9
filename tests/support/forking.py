"""Run Python programs as processes of their own without starting an interpreter and importing torch for each.

The first program starts a server: a process with one thread that imports torch and this library and forks a child for
each program. The child takes over arguments, environment, working folder and standard streams, and runs the program as
`__main__`. It is a real process: its pid, signals and exit status are its own. Tests of what an interpreter does when
it starts (which modules it imports, `PYTHONHASHSEED`, a console script) start one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

PRELOADED = (
    "psutil",
    "pydantic",
    "rich.live",
    "rich.table",
    "sqlite3",
    "torch._dynamo",
    "yaml",
    "sqlalchemy.dialects.sqlite",
    "determined.pytorch",
    "determined.tracking",
    "determined.experiment",
    "determined.launch.torch_distributed",
    "determined.cli._app",
)
PYTHONPATH = os.pathsep.join(
    map(str, (pathlib.Path(__file__).resolve().parents[2] / "src", pathlib.Path(__file__).resolve().parent))
)
"""Where programs of tests find this library and what tests share, such as `trials`."""

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
_MAX_REQUEST = 1 << 20
_STARTING = threading.Lock()


class Process:
    """A program that a fork server has started, with the interface of `subprocess.Popen` in text mode."""

    def __init__(self, args: Sequence[str], status: int, streams: Sequence[IO[str] | None]) -> None:
        self.args = args
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline() or self._lost())

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                if stream:
                    stream.close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; negative, the signal that killed the program."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._status.readline() or self._lost())
            self._status.close()
        return self.returncode

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Write to standard input, read the other streams to their ends, and wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        read: dict[IO[str], str] = {}
        readers = [
            threading.Thread(target=lambda stream=stream: read.update({stream: stream.read()}), daemon=True)
            for stream in (self.stdout, self.stderr)
            if stream
        ]
        for reader in readers:
            reader.start()
        if self.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or "")
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
            self.stdin = None
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return read.get(self.stdout), read.get(self.stderr)  # type: ignore[arg-type]  # None is not among them

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _lost(self) -> NoReturn:
        raise RuntimeError(f"the fork server has ended; it ran {self.args}")


@functools.cache
def _requests() -> socket.socket:
    """Start the server, once, and return where to send requests to. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    server = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=DEVNULL,
        # As a launcher sets it for ranks, for torch reads it when it is imported.
        env={**os.environ, **_ONE_THREAD, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        cwd=pathlib.Path(__file__).parent,
        start_new_session=True,
    )
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def serve() -> None:
    """Start the process that programs are forked from, unless it is there."""
    with _STARTING:
        _requests()


def start(
    args: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    start_new_session: bool = False,
) -> Process:
    """Start `python *args`; the options are those of `subprocess.Popen`.

    `args` are what follows `python` on its command line: `-m module`, `-c program` or a file, after any `-W`. A
    program that starts a session and whose standard input is a terminal gets it as its controlling one.
    """
    streams: list[IO[str] | None] = []
    theirs: list[int] = []
    for fd, given in enumerate((stdin, stdout, stderr)):
        ours, end = _stream(fd, given, theirs)
        streams.append(ours)
        theirs.append(end)
    status, report = os.pipe()
    request = {
        "args": list(map(str, args)),
        "env": dict(os.environ if env is None else env),
        "cwd": os.fspath(cwd or os.getcwd()),
        "session": start_new_session,
    }
    with _STARTING:
        requests = _requests()
    socket.send_fds(requests, [json.dumps(request).encode()], [*theirs, report])
    for fd in {report, *theirs} - {0, 1, 2, stdin, stdout, stderr}:
        os.close(fd)
    return Process(args, status, streams)


def run(
    args: Sequence[str],
    *,
    input: str | None = None,
    timeout: float | None = None,
    capture_output: bool = False,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python *args` to its end, as `subprocess.run(..., text=True)` does."""
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    options.setdefault("stdin", DEVNULL if input is None else PIPE)
    with start(args, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess(args, process.wait(), stdout, stderr)
    if check:
        done.check_returncode()
    return done


def _stream(fd: int, given: int | None, others: Sequence[int]) -> tuple[IO[str] | None, int]:
    """Return our end of a standard stream of a program, where it is a pipe, and the program's end."""
    if given == PIPE:
        read, write = os.pipe()
        ours, theirs = (write, read) if fd == 0 else (read, write)
        return os.fdopen(ours, "w" if fd == 0 else "r"), theirs
    if given == STDOUT:
        return None, others[1]
    if given == DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    return None, fd if given is None else given


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each request, and report its pid and its exit status. Returns the request, in each child."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reports: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 16)
            _report_ends(reports)
        if requests in ready:
            request, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 4)
            if not request:
                for pid in reports:  # the tests were interrupted
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)  # taking torch apart takes long
            assert len(os.listdir("/proc/self/task")) == 1, "forking is sound only from a process with one thread"
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return json.loads(request), fds[:3]
            reports[pid] = fds[3]
            os.write(fds[3], b"%d\n" % pid)
            for fd in fds[:3]:
                os.close(fd)


def _report_ends(reports: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            report = reports.pop(ended[0])
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                os.write(report, b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
            os.close(report)


def _take_over(request: dict[str, Any], streams: Sequence[int], search: Sequence[str]) -> None:
    """Give this process what the interpreter would have got from whoever starts it."""
    if request["session"]:
        os.setsid()
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _open_streams(os.environ.get("PYTHONIOENCODING") or None)
    sys.path[:] = [*_folders_in("PYTHONPATH"), *search]
    tempfile.tempdir = None  # where the environment says
    sys.modules["numpy"].random.seed()  # else all programs would draw the same


def _open_streams(encoding: str | None) -> None:
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 1 if os.isatty(fd) or fd == 2 else -1
        errors = "backslashreplace" if fd == 2 else None
        stream = open(fd, mode, buffering, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115  # stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _folders_in(variable: str) -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get(variable, "").split(os.pathsep) if folder]


def _set_warnings(options: Sequence[str], initial: Sequence[Any]) -> None:
    """Filter warnings as options of the interpreter say: after imported modules, before the initial filters."""
    sys.warnoptions[:] = [*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *options]
    if sys.warnoptions:
        del warnings.filters[-len(initial) :]  # type: ignore[attr-defined]  # it is a list
        for option in reversed(sys.warnoptions):
            warnings.simplefilter(option, append=True)  # type: ignore[arg-type]
        warnings.filters.extend(initial)  # type: ignore[attr-defined]


def _execute(args: list[str]) -> None:
    """Run what the interpreter would run with these arguments."""
    sys.orig_argv[:] = [sys.executable, *args]
    if args[0] == "-m":
        sys.argv[:] = args[1:]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(args[1], None)  # else a warning that it has been imported
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if args[0] == "-c":
        sys.argv[:] = ["-c", *args[2:]]
        sys.path.insert(0, "")
        source, file = args[1], "<string>"
    else:
        sys.argv[:] = args
        sys.path.insert(0, os.path.dirname(os.path.abspath(args[0])))
        source, file = pathlib.Path(args[0]).read_text(encoding="utf-8"), args[0]
        main.__file__ = os.path.abspath(file)
    exec(compile(source, file, "exec"), vars(main))


def _end(code: int) -> NoReturn:
    """End as the interpreter does, except for taking all modules apart, which takes long."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):
            stream.flush()
    os._exit(code)


def _run(request: dict[str, Any], streams: Sequence[int], search: Sequence[str], initial: Sequence[Any]) -> NoReturn:
    """Be the program that a request asks for, until its end."""
    code: object = 0
    try:
        _take_over(request, streams, search)
        args = request["args"]
        options = []
        while args[0] == "-W":
            options.append(args[1])
            args = args[2:]
        _set_warnings(options, initial)
        _execute(args)
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        _show(error)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _end(code)


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _main() -> NoReturn:
    given = _folders_in("PYTHONPATH")
    search, initial = [entry for entry in sys.path[1:] if entry not in given], list(warnings.filters)
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # so that children do not copy all memory by collecting garbage in it
    request, streams = _serve(requests)
    _run(request, streams, search, initial)


if __name__ == "__main__":
    _main()
