"""Small functions that programs for Determined import."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

__all__ = ["chunks", "download_gcs_blob_with_backoff", "merge_dicts"]

T = TypeVar("T")

_BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which a request may be tried again."""


def chunks(lst: Sequence[T], chunk_size: int) -> Iterator[Sequence[T]]:
    """Yield a sequence in pieces of `chunk_size`; the last one may be shorter."""
    for start in range(0, len(lst), chunk_size):
        yield lst[start : start + chunk_size]


def merge_dicts(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the entries of both, mappings merged; `override` decides on all other values."""
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_dicts(merged[key], value) if both else value
    return merged


def download_gcs_blob_with_backoff(blob: Any, n_retries: int = 32, max_backoff: float = 32) -> bytes:
    """Return the contents of a blob of `google.cloud.storage`.

    While the service is busy the download is tried again, up to `n_retries` times, after pauses that double up to
    `max_backoff` seconds.
    """
    for attempt in range(n_retries):
        try:
            return bytes(blob.download_as_bytes())
        except Exception as error:
            if getattr(error, "code", None) not in _BUSY:
                raise
        time.sleep(min(2.0**attempt, max_backoff) * random.uniform(0.5, 1))
    return bytes(blob.download_as_bytes())


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module 'determined.util' has no attribute {name!r}; it offers {', '.join(__all__)}.")
