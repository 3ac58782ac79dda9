"""Environments for the peers of benchmarks/peers.py: each has its own, and all use the torch of this one."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

SHARED = ("torch", "numpy")


class CannotInstall(Exception):
    """A peer is not to be had; the message says why."""


def share(folder: pathlib.Path) -> None:
    """Fill a folder with links to torch, NumPy and what they need, and nothing else of this environment."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for distribution in _with_needs(SHARED):
        tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = folder / top
            if not link.exists():  # several packages have parts in one folder
                link.symlink_to(pathlib.Path(str(distribution.locate_file(top))).resolve())


def _with_needs(names: tuple[str, ...]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in found or (distribution := _installed(name)) is None:
            continue
        found[name] = distribution
        needs = [need for need in distribution.requires or () if "extra ==" not in need]
        pending += [match[0] for need in needs if (match := re.match(r"[\w.-]+", need))]
    return list(found.values())


def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def make(folder: pathlib.Path, requirement: str, shared: pathlib.Path) -> pathlib.Path:
    """Return the interpreter of an environment with a package; it is made on first use."""
    python = folder / "bin" / "python"
    mark = folder / ".installed"
    if mark.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    site = pathlib.Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (site / "shared.pth").write_text(f"{shared.resolve()}\n")
    _install(python, requirement)
    mark.touch()
    return python


def _install(python: pathlib.Path, requirement: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--retries", "1"]
    done = subprocess.run([*pip, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotInstall(complaints[-1] if complaints else f"pip ended with status {done.returncode}")
