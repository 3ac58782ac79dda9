"""Machines for tests: network namespaces that are joined by a cable."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest


class Hosts:
    """Two hosts with one cable between them."""

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        self.names = [f"det-{name}-{index}" for index in range(2)]
        self.cable = [f"d{name}{index}" for index in range(2)]

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cable[0], "type", "veth", "peer", "name", self.cable[1])
        for index, (name, end) in enumerate(zip(self.names, self.cable, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"10.77.0.{index + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cable[0], "down")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def connected() -> Iterator[Hosts]:
    """Give two hosts, or skip the test where they cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    made = Hosts()
    try:
        made.connect()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
    try:
        yield made
    finally:
        made.remove()
