"""Secrets in a config are never shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from determined.errors import InvalidConfig
from determined.experiment.config import from_map, mask, parse

SECRET = "20481024"
SMALLEST: dict[str, Any] = {"searcher": {"name": "single", "metric": "loss"}}
S3 = {"type": "s3", "bucket": "b", "access_key": SECRET, "secret_key": SECRET}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"secrets": {"token": SECRET, "deep": {"more": [SECRET]}}}},
        {"data": {"secrets": SECRET}},
        {"data": {"secrets": [SECRET]}},
        {"checkpoint_storage": S3},
        {"checkpoint_storage": {"type": "azure", "container": "c", "connection_string": SECRET}},
        {"checkpoint_storage": {"type": "azure", "container": "c", "account_url": "https://a", "credential": SECRET}},
        {"registry_auth": {"username": "me", "password": SECRET}},
        {"environment": {"registry_auth": SECRET}},
        {"environment": {"environment_variables": ["A=b", f"PIN={SECRET}", f"my_password={SECRET}=x"]}},
    ],
)
def test_secrets_are_masked_for_showing_only(changes: dict[str, Any]) -> None:
    made = from_map(SMALLEST | changes)
    assert SECRET not in json.dumps(made.masked())
    assert SECRET in json.dumps(made.to_dict())


@pytest.mark.parametrize(
    "tree",
    [
        {"data": {"secrets": {"token": SECRET}}},
        {"checkpoint_storage": S3},
        {"checkpoint_storage": {"credential": SECRET}},
        {"environment": {"environment_variables": [f"API_KEY={SECRET}"]}},
        {"environment": {"environment_variables": {"cuda": [f"API_KEY={SECRET}", 3]}}},
    ],
)
def test_secrets_of_any_map_are_masked_in_a_copy(tree: dict[str, Any]) -> None:
    assert SECRET not in json.dumps(mask(tree))
    assert SECRET in json.dumps(tree)


@pytest.mark.parametrize("tree", [{"environment": None}, {"data": 3}, {"checkpoint_storage": ["access_key"]}, {}])
def test_what_is_no_config_is_shown_as_it_is(tree: dict[str, Any]) -> None:
    assert mask(tree) == tree


def test_names_of_secrets_and_all_else_are_shown() -> None:
    made = from_map(SMALLEST | {"data": {"secrets": {"token": SECRET}, "path": "/data"}, "checkpoint_storage": S3})
    shown = made.masked()
    assert shown["data"] == {"secrets": {"token": "********"}, "path": "/data"}
    assert shown["checkpoint_storage"]["bucket"] == "b"
    assert shown["searcher"] == made.to_dict()["searcher"]


def test_config_without_secrets_is_shown_as_it_is() -> None:
    made = from_map(SMALLEST)
    assert made.masked() == made.to_dict()


def test_masked_value_of_a_variable_is_refused() -> None:
    shown = from_map(SMALLEST | {"environment": {"environment_variables": [f"PIN={SECRET}"]}}).masked()
    with pytest.raises(InvalidConfig, match="its value is masked"):
        from_map(shown)


@pytest.mark.parametrize(
    "text",
    [
        f"checkpoint_storage: {{type: s3, bucket: b, access_key: [{SECRET}]}}",
        f"checkpoint_storage: {{type: s3, bucket: b, access_key: {SECRET}}}",
        f"checkpoint_storage: {{type: s3, bucket: b, access_key: '{SECRET}'}}",
        f"checkpoint_storage: {{type: s3, bucket: b, secretkey: {SECRET}}}",
        f"checkpoint_storage: [{SECRET}]",
        f"checkpoint_storage: {{type: azure, container: c, credential: {SECRET}}}",
        f"checkpoint_storage: {{type: azure, container: c, connection_string: a, credential: '{SECRET}'}}",
        f"data: {{secrets: {{a: !secret {SECRET}, b: !!bool {SECRET}}}}}",
        f"data: [{SECRET}]",
        f"registry_auth: {{a: !!bool {SECRET}}}",
        f"environment: {{environment_variables: ['={SECRET}']}}",
    ],
)
def test_secrets_do_not_show_in_errors(text: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse(f"{text}\nsearcher: {{name: single, metric: loss}}")
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.problems)
