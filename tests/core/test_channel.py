"""The meeting place of the ranks: strangers, keys, busy places and duplicate ranks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import re
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from core_ranks import Ranks, contexts, free_port, numbers, together

from determined import core, errors

pytestmark = pytest.mark.usefixtures("meeting_folder")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def pair(port: int) -> Iterator[list[Any]]:
    """Two ranks that meet at a TCP port and have not met yet."""
    with contexts(2, force_tcp=True, pub_port=port) as both:
        yield both


def knock(port: int, data: bytes = b"") -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port), timeout=30)
    stranger.sendall(data)
    return stranger


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other end closes."""
    received = b""
    try:
        while data := sock.recv(4096):
            received += data
    except ConnectionResetError:
        return received
    return received


def meet(both: list[Any]) -> list[Any]:
    return together(both, lambda each: each.allgather(each.rank))


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01" + bytes(200),
    b"RESLTCH\x01" + bytes(300),
    bytes(100_000),
    b"\xff",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["http", "tls", "forged", "zeros", "byte"])
def test_garbage_is_answered_by_closing(garbage: bytes, pair: list[Any], port: int) -> None:
    with knock(port, garbage) as stranger:
        # Our greeting, and for what looks like an answer a refusal without proof; nothing more.
        assert len(read_all(stranger)) <= 40 + 33
    assert meet(pair) == [[0, 1]] * 2


def test_port_scan_does_no_harm(pair: list[Any], port: int) -> None:
    for _ in range(300):
        knock(port).close()
    assert meet(pair) == [[0, 1]] * 2


def test_two_hundred_slow_strangers_keep_no_rank_out(pair: list[Any], port: int) -> None:
    strangers = [knock(port, b"R") for _ in range(200)]
    try:
        assert meet(pair) == [[0, 1]] * 2
        assert [meet(pair) for _ in range(20)] == [[[0, 1]] * 2] * 20
    finally:
        for stranger in strangers:
            stranger.close()


def test_silent_stranger_is_dropped_after_a_while(pair: list[Any], port: int) -> None:
    with knock(port) as stranger:
        assert len(read_all(stranger)) == 40


def test_number_of_strangers_is_bounded(pair: list[Any], port: int) -> None:
    first = knock(port)
    others = [knock(port) for _ in range(150)]
    try:
        first.settimeout(4)  # before its time to answer is over
        assert len(read_all(first)) == 40
    finally:
        for stranger in (first, *others):
            stranger.close()


class Bomb:
    def __init__(self, canary: pathlib.Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.canary,)


def test_pickle_of_a_stranger_is_never_opened(pair: list[Any], port: int, tmp_path: pathlib.Path) -> None:
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb(canary))
    header = bytes([1, 2]) + bytes(6) + len(bomb).to_bytes(8, "big")
    for data in (bomb, header + bomb, b"RESLTCH\x01" + header + bomb * 20):
        with knock(port, data) as stranger:
            read_all(stranger)
    assert meet(pair) == [[0, 1]] * 2
    assert not canary.exists()


