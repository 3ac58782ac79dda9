"""What ranks that the launcher starts write, and how it ends when they do."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forking
from determined.launch.torch_distributed import main
from determined.processes import LineCutter, prefixed

pytestmark = pytest.mark.process

TWO = ["--nproc-per-node", "2", "--"]


def test_every_line_names_its_rank_and_arguments_arrive_as_they_are(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    name = script(
        "import os, sys\n"
        "print('got', sys.argv[1:])\n"
        "print(os.environ['OMP_NUM_THREADS'], 'threads', file=sys.stderr)\n"
        "print('no end', end='')"
    )
    arguments = ["--lr", "1", "--nproc-per-node", "7", "--", "$$x ${local_rank}"]
    assert main([*TWO, name, *arguments]) == 0
    written = capfd.readouterr()
    assert sorted(written.out.splitlines()) == [
        line for rank in "01" for line in sorted([f"[rank={rank}] got {arguments}", f"[rank={rank}] no end"])
    ]
    assert sorted(written.err.splitlines()) == ["[rank=0] 4 threads", "[rank=1] 4 threads"]


def test_long_lines_of_many_ranks_stay_whole_in_a_pipe(
    script: Callable[[str], str], start: Callable[..., forking.Process]
) -> None:
    name = script("import os\nfor _ in range(9): os.write(1, os.environ['RANK'].encode() * 150_000 + b'\\n')")
    lines = start("--nproc-per-node", "3", "--", name).communicate(timeout=60)[0].splitlines()
    assert sorted(lines) == [f"[rank={rank}] {rank * 150_000}" for rank in "012" for _ in range(9)]


def test_module_runs_as_a_program(script: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "determined.launch.torch_distributed", *TWO, script("print('here')")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[rank=0] here", "[rank=1] here"]), done.stderr


def test_one_process_needs_no_prefix_and_any_program_runs(
    project: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["sh", "-c", "echo $LOCAL_WORLD_SIZE of $WORLD_SIZE"]) == 0
    written = capfd.readouterr()
    assert written.out == "1 of 1\n"
    assert "--nproc-per-node 4 --" in written.err


def test_exit_code_of_the_failed_rank_is_kept_and_the_others_are_ended(
    script: Callable[[str], str], project: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = script(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(os.environ['RANK']).write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "time.sleep(600)"
    )
    assert main([*TWO, name]) == 7
    assert "rank 1 failed first: it ended with exit code 7. Host: " in capfd.readouterr().err
    assert not any(is_running(int(file.read_text())) for file in (project / "0", project / "1"))


def is_running(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def test_rank_that_is_killed_gives_the_status_of_its_signal(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    # The other one fails in its wake, as a rank does whose peer is gone.
    name = script(
        "import os, signal, socket, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    with socket.socket(socket.AF_UNIX) as s:\n"
        "        s.bind('peer'); s.listen()\n"
        "        link = s.accept()[0]\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "import contextlib\n"
        "link = socket.socket(socket.AF_UNIX)\n"
        "while True:\n"
        "    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):\n"
        "        link.connect('peer'); break\n"
        "link.recv(1)\n"
        "sys.exit(1)"
    )
    assert main([*TWO, name]) == 128 + 9
    said = capfd.readouterr().err
    assert "rank 1 failed first: it was killed by SIGKILL" in said
    assert said.count("failed first") == 1


def test_rank_that_is_killed_is_named_though_its_keeper_hears_of_it_late(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    # As on a busy machine: the other one has missed it, said so and ended before the keeper runs again.
    name = script(
        "import os, pathlib, signal, subprocess, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    keeper = os.getppid()\n"
        "    wake = f'while ! test -e over; do sleep 0.01; done; sleep 0.2; kill -CONT {keeper}'\n"
        "    null = subprocess.DEVNULL\n"
        "    subprocess.Popen(['sh', '-c', wake], stdout=null, stderr=null, start_new_session=True)\n"
        "    os.kill(keeper, signal.SIGSTOP)\n"
        "    pathlib.Path('gone').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "import atexit\n"
        "while not pathlib.Path('gone').exists(): time.sleep(0.01)\n"
        "atexit.register(pathlib.Path('over').touch)\n"
        "raise OSError('the peer is gone')"
    )
    assert main([*TWO, name]) == 128 + 9
    assert "rank 1 failed first: it was killed by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(
    "crash",
    [
        pytest.param("os.abort()", id="as NCCL does"),
        pytest.param("atexit.register(os.kill, os.getpid(), signal.SIGSEGV); raise OSError", id="while ending"),
    ],
)
def test_rank_that_crashes_because_its_peer_has_failed_is_not_named(
    crash: str, script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = script(
        "import atexit, os, pathlib, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not pathlib.Path('over').exists(): time.sleep(0.01)\n"
        "    time.sleep(0.3)\n"
        f"    {crash}\n"
        "atexit.register(pathlib.Path('over').touch)\n"
        "sys.exit(3)"
    )
    assert main([*TWO, name]) == 3
    assert "rank 0 failed first: it ended with exit code 3" in capfd.readouterr().err


def test_rank_whose_traceback_came_first_is_named_however_long_it_takes_to_end(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = script(
        "import atexit, os, pathlib, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    def end():\n"
        "        while not pathlib.Path('over').exists(): time.sleep(0.01)\n"
        "        time.sleep(0.2)\n"
        "    atexit.register(end)\n"
        "    pathlib.Path('broken').touch()\n"
        "    raise ValueError('broken here')\n"
        "while not pathlib.Path('broken').exists(): time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "atexit.register(pathlib.Path('over').touch)\n"
        "raise OSError('the peer is gone')"
    )
    assert main([*TWO, name]) == 1
    said = capfd.readouterr().err
    assert "[rank=1] ValueError: broken here" in said
    assert "rank 1 failed first: it ended with exit code 1" in said


def test_rank_that_is_frozen_after_the_others_have_ended_is_killed_and_named(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_TIMEOUT", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    # The others end when rank 1 is frozen, however late it starts.
    name = script(
        "import os, pathlib, signal, time\n"
        "import psutil\n"
        "if os.environ['RANK'] == '1':\n"
        "    pathlib.Path('part').write_text(str(os.getpid()))\n"
        "    os.rename('part', 'pid')\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not pathlib.Path('pid').exists(): time.sleep(0.01)\n"
        "frozen = psutil.Process(int(pathlib.Path('pid').read_text()))\n"
        "while frozen.status() != psutil.STATUS_STOPPED: time.sleep(0.01)"
    )
    assert main(["--nproc-per-node", "3", "--", name]) == 128 + 9
    said = capfd.readouterr().err
    assert "rank 1 failed first: it did not end within 1 seconds after others had (the longer of" in said
    assert "rank 0" not in said


def test_rank_that_never_begins_does_not_hold_up_the_others_for_ever(
    script: Callable[[str], str],
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_TIMEOUT", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    python = tmp_path / "python"
    hangs = 'if [ "$RANK" = 1 ]; then exec "$real" -c "import time; time.sleep(600)" "$@"; fi'
    python.write_text(f'#!/bin/sh\nreal={sys.executable}\n{hangs}\nexec "$real" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert main([*TWO, script("print('trained')")]) == 1
    written = capfd.readouterr()
    assert "[rank=0] trained" in written.out
    assert "which should have started a rank, does not answer and is killed" in written.err


def test_rank_that_is_frozen_is_named_rather_than_one_that_ends_because_of_it(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    # As a rank says it that has heard nothing of another one for DET_PEER_TIMEOUT.
    name = script(
        "import os, pathlib, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    pathlib.Path('frozen').touch()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not pathlib.Path('frozen').exists(): time.sleep(0.01)\n"
        "sys.exit('Rank 0 stops because of rank 1: nothing was heard of it for 120 s: it is frozen or cut off')"
    )
    assert main([*TWO, name]) == 1
    said = capfd.readouterr().err
    assert "rank 1 failed first: it does not end, and rank 0 ended with exit code 1 because of it. Host: " in said


def test_ranks_of_one_machine_meet_on_the_loopback_interface_only(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = script(
        "import os, psutil, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "found = [one.laddr for one in psutil.net_connections('tcp') if one.status == psutil.CONN_LISTEN]\n"
        "print({at.ip for at in found if at.port == int(os.environ['MASTER_PORT'])})\n"
        "dist.destroy_process_group()"
    )
    assert main([*TWO, name]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank={rank}] {{'127.0.0.1'}}" for rank in "01"]


def test_ranks_start_again_as_often_as_asked(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    name = script(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt)\n"
        "sys.exit(3 if attempt == '0' else 0)"
    )
    assert main(["--nproc-per-node", "2", "--max-restarts", "1", "--", name]) == 0
    assert sorted(set(capfd.readouterr().out.splitlines())) == [f"[rank={r}] attempt {a}" for r in "01" for a in "01"]


@given(st.lists(st.binary() | st.sampled_from([b"\r", b"\n", b"\r\n", b"text"]), max_size=30))
def test_lines_hold_all_that_was_written(pieces: list[bytes]) -> None:
    cutter = LineCutter()
    written = prefixed(b"[rank=3] ", [line for piece in pieces for line in cutter.feed(piece)] + cutter.end())
    whole = b"".join(pieces)
    found = re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", whole)
    ended = [line if line.endswith((b"\r", b"\n")) else line + b"\n" for line in found]
    if whole.endswith(b"\r"):
        ended[-1] = ended[-1].removesuffix(b"\r") + b"\n"
    assert written == b"".join(b"[rank=3] " + line for line in ended)


def test_line_without_an_end_is_not_kept_for_ever() -> None:
    cutter = LineCutter()
    written = b"".join(prefixed(b"> ", cutter.feed(b"x" * 65536)) for _ in range(40))
    assert written.replace(b"> ", b"").replace(b"\n", b"") == b"x" * (written.count(b"x"))
    assert written.count(b"\n") == 2
