"""Reading the rows of the registry of models."""

from __future__ import annotations

from collections.abc import Collection

from . import _schema, _tallies
from ._reading import Reader
from ._rows import MODEL, VERSION, Row


def models(reader: Reader) -> list[Row]:
    """Return all models, the oldest first."""
    rows = reader.rows(MODEL, _schema.models.c.id, reader.ids(_schema.models))
    _tallies.verify(_tallies.MODELS, [((0, ""), row) for row in rows], reader.tallies(_tallies.MODELS, [0]))
    return rows


def versions(reader: Reader, model_ids: Collection[int]) -> list[Row]:
    """Return the versions of models, the oldest first."""
    return reader.owned(_tallies.VERSIONS, VERSION, _schema.versions.c.model_id, model_ids)
