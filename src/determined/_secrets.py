"""Experiment configs without the secrets in them, for showing and for files that others may get."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "********"
_VARIABLES = "environment_variables"
STORAGE_SECRETS = ("access_key", "secret_key", "connection_string", "credential")
"""The keys of `checkpoint_storage` whose values are secret."""
_SECRETS: tuple[tuple[str, ...], ...] = (
    ("data", "secrets"),
    ("registry_auth",),
    ("environment", "registry_auth"),
    *(("checkpoint_storage", key) for key in STORAGE_SECRETS),
)
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_LARGEST_CONFIG = 1 << 20


def mask(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping that may be a config, or part of one, with what is secret in configs replaced by asterisks."""
    masked = mask_variables(config)
    for path in _SECRETS:
        masked = _replaced(masked, path)
    return masked


def is_secret(path: tuple[Any, ...]) -> bool:
    """Return whether what a path in a config leads to may be secret, and must not be part of an error message."""
    return any(path[: len(secret)] == secret for secret in (*_SECRETS, ("environment", _VARIABLES)))


def mask_variables(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, or any mapping, in which each value of `environment.environment_variables` is asterisks."""
    environment = config.get("environment")
    if not isinstance(environment, Mapping) or not environment.get(_VARIABLES):
        return dict(config)
    return {**config, "environment": {**environment, _VARIABLES: _masked(environment[_VARIABLES])}}


def mask_storage(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as it goes on record: without the keys of its checkpoint store, which are kept elsewhere."""
    section = config.get("checkpoint_storage")
    if not isinstance(section, Mapping):
        return dict(config)
    hidden = {key: MASK for key in STORAGE_SECRETS if section.get(key) is not None}
    return {**config, "checkpoint_storage": {**section, **hidden}}


def mask_variables_in_file(path: pathlib.Path) -> bytes | None:
    """Return the contents that a copy of a file shall have if the file is a config with environment variables.

    None for every other file. Raises ValueError if the values cannot be told from the rest of the text.
    """
    if path.suffix.lower() not in _CONFIG_SUFFIXES or path.stat().st_size > _LARGEST_CONFIG:
        return None
    data = path.read_bytes()
    if _VARIABLES.encode() not in data or not (pairs := _open_pairs_in(data)):
        return None
    for pair in sorted(pairs, key=len, reverse=True):  # one may be the start of another
        data = re.sub(rb"(?<!\w)" + re.escape(pair.encode()), _masked(pair).encode(), data)
    if _open_pairs_in(data):
        raise ValueError("the values of its environment_variables cannot be masked; write each as NAME=value in a line")
    return data


def _open_pairs_in(text: bytes) -> list[str]:
    """Return the variables, as NAME=value, whose values can be read in a config; none in what is no config."""
    try:
        import yaml
    except ImportError:
        raise ValueError("PyYAML, which reads configs, is not installed; run: pip install PyYAML") from None
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    environment = tree.get("environment") if isinstance(tree, Mapping) else None
    found = _strings(environment.get(_VARIABLES)) if isinstance(environment, Mapping) else ()
    return [pair for pair in found if pair.partition("=")[2] not in ("", MASK)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def _masked(value: Any) -> Any:
    """Return variables, which may be listed by device, with their names and without their values."""
    if isinstance(value, Mapping):
        return {name: _masked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    name, equals, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
    return f"{name}={MASK}" if equals else MASK


def _replaced(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of a tree with asterisks at a path if there is something."""
    key, *rest = path
    value = tree.get(key)
    if value is None or (rest and not isinstance(value, Mapping)):
        return tree
    return {**tree, key: _replaced(dict(value), tuple(rest)) if rest else _hidden(value)}


def _hidden(value: Any) -> Any:
    """Return a mask, or a mapping of masks so that the names of secrets can be seen."""
    return {name: _hidden(inner) for name, inner in value.items()} if isinstance(value, Mapping) else MASK
