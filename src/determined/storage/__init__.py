"""Checkpoint bytes: where a checkpoint's folder is, and how it comes to be there whole."""

from determined.storage._config import store_for
from determined.storage._folder import FolderStore

__all__ = ["FolderStore", "store_for"]
