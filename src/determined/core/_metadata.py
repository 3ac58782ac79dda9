"""Free metadata that a program attaches to its trial or to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def checked_metadata(owner: str, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the metadata as reading it back will give it; `owner` names it in errors."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"The {owner} metadata {metadata!r} must be a dict.")
    try:
        return dict(json.loads(json.dumps(dict(metadata or {}))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The {owner} metadata {metadata!r} cannot be kept as JSON: {error}; use dicts, lists, strings and numbers."
        ) from error
