"""Which process is meant by the record, and whether it still runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from determined import tracking

pytestmark = pytest.mark.process

IN_NAMESPACES_OF_ITS_OWN = ["unshare", "--pid", "--fork", "--time", "--boottime", "1000"]
DESCRIBES_ITSELF = """
import json, os
from determined import tracking
process = tracking.RunProcess.current()
print(json.dumps([process.pid, process.host, process.identity.to_json()]), flush=True)
input()
"""


def identity_of(process: tracking.RunProcess) -> Any:
    assert process.identity is not None
    return process.identity


def with_identity(**changes: Any) -> tracking.RunProcess:
    here = tracking.RunProcess.current()
    return dataclasses.replace(here, identity=dataclasses.replace(identity_of(here), **changes))


def test_a_step_of_the_clock_kills_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process, boot_time = tracking.RunProcess.current(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    assert psutil.Process().create_time() > boot_time + 3600, "the clock seems to have moved"
    assert not process.is_gone
    assert process.is_same(tracking.RunProcess.of(process.pid))


def test_a_process_is_found_under_another_name_of_its_host() -> None:
    renamed = dataclasses.replace(tracking.RunProcess.current(), host="renamed")
    assert renamed.is_here
    assert not renamed.is_gone


def test_processes_are_gone_once_their_machine_has_booted_again() -> None:
    assert with_identity(boot="before").is_gone


def test_processes_of_another_machine_may_live() -> None:
    there = with_identity(boot="another", machine="another")
    assert not there.is_here
    assert not there.is_gone


def test_a_later_process_with_the_same_id_is_another_one() -> None:
    earlier = with_identity(start=1)
    assert earlier.is_gone
    assert not earlier.is_same(tracking.RunProcess.current())


@pytest.fixture
def contained() -> Iterator[tracking.RunProcess]:
    """A process of another container of this machine, where ids and ticks are others."""
    if (
        not shutil.which("unshare")
        or subprocess.run([*IN_NAMESPACES_OF_ITS_OWN, "true"], capture_output=True).returncode
    ):
        pytest.skip("this user cannot make namespaces")
    command = [*IN_NAMESPACES_OF_ITS_OWN, "--mount-proc", sys.executable, "-c", DESCRIBES_ITSELF]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, host, identity = json.loads(process.stdout.readline())
        kind = type(identity_of(tracking.RunProcess.current()))
        yield tracking.RunProcess(pid=pid, host=host, identity=kind.from_json(identity))
        process.communicate("\n", timeout=60)


def test_a_process_of_another_container_is_not_taken_for_the_one_here_with_its_id(
    contained: tracking.RunProcess,
) -> None:
    assert contained.pid == 1
    assert not contained.is_here
    assert not contained.is_gone
