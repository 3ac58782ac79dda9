"""Models and their versions."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from driving import saved

from determined import errors, tracking


@pytest.fixture
def registry(writer: tracking.TrialWriter, database: pathlib.Path) -> tracking.Registry:
    """A registry beside two checkpoints, and one that is deleted."""
    messages = [saved("one"), saved("two"), saved("gone"), tracking.CheckpointDeleted(uuid="gone")]
    writer.write(messages)
    return tracking.Registry(database)


def test_a_model_is_found_by_name_and_by_id(registry: tracking.Registry) -> None:
    made = registry.create_model("digits", "what it does", ["a"], {"team": "x"})
    assert (made.name, made.description) == ("digits", "what it does")
    assert (made.labels, made.metadata) == (("a",), {"team": "x"})
    assert (made.version_count, made.is_archived, made.notes) == (0, False, None)
    assert registry.model("digits") == registry.model(made.id) == registry.model(str(made.id)) == made


def test_a_model_can_be_the_first_thing_in_a_database(database: pathlib.Path) -> None:
    registry = tracking.Registry(database)
    assert registry.models() == []
    registry.create_model("digits")
    assert [model.name for model in registry.models()] == ["digits"]


@pytest.mark.parametrize(
    ("name", "said"), [("digits", "'digits' already.*another name"), ("12", "'12' cannot be"), (" ", "' ' cannot be")]
)
def test_a_name_must_be_new_and_no_number(name: str, said: str, registry: tracking.Registry) -> None:
    registry.create_model("digits")
    with pytest.raises(errors.TrackingException, match=said):
        registry.create_model(name)
    assert len(registry.models()) == 1


def test_versions_are_numbered(registry: tracking.Registry, reader: tracking.TrackingReader) -> None:
    registry.create_model("digits")
    first = registry.register_version("digits", "one", name="v", comment="good", metadata={"a": 1})
    registry.register_version("digits", "two")
    assert (first.number, first.checkpoint, first.name, first.comment) == (1, "one", "v", "good")
    assert (first.model, first.metadata, first.notes, first.labels) == ("digits", {"a": 1}, None, ())
    assert [(one.number, one.checkpoint) for one in registry.versions("digits")] == [(2, "two"), (1, "one")]
    assert registry.model("digits").version_count == 2
    assert reader.registered_checkpoints() == {"one", "two"}


def test_the_number_of_a_deleted_version_does_not_come_back(
    registry: tracking.Registry, reader: tracking.TrackingReader
) -> None:
    registry.create_model("digits")
    registry.register_version("digits", "one")
    registry.delete_version("digits", 1)
    assert (registry.versions("digits"), reader.registered_checkpoints()) == ([], set())
    assert registry.register_version("digits", "two").number == 2


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda registry: registry.model("letters"), "no model 'letters'.*det model list"),
        (lambda registry: registry.model(99), "no model 99"),
        (lambda registry: registry.versions("letters"), "no model 'letters'"),
        (lambda registry: registry.delete_model("letters"), "no model 'letters'"),
        (lambda registry: registry.register_version("digits", "absent"), "no checkpoint 'absent'.*checkpoint list"),
        (lambda registry: registry.register_version("digits", "gone"), "'gone' cannot be registered.*deleted"),
        (lambda registry: registry.version("digits", 5), "no version 5 of model 'digits'"),
        (lambda registry: registry.delete_version("digits", 5), "no version 5 of model 'digits'"),
        (lambda registry: registry.update_model("digits", name="other"), "'other' already"),
    ],
)
def test_what_is_not_there_is_named(
    ask: Callable[[tracking.Registry], Any], said: str, registry: tracking.Registry
) -> None:
    registry.create_model("digits")
    registry.create_model("other")
    with pytest.raises(errors.TrackingException, match=said):
        ask(registry)


def test_a_model_and_a_version_can_be_changed(registry: tracking.Registry) -> None:
    registry.create_model("digits", "d", ["a"], {"x": 1})
    changed = registry.update_model("digits", name="numbers", description=None, notes="n", labels=["b", "c"])
    assert (changed.name, changed.description, changed.notes) == ("numbers", None, "n")
    assert (changed.labels, changed.metadata) == (("b", "c"), {"x": 1})
    registry.register_version("numbers", "one", comment="c")
    version = registry.update_version("numbers", 1, name="best", labels=["z"], metadata={"y": 2})
    assert (version.name, version.labels, version.metadata, version.comment) == ("best", ("z",), {"y": 2}, "c")


def test_an_archived_model_is_listed_on_request_only(registry: tracking.Registry) -> None:
    registry.create_model("digits")
    registry.update_model("digits", archived=True)
    assert registry.models() == []
    assert [model.is_archived for model in registry.models(include_archived=True)] == [True]


def test_a_deleted_model_is_gone_with_its_versions(
    registry: tracking.Registry, reader: tracking.TrackingReader
) -> None:
    registry.create_model("digits")
    registry.register_version("digits", "one")
    registry.delete_model("digits")
    assert (registry.models(), reader.registered_checkpoints()) == ([], set())
    again = registry.create_model("digits")
    assert (again.id, again.version_count) == (2, 0)
