"""The store where ranks meet: keys, forged values, busy ports, duplicate ranks, and how much it holds."""

from __future__ import annotations

import json
import pathlib
import pickle
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from core_ranks import Ranks, contexts, free_port, numbers, together

from determined import core, errors
from determined._home import home


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def pair(port: int) -> Iterator[list[Any]]:
    """Two ranks that have not met yet."""
    with contexts(2, pub_port=port) as both:
        yield both


@pytest.fixture
def intruder(pair: list[Any], port: int) -> Any:
    """Somebody else's connection to the store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def meet(both: list[Any]) -> list[Any]:
    return together(both, lambda each: each.allgather(each.rank))


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(100_000), b"\xff", b""]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["http", "tls", "zeros", "byte", "nothing"])
def test_garbage_at_the_ports_does_no_harm(garbage: bytes, pair: list[Any], port: int, intruder: Any) -> None:
    (lifelines,) = [json.loads(intruder.get("job")[36:])["lifelines"]]
    strangers = [socket.create_connection(("127.0.0.1", at), timeout=30) for at in (port, lifelines) * 20]
    for stranger in strangers:
        stranger.sendall(garbage)
    assert meet(pair) == [[0, 1]] * 2
    for stranger in strangers:
        stranger.close()
    assert meet(pair) == [[0, 1]] * 2


class Bomb:
    def __init__(self, canary: pathlib.Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.canary,)


@pytest.mark.parametrize("forgery", ["unsigned", "bare", "copied"])
def test_value_that_is_not_signed_is_never_unpickled(
    forgery: str, pair: list[Any], intruder: Any, tmp_path: pathlib.Path
) -> None:
    canary = tmp_path / "canary"
    bomb = json.dumps(["Bomb", None, []]).encode() + b"\n" + pickle.dumps(Bomb(canary))
    meet(pair)
    forged = {"unsigned": bytes(32) + b"\0\0\0\1" + bomb, "bare": bomb, "copied": intruder.get("all/1/1")}[forgery]
    intruder.set("all/2/1", forged)
    with pytest.raises(errors.InternalException, match=r"'all/2/1' in the store at .* is not signed with the key"):
        pair[0].allgather(1)
    assert not canary.exists()


def test_event_that_is_not_signed_is_not_believed(pair: list[Any], intruder: Any) -> None:
    meet(pair)
    intruder.set("log/0", bytes(36) + json.dumps({"sender": 0, "kind": "broken", "text": "forged"}).encode())
    assert all("is not signed" in str(each) for each in meet(pair))


def test_values_of_another_job_with_the_same_key_are_refused(port: int, intruder: Any, pair: list[Any]) -> None:
    with contexts(2, pub_port=free_port()) as other:
        meet(other)
        meet(pair)
        theirs = dist.TCPStore("127.0.0.1", int(other[0].exchange.address.split(":")[1]), is_master=False)
        intruder.set("all/2/1", theirs.get("all/1/1"))
    with pytest.raises(errors.InternalException, match="is not signed"):
        pair[0].allgather(1)


def test_wrong_key_is_named_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for rank, key in ((0, "one"), (1, "other")):
        monkeypatch.setenv("DET_DISTRIBUTED_KEY", key)
        made.append(core.DistributedContext(**numbers(rank, 2), pub_port=port, timeout=60))
    with pytest.raises(errors.InternalException, match="set DET_DISTRIBUTED_KEY to the same string"):
        made[1].allgather(1)
    for each in made:
        each.close()


def test_only_this_user_can_read_the_key(pair: list[Any]) -> None:
    assert stat.S_IMODE(home().distributed_key.stat().st_mode) == 0o600


def test_key_that_others_can_read_is_refused(port: int) -> None:
    with contexts(2, pub_port=port):
        home().distributed_key.chmod(0o640)
        with pytest.raises(PermissionError, match="must belong to this user and have mode 600"):
            core.DistributedContext(**numbers(1, 2), pub_port=port)


def test_key_is_made_once_by_ranks_that_come_together() -> None:
    from determined.core.distributed._store import home_key

    assert len(set(together(range(8), lambda _: home_key()))) == 1


def greet(server: socket.socket) -> None:
    while True:
        try:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(40))
        except OSError:
            return


def test_another_program_at_the_port_is_named(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=greet, args=(server,), daemon=True).start()
        worker = core.DistributedContext(**numbers(1, 2), pub_port=port, timeout=60)
        with pytest.raises(errors.InternalException, match=f"What listens at 127.0.0.1:{port} is not a store"):
            worker.allgather(1)
        worker.close()
        server.shutdown(socket.SHUT_RDWR)


def test_second_process_of_one_rank_is_refused(port: int, pair: list[Any]) -> None:
    meet(pair)
    double = core.DistributedContext(**numbers(1, 2), pub_port=port, timeout=60)
    with pytest.raises(errors.InternalException, match=r"Rank 1 of the job at .* is there already"):
        double.allgather(1)
    double.close()
    assert meet(pair) == [[0, 1]] * 2


def test_rank_of_a_job_of_another_size_is_refused(port: int, pair: list[Any]) -> None:
    alien = core.DistributedContext(**numbers(2, 3), pub_port=port, timeout=60)
    with pytest.raises(errors.InternalException, match="has 2 processes, but this is one of 3"):
        alien.allgather(1)
    alien.close()
    assert meet(pair) == [[0, 1]] * 2


def test_busy_port_is_named_with_the_remedy(port: int) -> None:
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(OSError, match=f"port {port + 1} .* port_offset"):
        core.DistributedContext(**numbers(0, 2), pub_port=port, port_offset=1)


def test_second_job_at_the_same_port_is_refused(port: int, pair: list[Any]) -> None:
    with pytest.raises(OSError, match=r"maybe by another job; .* port_offset"):
        core.DistributedContext(**numbers(0, 2), pub_port=port)
    assert meet(pair) == [[0, 1]] * 2


def test_jobs_of_different_offsets_do_not_meet(port: int) -> None:
    with contexts(2, pub_port=port) as one, contexts(2, pub_port=port, port_offset=7) as other:
        got = together([*one, *other], lambda each: each.allgather("one" if each in one else "other"))
    assert got == [["one", "one"]] * 2 + [["other", "other"]] * 2


FORKING = """
import time
if not os.fork():
    time.sleep(600)
say("ready")
hear()
"""


def test_port_of_a_killed_chief_is_free_although_its_child_lives(ranks: Ranks, port: int) -> None:
    (dead,) = ranks.start(FORKING, {**numbers(0, 2), "pub_port": port})
    dead.line()
    dead.kill()
    with contexts(2, pub_port=port) as both:
        assert meet(both) == [[0, 1]] * 2


def test_values_of_finished_calls_are_deleted(pair: list[Any], intruder: Any) -> None:
    large = bytes(9_000_000)
    for number in range(50):
        together(pair, lambda each, number=number: each.allgather(large if number == 25 else number))
    together(pair, lambda each: each.exchange.submit(lambda: None).result())
    assert intruder.num_keys() < 10


def test_several_machines_meet_without_a_key_and_the_chief_warns(caplog: pytest.LogCaptureFixture) -> None:
    options = {"chief_ip": "127.0.0.1", "pub_port": free_port(), "pull_port": free_port()}
    with contexts(2, machines=2, **options) as both:
        assert meet(both) == [[0, 1]] * 2
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
