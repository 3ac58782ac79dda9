"""The section `optimizations` of an experiment config: what makes an unmodified program faster."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from determined import errors
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._optim import apex

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEVELS = ("O0", "O1", "O2", "O3")
_KNOWN = {
    "average_aggregated_gradients",
    "channels_last",
    "compile",
    "cuda_graphs",
    "fused_optimizer",
    "gradient_compression",
    "mixed_precision",
    "tf32",
}


@contextlib.contextmanager
def applied(context: PyTorchTrialContext, config: Mapping[str, Any] | None) -> Iterator[None]:
    """Apply what a config asks for to the trial of a context, and for the time of the block to torch."""
    section = _section(config)
    _apply_precision(context, section.get("mixed_precision"))
    if (compiles := _flag_or_map("compile", section.get("compile"))) is not None:
        context.experimental.use_compile(**compiles)
    if _flag("channels_last", section.get("channels_last")):
        context.experimental.use_channels_last()
    if (graphs := _flag_or_map("cuda_graphs", section.get("cuda_graphs"))) is not None:
        _use_graphs(context, graphs)
    if _flag("fused_optimizer", section.get("fused_optimizer")) is False:
        context.experimental.disable_fused_optimizers()
    with _tf32(_flag("tf32", section.get("tf32"))):
        yield


def with_optimizations(config: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with settings that go before those of its own section."""
    if unknown := sorted(settings.keys() - _KNOWN):
        raise errors.InvalidExperimentException(
            f"init(optimizations={{{unknown[0]!r}: ...}}): the settings are {', '.join(sorted(_KNOWN))}."
        )
    return {**(config or {}), "optimizations": {**_section(config), **settings}}


def apply_level(context: PyTorchTrialContext) -> None:
    """Set up the level of apex that the config asks for, now that all models and optimizers are wrapped."""
    level = _section(context.config_if_any).get("mixed_precision")
    if level in ("O2", "O3") and not isinstance(context.precision, apex.HalfWeights):
        context.configure_apex_amp(context.models, context.optimizers, opt_level=level)


def _section(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    section = (config or {}).get("optimizations") or {}
    if not isinstance(section, Mapping):
        raise errors.InvalidExperimentException(f"optimizations={section!r} in the config: write a map of settings.")
    return section


def _apply_precision(context: PyTorchTrialContext, asked: Any) -> None:
    if asked in _TYPES:
        context.experimental.use_amp(_TYPES[asked])
    elif asked == "O1":
        context.experimental.use_amp()
    elif asked is not None and asked not in _LEVELS:
        choices = ", ".join([*_TYPES, *_LEVELS])
        raise errors.InvalidExperimentException(
            f"optimizations.mixed_precision={asked!r} in the config: choose one of {choices}."
        )


def _use_graphs(context: PyTorchTrialContext, options: Mapping[str, Any]) -> None:
    known = inspect.signature(context.experimental.use_cuda_graphs).parameters
    if unknown := sorted(options.keys() - known.keys()):
        raise errors.InvalidExperimentException(
            f"optimizations.cuda_graphs.{unknown[0]} in the config: the options are {', '.join(known)}."
        )
    context.experimental.use_cuda_graphs(**options)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise errors.InvalidExperimentException(f"optimizations.{name}={value!r} in the config: write true or false.")
    return value


def _flag_or_map(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the options that go with a setting that is switched on; None if it is off."""
    if isinstance(value, Mapping):
        return value
    return {} if _flag(name, value) else None


@contextlib.contextmanager
def _tf32(enabled: bool | None) -> Iterator[None]:
    """Let GPUs multiply fp32 matrices with fewer bits inside the block, or keep them from it; None changes nothing."""
    if enabled is None:
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
