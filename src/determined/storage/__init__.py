"""Checkpoint files: where they are, and how a checkpoint comes to be there complete or not at all."""

from determined.storage._base import METADATA_FILE, CheckpointStore, SavedCheckpoint
from determined.storage._download import download, staged
from determined.storage._faults import fault_point
from determined.storage._fsspec import FolderMirror, FsspecStore, abandoned_uploads, environment_for, section_of
from determined.storage._local import FolderStore, errors_naming, sync_folder
from determined.storage._locks import locked, remove_abandoned
from determined.storage._manifest import MANIFEST_FILE, Manifest
from determined.storage._plain import read_json, read_plain
from determined.storage._registry import has_store, locate, location_in, open_at, store_for
from determined.storage._retention import Candidate, Retention, expired

__all__ = [
    "MANIFEST_FILE",
    "METADATA_FILE",
    "Candidate",
    "CheckpointStore",
    "FolderMirror",
    "FolderStore",
    "FsspecStore",
    "Manifest",
    "Retention",
    "SavedCheckpoint",
    "abandoned_uploads",
    "download",
    "environment_for",
    "errors_naming",
    "expired",
    "fault_point",
    "has_store",
    "locate",
    "location_in",
    "locked",
    "open_at",
    "read_json",
    "read_plain",
    "remove_abandoned",
    "section_of",
    "staged",
    "store_for",
    "sync_folder",
]
