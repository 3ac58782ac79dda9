"""torch's compiler, loaded when somebody compiles.

The first optimizer of a process makes torch load its compiler, `torch._dynamo`: a second, and 70 MB that stay. All that
an optimizer then asks of it are two functions that do nothing while nothing is compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch

SWITCH = "DET_LAZY_COMPILER"
"""The environment variable by which torch loads its compiler whenever it likes, if it is 0."""

_NAME = "torch._dynamo"


def defer_compiler() -> None:
    """Let torch do without its compiler until more of it is wanted than optimizers want; not if it is there already."""
    if os.environ.get(SWITCH) == "0" or _NAME in sys.modules:
        return
    spec = importlib.util.find_spec(_NAME)
    if spec is not None:
        stand_in = _Later(spec)
        sys.modules[_NAME] = stand_in
        torch._dynamo = stand_in


class _Later(types.ModuleType):
    """Stands for `torch._dynamo`, and becomes a way to it when asked for anything but what is defined here.

    While it stands in, nothing can have been compiled: breaking a graph means nothing, and a function that is not to be
    compiled is just that function.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        own = {"__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.name, "__spec__": spec}
        vars(self).update(own, _leaving=threading.Lock(), _disabled=[], graph_break=_do_nothing, disable=self._disable)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._load(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._load(), name)

    def __dir__(self) -> list[str]:
        return dir(self._load())

    def _disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Do what `torch._dynamo.disable` does, later if torch calls it for a function that it wraps itself."""
        if not self._stands_in() or fn is None or options != {"wrapping": False}:
            return self._load().disable(fn, recursive, **options)
        disabled = _Disabled(fn, recursive)
        self._disabled.append(disabled)
        return disabled

    def _stands_in(self) -> bool:
        return sys.modules.get(_NAME) is self

    def _load(self) -> Any:
        """Return the compiler, which is in its usual place from then on."""
        with self._leaving:
            is_first = self._stands_in()
            if is_first:
                del sys.modules[_NAME], torch._dynamo
        # Not within the lock: imports wait for each other by locks of their own.
        compiler = importlib.import_module(_NAME)
        if is_first:
            for disabled in self._disabled:
                disabled.call = compiler.disable(disabled.call, disabled.recursive, wrapping=False)
            vars(self).update(graph_break=compiler.graph_break, disable=compiler.disable)
        return compiler


class _Disabled:
    """A function that is not to be compiled."""

    __slots__ = ("call", "recursive")

    def __init__(self, function: Callable[..., Any], recursive: bool) -> None:
        self.call = function
        self.recursive = recursive

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
