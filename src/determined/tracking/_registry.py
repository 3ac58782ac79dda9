"""The registry of models: checkpoints with a name and a version number, which stay."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import sqlalchemy as sa

from determined import errors

from . import _assembly, _model_rows, _schema, _tallies, _writing
from ._access import Access
from ._messages import CheckpointState
from ._reading import Reader
from ._rows import MODEL, VERSION, Row, storable_text
from ._turns import KEEP, Keep
from ._views import ModelRecord, ModelVersionRecord

_MODELS, _VERSIONS = _schema.models.c, _schema.versions.c
_SHOW_MODELS, _SHOW_VERSIONS = "det model list", "det model list-versions"


class Registry:
    """Reads and writes the models, by default those of the home folder.

    A model is named by its name or its id. Holds no connection between calls, so there is nothing to close and any
    thread may use it. The checkpoints of its versions are not deleted by garbage collection.
    """

    def __init__(self, url_or_path: str | pathlib.Path | None = None) -> None:
        self._access = Access(url_or_path)

    def create_model(
        self,
        name: str,
        description: str | None = None,
        labels: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelRecord:
        """Add a model without versions; `TrackingException` if there is one of that name."""
        now = time.time()
        values = {"name": name, "description": description, "labels": list(labels), "metadata": metadata or {}}
        times = {"created": now, "updated": now}
        with self._access.writer(creating=True) as connection:
            _require_new_name(connection, name)
            (id,) = _writing.insert(connection, MODEL, [{**values, **times, "archived": False, "last_version": 0}])
            _tallies.add(connection, _tallies.MODELS, 0, 1)
            _tallies.begin(connection, _tallies.VERSIONS, id)
        return self.model(id)

    def model(self, name_or_id: str | int) -> ModelRecord:
        """Return one model; `TrackingException` if there is none of that name or id."""
        with self._access.reader() as reader:
            return _records(reader, [self._found(_model_rows.models(reader), name_or_id)])[0]

    def models(self, *, include_archived: bool = False) -> list[ModelRecord]:
        """Return the models, the oldest first."""
        with self._access.reader() as reader:
            return _records(reader, [row for row in _model_rows.models(reader) if include_archived or not row.archived])

    def update_model(
        self,
        name_or_id: str | int,
        *,
        name: str | Keep = KEEP,
        description: str | Keep | None = KEEP,
        labels: Sequence[str] | Keep = KEEP,
        metadata: Mapping[str, Any] | Keep = KEEP,
        notes: str | Keep | None = KEEP,
        archived: bool | Keep = KEEP,
    ) -> ModelRecord:
        """Replace what is given of a model and return it."""
        given = {"name": name, "description": description, "metadata": metadata, "notes": notes, "archived": archived}
        changes = _given(given, labels)
        with self._access.writer() as connection:
            model = self._locked(connection, name_or_id)
            if isinstance(name, str) and storable_text(name) != model.name:
                _require_new_name(connection, name)
            _writing.change(connection, MODEL, model, changes | {"updated": time.time()})
        return self.model(model.id)

    def delete_model(self, name_or_id: str | int) -> None:
        """Remove a model and its versions; the checkpoints stay."""
        with self._access.writer() as connection:
            model = self._locked(connection, name_or_id)
            connection.execute(sa.delete(VERSION.table).where(_VERSIONS.model_id == model.id))
            connection.execute(sa.delete(MODEL.table).where(_MODELS.id == model.id))
            _tallies.forget(connection, (_tallies.VERSIONS,), [model.id])
            _tallies.add(connection, _tallies.MODELS, 0, -1)

    def register_version(
        self,
        model: str | int,
        checkpoint_uuid: str,
        name: str | None = None,
        comment: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersionRecord:
        """Make a checkpoint the next version of a model; its files must still be there."""
        with self._access.writer() as connection:
            row = self._locked(connection, model)
            checkpoint = Reader(connection).checkpoint(checkpoint_uuid)
            if checkpoint is None:
                self._access.missing(f"checkpoint {checkpoint_uuid!r}", "det checkpoint list")
            if checkpoint.state != CheckpointState.COMPLETED:
                raise errors.TrackingException(
                    f"checkpoint {checkpoint_uuid!r} cannot be registered: it has been deleted; `det checkpoint list` "
                    "shows those that are there."
                )
            number, now = row.last_version + 1, time.time()
            key = {"model_id": row.id, "number": number, "checkpoint": checkpoint_uuid}
            values = {"name": name, "comment": comment, "metadata": metadata or {}}
            _writing.insert(connection, VERSION, [{**key, **values, "labels": [], "created": now}])
            _writing.change(connection, MODEL, row, {"last_version": number, "updated": now})
            _tallies.add(connection, _tallies.VERSIONS, row.id, 1)
        return self.version(row.id, number)

    def version(self, model: str | int, number: int) -> ModelVersionRecord:
        """Return one version of a model; `TrackingException` if there is none of that number."""
        for version in self.versions(model):
            if version.number == number:
                return version
        return self._missing_version(model, number)

    def versions(self, model: str | int) -> list[ModelVersionRecord]:
        """Return the versions of a model, the newest first."""
        with self._access.reader() as reader:
            row = self._found(_model_rows.models(reader), model)
            return [_version(row, version) for version in _model_rows.versions(reader, [row.id])[::-1]]

    def update_version(
        self,
        model: str | int,
        number: int,
        *,
        name: str | Keep | None = KEEP,
        comment: str | Keep | None = KEEP,
        notes: str | Keep | None = KEEP,
        labels: Sequence[str] | Keep = KEEP,
        metadata: Mapping[str, Any] | Keep = KEEP,
    ) -> ModelVersionRecord:
        """Replace what is given of a version and return it."""
        changes = _given({"name": name, "comment": comment, "notes": notes, "metadata": metadata}, labels)
        with self._access.writer() as connection:
            row = self._locked(connection, model)
            _writing.change(connection, VERSION, self._locked_version(connection, row, number), changes)
        return self.version(row.id, number)

    def delete_version(self, model: str | int, number: int) -> None:
        """Remove a version of a model; the checkpoint stays, and its number is not used again."""
        with self._access.writer() as connection:
            row = self._locked(connection, model)
            version = self._locked_version(connection, row, number)
            connection.execute(sa.delete(VERSION.table).where(_VERSIONS.id == version.id))
            _tallies.add(connection, _tallies.VERSIONS, row.id, -1)

    def _found(self, models: Iterable[Row], name_or_id: str | int) -> Row:
        by_name = {model.name: model for model in models}
        if isinstance(name_or_id, str) and storable_text(name_or_id) in by_name:
            return by_name[storable_text(name_or_id)]
        by_id = {str(model.id): model for model in by_name.values()}
        return by_id.get(str(name_or_id)) or self._access.missing(f"model {name_or_id!r}", _SHOW_MODELS)

    def _locked(self, connection: sa.Connection, name_or_id: str | int) -> Row:
        found = self._found(_model_rows.models(Reader(connection)), name_or_id)
        return self._found(_writing.locked(connection, MODEL, _MODELS.id == found.id), found.id)

    def _locked_version(self, connection: sa.Connection, model: Row, number: int) -> Row:
        conditions = _VERSIONS.model_id == model.id, _VERSIONS.number == number
        for row in _writing.locked(connection, VERSION, *conditions):
            return row
        return self._missing_version(model.name, number)

    def _missing_version(self, model: str | int, number: int) -> NoReturn:
        self._access.missing(f"version {number} of model {model!r}", _SHOW_VERSIONS)


def _require_new_name(connection: sa.Connection, name: str) -> None:
    if not name.strip() or name.isdecimal():
        raise errors.TrackingException(f"{name!r} cannot be the name of a model; give one that is not a number.")
    taken = sa.select(_MODELS.id).where(_MODELS.name == storable_text(name))
    if (id := connection.execute(taken).scalar_one_or_none()) is not None:
        raise errors.TrackingException(
            f"there is a model named {name!r} already (id {id}); choose another name, or add a version to that one by "
            "`det model register-version`."
        )


def _given(values: Mapping[str, Any], labels: Sequence[str] | Keep) -> dict[str, Any]:
    given = {name: value for name, value in values.items() if value is not KEEP}
    return given if isinstance(labels, Keep) else {**given, "labels": list(labels)}


def _records(reader: Reader, models: Sequence[Row]) -> list[ModelRecord]:
    tallies = reader.tallies(_tallies.VERSIONS, [model.id for model in models])
    return [_record(model, tallies[model.id, ""].count) for model in models]


def _record(model: Row, version_count: int) -> ModelRecord:
    return ModelRecord(
        id=model.id,
        name=model.name,
        description=model.description,
        labels=_assembly.labels_of(model),
        metadata=model.metadata,
        notes=model.notes,
        is_archived=model.archived,
        version_count=version_count,
        created=model.created,
        updated=model.updated,
    )


def _version(model: Row, version: Row) -> ModelVersionRecord:
    return ModelVersionRecord(
        model_id=model.id,
        model=model.name,
        number=version.number,
        checkpoint=version.checkpoint,
        name=version.name,
        comment=version.comment,
        notes=version.notes,
        labels=_assembly.labels_of(version),
        metadata=version.metadata,
        created=version.created,
    )
