"""The section `optimizations` of an experiment config: settings that make an unmodified program faster."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from determined import errors
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._optim.apex import LEVELS, HalfWeights

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "O1": None}
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
    """Apply the settings of a config to a context and, inside the block, to torch."""
    section = _section(config)
    experimental = context.experimental
    precision = section.get("mixed_precision")
    if precision in _AUTOCAST:
        experimental.use_amp(_AUTOCAST[precision])
    elif precision is not None and precision not in LEVELS:
        raise errors.InvalidExperimentException(
            f"optimizations.mixed_precision={precision!r} in the config: use one of bf16, fp16, {', '.join(LEVELS)}."
        )
    if (options := _options(section, "compile")) is not None:
        experimental.use_compile(**options)
    if _flag(section, "channels_last"):
        experimental.use_channels_last()
    if (options := _options(section, "cuda_graphs")) is not None:
        known = inspect.signature(experimental.use_cuda_graphs).parameters
        if unknown := sorted(options.keys() - known.keys()):
            raise errors.InvalidExperimentException(
                f"optimizations.cuda_graphs.{unknown[0]} in the config: the options are {', '.join(known)}."
            )
        experimental.use_cuda_graphs(**options)
    if _flag(section, "fused_optimizer") is False:
        experimental.disable_fused_optimizers()
    with _tf32(_flag(section, "tf32")):
        yield


def with_optimizations(config: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose section `optimizations` is overridden by these settings."""
    if unknown := sorted(settings.keys() - _KNOWN):
        raise errors.InvalidExperimentException(
            f"init(optimizations={{{unknown[0]!r}: ...}}): the settings are {', '.join(sorted(_KNOWN))}."
        )
    return {**(config or {}), "optimizations": {**_section(config), **settings}}


def apply_level(context: PyTorchTrialContext) -> None:
    """Set up the apex level of the config. Call it when all models and optimizers are wrapped."""
    level = _section(context.config_if_any).get("mixed_precision")
    if level in ("O2", "O3") and not isinstance(context.precision, HalfWeights):
        context.configure_apex_amp(context.models, context.optimizers, opt_level=level)


def _section(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    section = (config or {}).get("optimizations") or {}
    if not isinstance(section, Mapping):
        raise errors.InvalidExperimentException(
            f"optimizations={section!r} in the config is not a mapping of settings."
        )
    return section


def _flag(section: Mapping[str, Any], name: str) -> bool | None:
    value = section.get(name)
    if value is not None and not isinstance(value, bool):
        raise errors.InvalidExperimentException(f"optimizations.{name}={value!r} in the config: write true or false.")
    return value


def _options(section: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the options of a setting that is on; None if it is off."""
    value = section.get(name)
    if isinstance(value, Mapping):
        return value
    return {} if _flag(section, name) else None


@contextlib.contextmanager
def _tf32(enabled: bool | None) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 matrix products inside the block; None changes nothing."""
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
