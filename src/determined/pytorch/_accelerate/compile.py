"""Compiled models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from determined.pytorch._context import PyTorchTrialContext

_numbers = itertools.count()


class CompiledForward:
    """The compiled `forward` of one module. Hooks, such as the mixed-precision hooks, are not compiled.

    A copy of the module gets a compiled forward of its own.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self._module = module
        self._options = dict(options)
        forward = type(module).forward

        # A function of ours: torch's compiler skips functions of torch itself, such as the forward of nn.Sequential.
        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(module, *args, **kwargs)

        # A code object per module: the compiler limits how often it recompiles one code object.
        run.__code__ = run.__code__.replace(co_name=f"compiled_forward_{next(_numbers)}")
        self._run = torch.compile(run, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return CompiledForward, (self._module, self._options)


def compile_models(context: PyTorchTrialContext) -> bool:
    """Compile the models of a trial that uses `use_compile`, each once; return whether any were compiled now."""
    options = context.experimental.compile_options
    if options is None:
        return False
    models = [context.backend.unwrap(model) for model in context.models]
    uncompiled = [model for model in models if not isinstance(model.__dict__.get("forward"), CompiledForward)]
    for model in uncompiled:
        model.__dict__["forward"] = CompiledForward(model, options)
    return bool(uncompiled)
