"""Which libraries a program needs, so that the forkserver imports them before it forks trials."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

FORKABLE = frozenset({"PIL", "joblib", "numpy", "pandas", "scipy", "sklearn", "torch", "torchvision", "tqdm", "yaml"})
"""Libraries after whose import a process can be forked: no GPU is touched, and there are no threads but those of
OpenBLAS, which start again in a fork."""


def libraries_of(code: pathlib.Path) -> list[str]:
    """Return the modules of well-known libraries that the modules in a folder import when they are loaded.

    The folder's own modules are none, whatever they are called. Some names may turn out to be no modules.
    """
    own = {path.name.partition(".")[0] for path in code.glob("*")}
    found = dict.fromkeys(name for path in sorted(code.glob("*.py")) for name in _imports(path))
    return [name for name in found if name.partition(".")[0] in FORKABLE - own]


def _imports(path: pathlib.Path) -> Iterator[str]:
    try:
        statements = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # which the trial itself will show
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (one.name for one in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
            yield from (f"{statement.module}.{one.name}" for one in statement.names)
