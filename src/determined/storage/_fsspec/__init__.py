"""Checkpoints in object stores. Importing this imports neither fsspec nor a client library."""

from determined.storage._base import section_types, url_schemes
from determined.storage._fsspec.cache import abandoned_uploads
from determined.storage._fsspec.connect import environment_for, of_section, of_url, section_of
from determined.storage._fsspec.mirror import FolderMirror
from determined.storage._fsspec.store import FsspecStore, child

__all__ = ["FolderMirror", "FsspecStore", "abandoned_uploads", "child", "environment_for", "section_of"]

section_types.update(s3=of_section, gcs=of_section, azure=of_section)
url_schemes.update(s3=of_url, gs=of_url, az=of_url, memory=of_url, file=of_url)
