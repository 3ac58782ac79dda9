"""Writes the reference of all keys of an experiment config from the models."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from determined.experiment.config._experiment import ExperimentConfig
from determined.experiment.config._hyperparameters import KINDS
from determined.experiment.config._searcher import Searcher, searchers
from determined.experiment.config._section import LARGEST, Length, Section, is_marked
from determined.experiment.config._storage import STORAGES, HomeStorage
from determined.experiment.config._text import any_of, in_yaml

_HEAD = """\
# Experiment config

An experiment is described by a file of YAML or JSON:

```yaml
name: digits
entrypoint: model_def:MyTrial
hyperparameters:
  global_batch_size: 64
  lr: {type: log, minval: -4, maxval: -1}
searcher:
  name: adaptive_asha
  metric: validation_loss
  max_trials: 50
  time_metric: epochs
  max_time: 27
min_validation_period: {epochs: 1}
```

- An unknown key is an error, which names the nearest known one. All errors of a file are shown at once.
- `null` means the default of a key.
- Keys marked *no effect* are accepted so that configs written for a cluster work; a warning lists them.
- `1e-3` is a number; `2024-05-06` and `10:30` are strings. A key must not appear twice in the same mapping.
- `--config key.path=value` on the command line replaces one value, such as `--config searcher.max_trials=20`.

This page is generated from the code by `python -m determined.experiment.config > docs/reference/config.md`.
"""
_HYPERPARAMETERS = """\
You choose the names. The value of a name is

- a constant, if it is not a mapping: `lr: 0.1`;
- a constant, range or choice, if it is a mapping whose `type` is one of those below;
- a group of hyperparameters, if it is any other mapping: `net: {depth: 3, act: {type: categorical, vals: [a, b]}}`.

A hyperparameter may be called `type`: `optimizer: {type: adam, lr: 0.1}`. If its value is one of the types below, or
if there is a key such as `minval` or `val` next to it, write `type: {type: const, val: log}`. Write a mapping as a
constant value in the form `{type: const, val: {a: 1}}`. `global_batch_size` must be an integer, or a range or choice of
integers.
"""
_STORAGE = """\
Without `type`, checkpoints are stored in the home folder. When an experiment ends, the checkpoints that these keys
select are kept. Registered checkpoints, and those that a warm start began from, are always kept. A URL such as
`s3://my-bucket/checkpoints` stands for the section of its [type](../guides/checkpoints.md#object-stores):
"""
_SEARCHER = """\
The keys depend on `name`. All searchers have these:
"""
_FROM_PYTHON = """\
## From Python

`from determined.experiment import config`. All problems of a config are in the `problems` of
[`errors.InvalidConfig`](determined.md#exceptions).

::: determined.experiment.config.load

::: determined.experiment.config.parse

::: determined.experiment.config.from_map

::: determined.experiment.config.ExperimentConfig
    options:
      members: [seed, trial_class, notes, to_dict, masked]
"""
_WORDS: dict[Any, str] = {int: "integer", float: "number", bool: "`true`/`false`", str: "string", dict: "mapping"}
_WITH_KINDS = ("hyperparameters", "searcher", "checkpoint_storage")


def reference() -> str:
    """Return the page, in Markdown."""
    common, retention = set(Searcher.model_fields), set(HomeStorage.model_fields)
    parts = [_HEAD, "## All keys", _table(ExperimentConfig)]
    parts += ["## Lengths", _doc(Length), _table(Length)]
    parts += ["## hyperparameters", _HYPERPARAMETERS, *_kinds("type", KINDS, {"type"})]
    parts += ["## searcher", _SEARCHER, _table(Searcher, {"name"}), *_kinds("name", searchers().values(), common)]
    parts += ["## checkpoint_storage", _STORAGE, _table(HomeStorage), *_kinds("type", STORAGES, {"type", *retention})]
    for name, section in _sections(ExperimentConfig):
        parts += [f"## {name}", _doc(section), _table(section)]
        for inner_name, inner in _sections(section):
            parts += [f"### {inner_name}", _doc(inner), _table(inner)]
    parts.append(_FROM_PYTHON)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _doc(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _kinds(key: str, kinds: Iterable[type[Section]], known: Collection[str]) -> Iterator[str]:
    for kind in kinds:
        yield f"### {key}: {kind.model_fields[key].default}"
        yield _doc(kind)
        if kind.model_fields.keys() - known:
            yield _table(kind, known)


def _sections(section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Yield the keys that hold a section of one kind, or a list of such sections."""
    for name, field in section.model_fields.items():
        for part in (field.annotation, *_members(field.annotation)):
            if name not in _WITH_KINDS and _is_section(part) and part is not Length:
                yield name, part


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union or a list, without their tags."""
    return [get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(annotation)]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, Section)


def _table(section: type[Section], known: Collection[str] = ()) -> str:
    fields = [(name, field) for name, field in section.model_fields.items() if name not in known]
    fields.sort(key=lambda pair: is_marked(pair[1], "ignored"))
    head = ["| Key | Type | Default | Meaning | Example |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_row(name, field) for name, field in fields)])


def _row(name: str, field: FieldInfo) -> str:
    meaning = field.description or ""
    if is_marked(field, "ignored"):
        meaning += " *No effect.*"
    if is_marked(field, "secret"):
        meaning += " Masked in all output."
    kind = f"[mapping](#{name})" if name in _WITH_KINDS else _kind(name, field.annotation, field.metadata)
    cells = (f"`{name}`", kind, _default(field), meaning, f"`{name}: {in_yaml((field.examples or [None])[0])}`")
    return f"| {' | '.join(cells)} |"


def _default(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict) and "default" in field.json_schema_extra:
        return str(field.json_schema_extra["default"])
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Length):
        default = default.model_dump()
    if isinstance(default, Section):
        return "the defaults in it"
    return f"`{in_yaml(default)}`" if default != "" else '`""`'


def _kind(name: str, annotation: Any, limits: Collection[Any] = ()) -> str:
    """Return in words what the value of a key may be."""
    if annotation is Any:
        return "anything"
    if annotation is Length:
        return "[length](#lengths)"
    if _is_section(annotation):
        return f"[mapping](#{name})"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(name, parts[0], [limit for part in parts[1:] for limit in getattr(part, "metadata", [part])])
    if origin is Literal:
        return any_of([f"`{word}`" for word in parts])
    if origin is list:
        return f"list of {_kind(name, parts[0])}"
    if parts and origin is not dict:  # a union
        return any_of([_kind(name, part, limits) for part in parts if part is not type(None)])
    return _WORDS[origin or annotation] + _limits(limits)


def _limits(limits: Collection[Any]) -> str:
    """Return the smallest and the largest value in words, except those of the number format."""
    least = [limit.ge for limit in limits if isinstance(limit, annotated_types.Ge)]
    above = [limit.gt for limit in limits if isinstance(limit, annotated_types.Gt)]
    most = [limit.le for limit in limits if isinstance(limit, annotated_types.Le)]
    bounds = [f"at least {bound}" for bound in least if bound != -(2**63)]
    bounds += [f"above {bound}" for bound in above]
    bounds += [f"at most {bound}" for bound in most if bound not in (LARGEST, 2**63 - 1)]
    return "".join(f", {words}" for words in bounds)
