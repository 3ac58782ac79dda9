"""Start the processes of one training; see `python -m determined.launch.torch_distributed --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from determined.launch._command import HARNESS, MODULE, is_class_entrypoint

if TYPE_CHECKING:
    from determined.launch._harness import load_class, train

__all__ = ["HARNESS", "MODULE", "is_class_entrypoint", "load_class", "train"]


def __getattr__(name: str) -> Any:
    if name in ("load_class", "train"):
        from determined.launch import _harness  # which imports torch

        return getattr(_harness, name)
    raise AttributeError(f"module 'determined.launch' has no attribute {name!r}")
