"""The model registry in the client."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from determined import errors
from determined._home import Home
from determined.experimental._checkpoint import Checkpoint
from determined.experimental._metrics import utc_time
from determined.experimental._orders import OrderBy, checked, strings
from determined.tracking import ModelRecord, ModelVersionRecord, Registry, TrackingReader


class ModelVersion:
    """A version of a model: a checkpoint that is kept. A snapshot of the database."""

    def __init__(self, record: ModelVersionRecord, home: Home) -> None:
        self._record = record
        self._home = home

    @property
    def model_id(self) -> int:
        """The id of its model."""
        return self._record.model_id

    @property
    def model_name(self) -> str:
        """The name of its model."""
        return self._record.model

    @property
    def model_version(self) -> int:
        """Its number: 1, 2, 3, ..."""
        return self._record.number

    @property
    def checkpoint(self) -> Checkpoint:
        """Its checkpoint."""
        return Checkpoint(TrackingReader(self._home.database).checkpoint(self._record.checkpoint), self._home)

    @property
    def name(self) -> str | None:
        """Its name."""
        return self._record.name

    @property
    def comment(self) -> str | None:
        """The comment from its registration."""
        return self._record.comment

    @property
    def notes(self) -> str | None:
        """Its notes."""
        return self._record.notes

    @property
    def metadata(self) -> dict[str, Any]:
        """Its metadata. A copy."""
        return dict(self._record.metadata)

    def set_name(self, name: str) -> None:
        """Change its name."""
        self._change(name=name)

    def set_notes(self, notes: str) -> None:
        """Replace the notes."""
        self._change(notes=notes)

    def delete(self) -> None:
        """Remove it from its model; the checkpoint is not deleted, but is no longer protected."""
        Registry(self._home.database).delete_version(self.model_id, self.model_version)

    def _change(self, **changes: Any) -> None:
        self._record = Registry(self._home.database).update_version(self.model_id, self.model_version, **changes)

    def __repr__(self) -> str:
        return f"ModelVersion(model_name={self.model_name!r}, model_version={self.model_version})"


class Model:
    """A name in the registry, with versions. A snapshot of the database; `reload` updates it."""

    def __init__(self, record: ModelRecord, home: Home) -> None:
        self._record = record
        self._home = home
        self._registry = Registry(home.database)

    @property
    def model_id(self) -> int:
        """Its id."""
        return self._record.id

    @property
    def name(self) -> str:
        """Its unique name."""
        return self._record.name

    @property
    def description(self) -> str | None:
        """Its description."""
        return self._record.description

    @property
    def labels(self) -> list[str]:
        """Its labels. A copy."""
        return list(self._record.labels)

    @property
    def metadata(self) -> dict[str, Any]:
        """Its metadata. A copy: change it with `add_metadata` and `remove_metadata`."""
        return dict(self._record.metadata)

    @property
    def archived(self) -> bool:
        """Whether it is hidden from listings."""
        return self._record.is_archived

    @property
    def creation_time(self) -> datetime.datetime:
        """When it was created, in UTC."""
        return utc_time(self._record.created)

    @property
    def last_updated_time(self) -> datetime.datetime:
        """When it was last changed, in UTC."""
        return utc_time(self._record.updated)

    def reload(self) -> Model:
        """Read it from the registry again, and return it."""
        self._record = self._registry.model(self.model_id)
        return self

    # Versions

    def register_version(
        self,
        checkpoint_uuid: str | Checkpoint,
        name: str | None = None,
        comment: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersion:
        """Make a checkpoint its next version, and return the version. The checkpoint is protected from deletion."""
        given = checkpoint_uuid.uuid if isinstance(checkpoint_uuid, Checkpoint) else checkpoint_uuid
        uuid = TrackingReader(self._home.database).checkpoint(given).uuid
        version = self._registry.register_version(self.model_id, uuid, name, comment, metadata)
        self.reload()
        return ModelVersion(version, self._home)

    def get_version(self, version: int = -1) -> ModelVersion | None:
        """Return the version with a number, or the newest one; None if there are no versions."""
        if version != -1:
            return ModelVersion(self._registry.version(self.model_id, version), self._home)
        found = self.list_versions()
        return found[0] if found else None

    def list_versions(self, order_by: OrderBy = OrderBy.DESCENDING) -> list[ModelVersion]:
        """Return its versions, newest first unless `order_by` is ASCENDING."""
        checked("list_versions", "order_by", order_by, OrderBy)
        found = self._registry.versions(self.model_id)
        chosen = found if order_by is OrderBy.DESC else found[::-1]
        return [ModelVersion(one, self._home) for one in chosen]

    get_versions = list_versions

    # Details

    def set_description(self, description: str) -> None:
        """Change its description."""
        self._change(description=description)

    def set_labels(self, labels: Iterable[str]) -> None:
        """Replace all labels."""
        self._change(labels=strings("set_labels", "labels", labels))

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add metadata, replacing values with the same names."""
        self._change(metadata={**self.reload().metadata, **metadata})

    def remove_metadata(self, keys: Iterable[str]) -> None:
        """Remove metadata by name."""
        to_remove, kept = [keys] if isinstance(keys, str) else list(keys), self.reload().metadata
        if missing := [key for key in to_remove if key not in kept]:
            raise errors.InvalidRequestException(
                f"model {self.name!r} has no metadata {missing}; it has {sorted(kept)}."
            )
        self._change(metadata={key: value for key, value in kept.items() if key not in to_remove})

    def archive(self) -> None:
        """Hide it from listings."""
        self._change(archived=True)

    def unarchive(self) -> None:
        """Show it in listings again."""
        self._change(archived=False)

    def delete(self) -> None:
        """Remove it and its versions; the checkpoints are not deleted, but are no longer protected."""
        self._registry.delete_model(self.model_id)

    def _change(self, **changes: Any) -> None:
        self._record = self._registry.update_model(self.model_id, **changes)

    def __repr__(self) -> str:
        return f"Model(name={self.name!r}, model_id={self.model_id})"
