"""YAML and JSON as plain values, with the line of each."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import yaml

from determined.experiment.config._document.plain import MAX_DEPTH, Budget, TooMuch
from determined.experiment.config._section import ConfigIssue, Path
from determined.experiment.config._text import shown

_TAG = "tag:yaml.org,2002:"
_SCALARS = ("null", "bool", "int", "float", "str")


class Read(NamedTuple):
    """What a string of YAML contains."""

    value: Any
    lines: dict[Path, int]
    issues: list[ConfigIssue]


class Unreadable(Exception):
    """A string that is not YAML, or too large."""

    def __init__(self, issue: ConfigIssue, line: int | None = None) -> None:
        super().__init__(issue.rule)
        self.issue = issue
        self.line = line


def read_yaml(text: str) -> Read:
    """Return the value in a string, None if it is empty; raise `Unreadable` with what is wrong."""
    builder = _Builder()
    try:
        return Read(builder.build(_without_tabs_of_json(text)), builder.lines, builder.issues)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unreadable(_of_syntax(error, text), None if mark is None else mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        issue = ConfigIssue(
            (), f"it is not YAML: it has the character U+{error.character:04X}", "Remove that character."
        )
        raise Unreadable(issue, text[: error.position].count("\n") + 1) from None
    except RecursionError:
        raise Unreadable(ConfigIssue((), "it is nested too deeply", "Remove levels.")) from None
    except TooMuch as error:
        raise Unreadable(error.issue, builder.lines.get(error.issue.path)) from None


def _without_tabs_of_json(text: str) -> str:
    """Return JSON with spaces for tabs, which YAML refuses; JSON has them between values only."""
    if "\t" not in text or not text.lstrip().startswith("{"):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace("\t", " ")


def _of_syntax(error: yaml.MarkedYAMLError, text: str) -> ConfigIssue:
    mark = error.problem_mark or error.context_mark
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    if mark is None:
        return ConfigIssue((), f"it is not YAML: {problem}", "Correct it.")
    lines = text.splitlines()
    written = shown(lines[mark.line].rstrip()) if mark.line < len(lines) else "the end"
    remedy = "Indent with spaces, not with tabs." if "\\t" in problem else "Correct the line, or the one before it."
    return ConfigIssue((), f"it is not YAML: {problem}, at column {mark.column + 1} of {written}", remedy)


class _Loader(yaml.SafeLoader):
    """Reads numbers as people mean them: 1e-3 is a number; dates and 10:30 are strings, as in JSON."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803  # the library's name
        """Refuse deep brackets at once: the time that the library takes grows with each."""
        if self.flow_level > MAX_DEPTH:
            raise yaml.scanner.ScannerError(
                None, None, f"there are brackets within more than {MAX_DEPTH} brackets", self.get_mark()
            )
        super().fetch_flow_collection_start(TokenClass)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.removeprefix(_TAG) in ("null", "bool", "merge")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
        r"|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"^[-+]?(?:0b[01_]+|0[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"), list("-+0123456789")
)


class _Builder:
    """Makes plain values of the nodes of parsed YAML, and keeps their lines."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.issues: list[ConfigIssue] = []
        self._budget = Budget()
        self._scalars = yaml.constructor.SafeConstructor()

    def build(self, text: str) -> Any:
        """Return the value of a string; None if it is empty."""
        node = _Loader(text).get_single_node()
        return None if node is None else self._value(node, ())

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._budget.spend(path)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(_TAG) not in _SCALARS:
            self.issues.append(ConfigIssue(path, f"the tag {node.tag} is not known", "Write the value without a tag."))
            return None
        try:
            value = self._scalars.construct_object(node)
        except (ValueError, LookupError, yaml.constructor.ConstructorError):
            kind = node.tag.removeprefix(_TAG)
            issue = ConfigIssue(
                path, f"it cannot be read as {kind}", "Write a shorter value, or put it in quotes.", node.value
            )
            self.issues.append(issue)
            return None
        return _joined(value) if isinstance(value, str) else value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged.append(value_node)
            elif (key := self._key(key_node, path)) is not None:
                self._add(values, (*path, key), key_node, value_node)
        for other in merged:
            for key, value in self._merged(other, path).items():
                values.setdefault(key, value)
        return values

    def _add(self, values: dict[str, Any], path: Path, key_node: yaml.Node, value_node: yaml.Node) -> None:
        key, line = str(path[-1]), key_node.start_mark.line + 1
        if key in values:
            rule = f"the key is given twice, on lines {self.lines[path]} and {line}"
            self.issues.append(ConfigIssue(path, rule, "Remove one of the two."))
            return
        self.lines.setdefault(path, line)
        values[key] = self._value(value_node, path)

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}str":
            return _joined(node.value)
        if isinstance(node, yaml.ScalarNode):
            issue = ConfigIssue((*path, node.value), "the key is not a string", f'Put it in quotes: "{node.value}".')
        else:
            issue = ConfigIssue((*path, "?"), "the key is a mapping or a list", "Write a string as key.")
        self.lines.setdefault(issue.path, node.start_mark.line + 1)
        self.issues.append(issue)
        return None

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """Return what `<<` merges: a mapping, or several of which the first with a key wins."""
        self._budget.spend(path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        mappings = node.value if isinstance(node, yaml.SequenceNode) else []
        if not mappings or not all(isinstance(item, yaml.MappingNode) for item in mappings):
            self.issues.append(ConfigIssue(path, "what << merges is not a mapping", "Write <<: *name of a mapping."))
            return {}
        values: dict[str, Any] = {}
        for item in mappings:
            values = self._merged(item, path) | values
        return values


def _joined(text: str) -> str:
    r"""Return a string in which surrogate pairs, as JSON writes them (\ud83d\ude00), are one character."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        return text
