"""Compiled models."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from determined import errors
from determined.pytorch._context import PyTorchTrialContext

_numbers = itertools.count()


class CompiledForward:
    """The compiled `forward` of one module; its hooks, such as those of mixed precision, stay outside.

    A copy of the module gets one of its own.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self._module = module
        self._options = dict(options)
        forward = type(module).forward

        # A function of ours: torch's compiler passes over those of torch, such as the forward of nn.Sequential.
        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(module, *args, **kwargs)

        # Code of its own for each module: the compiler counts the variants of a piece of code, and gives up at some.
        run.__code__ = run.__code__.replace(co_name=f"compiled_forward_{next(_numbers)}")
        self._run = torch.compile(run, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's forward returns."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(memo[id(self._module)], self._options)

    def __reduce__(self) -> Any:
        return CompiledForward, (self._module, self._options)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what `torch.compile` has no option for."""
    known = inspect.signature(torch.compile).parameters.keys() - {"model"}
    if unknown := sorted(options.keys() - known):
        raise errors.InvalidExperimentException(
            f"use_compile({unknown[0]}=...): the options of torch.compile are {sorted(known)}."
        )


def compile_models(context: PyTorchTrialContext) -> bool:
    """Compile the models of a trial that asked for it, once; say whether there were any to compile."""
    options = context.experimental.compile_options
    if options is None:
        return False
    models = [context.backend.unwrap(model) for model in context.models]
    fresh = [model for model in models if not isinstance(model.__dict__.get("forward"), CompiledForward)]
    for model in fresh:
        model.__dict__["forward"] = CompiledForward(model, options)
    return bool(fresh)