class Relay:
    """Stands between a rank and the chief and keeps what the rank says."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.said = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rank, _ = self._server.accept()
        with rank, socket.create_connection(("127.0.0.1", self._port)) as chief:
            back = threading.Thread(target=self._pass_back, args=(chief, rank))
            back.start()
            with contextlib.suppress(OSError):  # one end has closed
                while data := rank.recv(65536):
                    self.said += data
                    chief.sendall(data)
                chief.shutdown(socket.SHUT_RDWR)
            back.join()

    def _pass_back(self, chief: socket.socket, rank: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := chief.recv(65536):
                rank.sendall(data)

    def close(self) -> None:
        self._thread.join()
        self._server.close()


def test_recorded_handshake_is_worth_nothing_when_replayed(port: int, tmp_path: pathlib.Path) -> None:
    relay = Relay(port)
    canary = tmp_path / "canary"
    places = enumerate((port, relay.port))
    made = [core.DistributedContext(**numbers(rank, 2), force_tcp=True, pub_port=at, timeout=60) for rank, at in places]
    assert meet(made) == [[0, 1]] * 2
    for each in made:
        each.close()
    relay.close()
    with contexts(2, force_tcp=True, pub_port=port) as both:
        with knock(port, relay.said + pickle.dumps(Bomb(canary))) as stranger:
            assert read_all(stranger)[40:41] == b"\x02"  # wrong key
        assert meet(both) == [[0, 1]] * 2
    assert not canary.exists()


def test_wrong_key_is_named_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for rank, key in ((0, "one"), (1, "other")):
        monkeypatch.setenv("DET_DISTRIBUTED_KEY", key)
        made.append(core.DistributedContext(**numbers(rank, 2), force_tcp=True, pub_port=port, timeout=60))
    with pytest.raises(errors.InternalException, match="set DET_DISTRIBUTED_KEY to the same text"):
        made[1].allgather(1)
    for each in made:
        each.close()


def test_impostor_of_the_chief_is_not_believed(port: int) -> None:
    def impersonate(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"RESLTCH\x01" + bytes(32))
            sock.recv(1024)
            sock.sendall(b"\x01" + bytes(32))

    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=impersonate, args=(server,))
        thread.start()
        worker = core.DistributedContext(**numbers(1, 2), force_tcp=True, pub_port=port, timeout=60)
        with pytest.raises(errors.InternalException, match="key"):
            worker.allgather(1)
        worker.close()
        thread.join()


def greet(server: socket.socket) -> None:
    sock, _ = server.accept()
    with sock:
        sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(40))


def test_another_program_at_the_port_is_named(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=greet, args=(server,))
        thread.start()
        worker = core.DistributedContext(**numbers(1, 2), force_tcp=True, pub_port=port, timeout=60)
        with pytest.raises(errors.InternalException, match=f"Something else .* listens at 127.0.0.1:{port}"):
            worker.allgather(1)
        worker.close()
        thread.join()


@pytest.mark.parametrize("force_tcp", [False, True])
def test_second_process_of_one_rank_is_refused(force_tcp: bool, port: int) -> None:
    with contexts(2, force_tcp=force_tcp, pub_port=port) as both:
        meet(both)
        double = core.DistributedContext(**numbers(1, 2), force_tcp=force_tcp, pub_port=port, timeout=60)
        with pytest.raises(errors.InternalException, match=r"Rank 1 of the job at .* is there already"):
            double.allgather(1)
        double.close()
        assert meet(both) == [[0, 1]] * 2


def test_rank_of_a_job_of_another_size_is_refused(port: int) -> None:
    with contexts(2, pub_port=port) as both:
        alien = core.DistributedContext(**numbers(2, 3), pub_port=port, timeout=60)
        with pytest.raises(errors.InternalException, match="not one of 3 processes"):
            alien.allgather(1)
        alien.close()
        assert meet(both) == [[0, 1]] * 2


def test_busy_port_is_named_with_the_remedy(port: int) -> None:
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(OSError, match=f"port {port + 1} .* port_offset"):
        core.DistributedContext(**numbers(0, 2), force_tcp=True, pub_port=port, port_offset=1)


def test_second_job_at_the_same_place_is_refused(port: int) -> None:
    with contexts(2, pub_port=port) as both:
        with pytest.raises(OSError, match=r"another job that runs; .* port_offset"):
            core.DistributedContext(**numbers(0, 2), pub_port=port)
        assert meet(both) == [[0, 1]] * 2


@pytest.mark.parametrize("force_tcp", [False, True])
def test_jobs_of_different_offsets_do_not_meet(force_tcp: bool, port: int) -> None:
    options: dict[str, Any] = {"force_tcp": force_tcp, "pub_port": port}
    with contexts(2, **options) as one, contexts(2, **options, port_offset=7) as other:
        got = together([*one, *other], lambda each: each.allgather("one" if each in one else "other"))
    assert got == [["one", "one"]] * 2 + [["other", "other"]] * 2


def test_place_of_a_killed_chief_is_taken_over(ranks: Ranks, meeting_folder: pathlib.Path) -> None:
    (dead,) = ranks.start("say('ready'); hear()", numbers(0, 2))
    dead.line()
    dead.kill()
    assert list(meeting_folder.glob("resolute-*/12360.sock"))
    with contexts(2) as both:
        assert meet(both) == [[0, 1]] * 2


def test_sockets_of_killed_chiefs_are_swept(ranks: Ranks, meeting_folder: pathlib.Path) -> None:
    (dead,) = ranks.start("say('ready'); hear()", {**numbers(0, 2), "port_offset": 1})
    dead.line()
    dead.kill()
    with contexts(2):
        assert [path.name for path in meeting_folder.glob("resolute-*/*.sock")] == ["12360.sock"]


def test_only_this_user_can_enter_the_meeting_place(meeting_folder: pathlib.Path, port: int) -> None:
    with contexts(2), contexts(2, force_tcp=True, pub_port=port):
        (folder,) = meeting_folder.glob("resolute-*")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, folder / "key")}
    assert modes == {folder.name: 0, "key": 0}


def test_meeting_place_that_others_can_enter_is_refused(meeting_folder: pathlib.Path) -> None:
    folder = meeting_folder / f"resolute-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match=re.escape(f"{folder} must be a folder of this user")):
        core.DistributedContext(**numbers(0, 2))


def test_meeting_place_that_is_a_link_is_refused(meeting_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (meeting_folder / f"resolute-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="must be a folder of this user"):
        core.DistributedContext(**numbers(0, 2))


def test_several_machines_meet_without_a_key_and_the_chief_warns(caplog: pytest.LogCaptureFixture) -> None:
    with contexts(2, machines=2, chief_ip="127.0.0.1", pub_port=free_port()) as both:
        assert together(both, lambda each: each.allgather(each.rank)) == [[0, 1]] * 2
    (warned,) = caplog.messages
    assert "Set DET_DISTRIBUTED_KEY to the same secret string" in warned


def test_several_machines_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_KEY", "secret")
    with pytest.raises(ValueError, match="pass the address of the machine of rank 0 as chief_ip"):
        core.DistributedContext(**numbers(1, 2, machines=2))


def test_address_of_another_machine_is_refused_on_the_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_KEY", "secret")
    with pytest.raises(OSError, match=r"chief_ip='192.0.2.7' is not an address of this machine"):
        core.DistributedContext(**numbers(0, 2, machines=2), chief_ip="192.0.2.7")


@pytest.mark.parametrize("options", [{"pub_port": 0}, {"pub_port": 65536}, {"pull_port": 60000, "port_offset": 9999}])
def test_impossible_ports_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be a port, from 1 to 65535"):
        core.DistributedContext(**numbers(0, 2), **options)  # type: ignore[arg-type]


def test_ports_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="pub_port='12360'"):
        core.DistributedContext(**numbers(0, 2), pub_port="12360")  # type: ignore[arg-type]
