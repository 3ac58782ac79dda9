"""The actor that holds an object of this library on some node.

Ray sends this class by value, so it can run where the library is not on the import path; it imports nothing but the
standard library.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


class Host:
    """Makes an object of a class in a module, and passes calls on to it."""

    def __init__(self, path: list[str], version: str, module: str, name: str, *arguments: Any) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        found = importlib.import_module("determined._version").VERSION
        if found != version:
            raise RuntimeError(
                f"this node has Resolute {found}, but the experiment runs with {version}; install {version} here."
            )
        self._object = getattr(importlib.import_module(module), name)(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; these calls are made one after the other, in their order."""
        return getattr(self._object, method)(*arguments)

    def wait(self, method: str, *arguments: Any) -> Any:
        """Call a method that may take long; these calls run beside the others."""
        return getattr(self._object, method)(*arguments)
