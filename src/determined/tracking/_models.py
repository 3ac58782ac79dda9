"""The registry of models: checkpoints with a name and a version number, which stay."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import sqlalchemy as sa

from determined import errors

from ._data.changesets import KEEP, Keep, given
from ._data.messages import CheckpointState
from ._data.records import ModelRecord, ModelVersionRecord
from ._database import schema as db
from ._database.access import Access
from ._queries import fill, update

_MODELS, _VERSIONS = db.models.c, db.versions.c
_VERSION_COUNT = sa.select(sa.func.count()).where(_VERSIONS.model_id == _MODELS.id).scalar_subquery()
_SELECT_MODELS = sa.select(db.models, _VERSION_COUNT.label("version_count")).order_by(_MODELS.id)


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
        """Add a model without versions; `ConflictException` if there is one of that name."""
        now = time.time()
        values = {"name": name, "description": description, "labels": labels, "metadata": metadata or {}}
        initial = {"created": now, "updated": now, "archived": False, "last_version": 0}
        with self._access.writing(creating=True) as connection:
            _require_new_name(connection, name)
            connection.execute(sa.insert(db.models), values | initial)
            return _model(self._found(connection, name))

    def model(self, name_or_id: str | int) -> ModelRecord:
        """Return one model; `NotOnRecordException` if there is none of that name or id."""
        with self._access.reading() as connection:
            return _model(self._found(connection, name_or_id))

    def models(self, *, include_archived: bool = False) -> list[ModelRecord]:
        """Return the models, the oldest first."""
        query = _SELECT_MODELS if include_archived else _SELECT_MODELS.where(_MODELS.archived.is_(False))
        with self._access.reading() as connection:
            return [_model(row) for row in connection.execute(query)]

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
        with self._access.writing() as connection:
            model = self._found(connection, name_or_id)
            if isinstance(name, str):
                _require_new_name(connection, name, except_id=model.id)
            texts = given(name=name, description=description, notes=notes, updated=time.time())
            values = texts | given(labels=labels, metadata=metadata, archived=archived)
            connection.execute(sa.update(db.models).where(_MODELS.id == model.id).values(values))
            return _model(self._found(connection, model.id))

    def delete_model(self, name_or_id: str | int) -> None:
        """Remove a model and its versions; the checkpoints stay."""
        with self._access.writing() as connection:
            model = self._found(connection, name_or_id)
            connection.execute(sa.delete(db.versions).where(_VERSIONS.model_id == model.id))
            connection.execute(sa.delete(db.models).where(_MODELS.id == model.id))

    def register_version(
        self,
        model: str | int,
        checkpoint_uuid: str,
        name: str | None = None,
        comment: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersionRecord:
        """Make a checkpoint the next version of a model; its files must still be there."""
        with self._access.writing() as connection:
            row = self._found(connection, model)
            self._require_present(connection, checkpoint_uuid)
            # As an update, so that others who register one wait for this and get the next number.
            more = {"last_version": _MODELS.last_version + 1, "updated": time.time()}
            update = sa.update(db.models).where(_MODELS.id == row.id).values(more).returning(_MODELS.last_version)
            number = connection.execute(update).scalar_one()
            key = {"model_id": row.id, "number": number, "checkpoint": checkpoint_uuid}
            values = {"name": name, "comment": comment, "metadata": metadata or {}}
            connection.execute(sa.insert(db.versions), {**key, **values, "labels": [], "created": time.time()})
            return self._version(connection, row, number)

    def version(self, model: str | int, number: int) -> ModelVersionRecord:
        """Return one version of a model; `NotOnRecordException` if there is none of that number."""
        with self._access.reading() as connection:
            return self._version(connection, self._found(connection, model), number)

    def versions(self, model: str | int) -> list[ModelVersionRecord]:
        """Return the versions of a model, the newest first."""
        with self._access.reading() as connection:
            row = self._found(connection, model)
            query = sa.select(db.versions).where(_VERSIONS.model_id == row.id).order_by(_VERSIONS.number.desc())
            return [_version(row, version) for version in connection.execute(query)]

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
        changes = given(name=name, comment=comment, notes=notes, labels=labels, metadata=metadata)
        with self._access.writing() as connection:
            row = self._found(connection, model)
            update(connection, db.versions, changes, *_of_version(row, number))
            return self._version(connection, row, number)

    def delete_version(self, model: str | int, number: int) -> None:
        """Remove a version of a model; the checkpoint stays, and its number is not used again."""
        with self._access.writing() as connection:
            row = self._found(connection, model)
            if not connection.execute(sa.delete(db.versions).where(*_of_version(row, number))).rowcount:
                self._missing_version(row.name, number)

    def _found(self, connection: sa.Connection, name_or_id: str | int) -> sa.Row[Any]:
        """Return the model of a name, or else of an id."""
        conditions = [_MODELS.name == name_or_id] if isinstance(name_or_id, str) else []
        if str(name_or_id).isdecimal():
            conditions.append(_MODELS.id == int(name_or_id))
        for condition in conditions:
            if (row := connection.execute(_SELECT_MODELS.where(condition)).one_or_none()) is not None:
                return row
        return self._access.missing(f"model {name_or_id!r}", "det model list")

    def _version(self, connection: sa.Connection, model: sa.Row[Any], number: int) -> ModelVersionRecord:
        query = sa.select(db.versions).where(*_of_version(model, number))
        row = connection.execute(query).one_or_none()
        return self._missing_version(model.name, number) if row is None else _version(model, row)

    def _missing_version(self, model: str, number: int) -> NoReturn:
        self._access.missing(f"version {number} of model {model!r}", "det model list-versions")

    def _require_present(self, connection: sa.Connection, uuid: str) -> None:
        query = sa.select(db.checkpoints.c.state).where(db.checkpoints.c.uuid == uuid)
        state = connection.execute(query).scalar_one_or_none()
        if state is None:
            self._access.missing(f"checkpoint {uuid!r}", "det checkpoint list")
        if state is CheckpointState.DELETED:
            raise errors.ConflictException(
                f"checkpoint {uuid!r} cannot be registered: it has been deleted; `det checkpoint list` "
                "shows those that are there."
            )


def _require_new_name(connection: sa.Connection, name: str, except_id: int | None = None) -> None:
    if not name.strip() or name.isdecimal():
        raise errors.InvalidRequestException(f"{name!r} cannot be the name of a model; give one that is not a number.")
    id = connection.execute(sa.select(_MODELS.id).where(_MODELS.name == name)).scalar_one_or_none()
    if id not in (None, except_id):
        raise errors.ConflictException(
            f"there is a model named {name!r} already (id {id}); choose another name, or add a version to that one by "
            "`det model register-version`."
        )


def _of_version(model: sa.Row[Any], number: int) -> tuple[sa.ColumnElement[bool], ...]:
    return _VERSIONS.model_id == model.id, _VERSIONS.number == number


def _model(row: sa.Row[Any]) -> ModelRecord:
    return fill(ModelRecord, row, labels=tuple(row.labels), is_archived=row.archived)


def _version(model: sa.Row[Any], row: sa.Row[Any]) -> ModelVersionRecord:
    return fill(ModelVersionRecord, row, model=model.name, labels=tuple(row.labels))
