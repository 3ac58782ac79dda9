"""Checkpoint bytes: where a checkpoint's folder is, and how it comes to be there whole."""

from determined.storage._faults import fault_point
from determined.storage._local import FolderStore, errors_naming, sync_folder
from determined.storage._locks import locked, remove_abandoned
from determined.storage._manifest import MANIFEST_FILE, Manifest
from determined.storage._plain import read_json, read_plain
from determined.storage._registry import store_for
from determined.storage._retention import Candidate, Retention, expired

__all__ = [
    "MANIFEST_FILE",
    "Candidate",
    "FolderStore",
    "Manifest",
    "Retention",
    "errors_naming",
    "expired",
    "fault_point",
    "locked",
    "read_json",
    "read_plain",
    "remove_abandoned",
    "store_for",
    "sync_folder",
]
