"""Configs for showing, without the secrets in them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from determined.experiment.config._section import Path, Section, is_marked, sections_in
from determined.experiment.config._storage import STORAGES

if TYPE_CHECKING:
    from determined.experiment.config._experiment import ExperimentConfig

MASK = "********"
_SECRET_VARIABLE = re.compile(r"[^=]*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)[^=]*=", re.IGNORECASE)
# Whole sections, whatever is in them.
_SECRET_SECTIONS: tuple[Path, ...] = (("data", "secrets"), ("registry_auth",), ("environment", "registry_auth"))


def masked(config: ExperimentConfig) -> dict[str, Any]:
    """Return the map of a config with every secret replaced by asterisks."""
    return _without_secrets(config.to_dict(), _secret_keys(config))


def mask(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map that may be a config, or part of one, with what is secret in configs replaced by asterisks."""
    in_storage = [(name, field) for storage in STORAGES for name, field in storage.model_fields.items()]
    keys = [("checkpoint_storage", name) for name, field in in_storage if is_marked(field, "secret")]
    return _without_secrets(copy.deepcopy(dict(tree)), keys)


def _without_secrets(tree: dict[str, Any], secret_keys: Iterable[Path]) -> dict[str, Any]:
    for path in (*_SECRET_SECTIONS, *secret_keys):
        _hide(tree, path)
    environment = tree.get("environment")
    if isinstance(environment, dict) and (variables := environment.get("environment_variables")):
        environment["environment_variables"] = _without_secret_variables(variables)
    return tree


def _without_secret_variables(variables: Any) -> Any:
    """Return variables, which may be listed by what a trial trains on, without those that look like secrets."""
    if isinstance(variables, dict):
        return {device: _without_secret_variables(pairs) for device, pairs in variables.items()}
    if isinstance(variables, list):
        return [_without_secret(pair) if isinstance(pair, str) else pair for pair in variables]
    return variables


def is_secret(path: Path) -> bool:
    """Return whether a path leads into a section that is masked as a whole."""
    return any(path[: len(section)] == section for section in _SECRET_SECTIONS)


def _secret_keys(section: Section, above: Path = ()) -> Iterator[Path]:
    for name, field in type(section).model_fields.items():
        if is_marked(field, "secret"):
            yield (*above, name)
        for path, inner in sections_in(getattr(section, name), (*above, name)):
            yield from _secret_keys(inner, path)


def _hide(tree: Any, path: Path) -> None:
    for key in path[:-1]:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and tree.get(path[-1]) is not None:
        tree[path[-1]] = _hidden(tree[path[-1]])


def _hidden(value: Any) -> Any:
    """Return a mask, or a map of masks so that the names of secrets can be seen."""
    return {name: _hidden(its) for name, its in value.items()} if isinstance(value, dict) else MASK


def _without_secret(pair: str) -> str:
    found = _SECRET_VARIABLE.match(pair)
    return f"{found.group()}{MASK}" if found else pair
