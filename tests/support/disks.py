"""Disks that get full."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


class SmallDisk:
    """A disk of its own; the test is skipped where mounting is not allowed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def mount(self, options: str) -> None:
        """Change the disk by options of `mount`, such as size=30m."""
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)

    def fill(self) -> None:
        """Leave no room."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """Make room again."""
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str) -> Iterator[SmallDisk]:
    """Give a disk at a folder, which is made."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
