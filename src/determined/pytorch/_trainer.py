"""The entry points of a training program: `init` and `Trainer.fit`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from determined import core, errors
from determined._info import get_cluster_info
from determined.pytorch._accelerate.options import applied, with_optimizations
from determined.pytorch._backends.process_group import joined
from determined.pytorch._checkpoint.resume import CHECKPOINT_VARIABLE, steps_to_resume
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._loop.plan import Batch, Epoch, TrainUnit
from determined.pytorch._loop.policy import POLICIES
from determined.pytorch._loop.run import FitSettings, run
from determined.pytorch._report.profile import ProfilerSettings
from determined.pytorch._trial import PyTorchTrial, check_evaluation

# Seeds of torch that the program did not set: the initial one, and the seeds of earlier runs in this process.
_NOT_BY_THE_PROGRAM = {torch.Generator().initial_seed()}

_fit_numbers = itertools.count()


@contextlib.contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    aggregation_frequency: int = 1,
    enable_tensorboard_logging: bool = True,
    optimizations: dict[str, Any] | None = None,
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Iterator[PyTorchTrialContext]:
    """Open a training run: a context manager that gives the `PyTorchTrialContext` and closes the run at the end.

        with pytorch.init(hparams={"lr": 0.1}) as context:
            trainer = pytorch.Trainer(MyTrial(context), context)
            trainer.fit(max_length=pytorch.Epoch(3))

    `exp_conf` is an experiment config. A local run uses its `name`, `searcher` (the metric of the best checkpoint),
    `checkpoint_storage`, `optimizations` and `reproducibility.experiment_seed`. A managed run gets hyperparameters and
    config from its runner instead. With `aggregation_frequency=k`, optimizers step on every k-th batch.
    `optimizations` overrides settings of the config's section of that name, for example
    `{"cuda_graphs": True, "mixed_precision": "bf16"}`. `checkpoint_storage` is the path of a folder, a URL such as
    `s3://bucket/prefix`, or a section; it replaces that of `exp_conf`.
    """
    _check_init(hparams, exp_conf, distributed, aggregation_frequency, optimizations)
    info = get_cluster_info()
    config, values = (info.trial._config, info.trial.hparams) if info else (exp_conf, hparams)
    if optimizations:
        config = with_optimizations(config, optimizations)
    given_seed = info.trial.trial_seed if info else ((config or {}).get("reproducibility") or {}).get("experiment_seed")
    with joined(distributed) as (ranks, backend):
        seed = _seed(given_seed, ranks)
        facts = core.RunFacts(name=_name(config), config=config, hparams=values or {}, seed=seed)
        mode = core.TensorboardMode.AUTO if enable_tensorboard_logging else core.TensorboardMode.MANUAL
        storage = None if info else checkpoint_storage
        if storage is None:
            storage = (config or {}).get("checkpoint_storage")
        with core.Context(facts, distributed=ranks, checkpoint_storage=storage, tensorboard_mode=mode) as services:
            context = PyTorchTrialContext(
                distributed=services.distributed,
                backend=backend,
                hparams=values,
                exp_conf=config,
                trial_seed=seed,
                aggregation_frequency=aggregation_frequency,
                services=services,
                seed_is_given=given_seed is not None,
                initial_batch=ranks.broadcast(steps_to_resume(services) if ranks.is_chief else 0),
            )
            with applied(context, config):
                yield context


class Trainer:
    """Trains a `PyTorchTrial`. Use it inside `with pytorch.init() as context:`."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        if not isinstance(trial, PyTorchTrial):
            raise TypeError(f"Trainer(trial={trial!r}): pass an instance of a subclass of pytorch.PyTorchTrial.")
        if not isinstance(context, PyTorchTrialContext):
            raise TypeError(f"Trainer(context={context!r}): pass what `with pytorch.init() as context:` gives.")
        if not context.models or not context.optimizers:
            missing = "model" if not context.models else "optimizer"
            raise errors.InvalidExperimentException(
                f"{type(trial).__name__} wraps no {missing}; call context.wrap_{missing}() in its __init__."
            )
        check_evaluation(trial)
        self._trial = trial
        self._context = context
        self._profiler = ProfilerSettings()

    def configure_profiler(
        self,
        sync_timings: bool = True,
        enabled: bool = False,
        begin_on_batch: int = 0,
        end_after_batch: int | None = None,
    ) -> None:
        """Collect system metrics and timings of the loop's stages, from one batch to another. Call it before `fit`.

        They are recorded as the metric groups `cpu`, `memory`, `disk`, `network`, `gpu` and `timing`. With
        `sync_timings`, each timing waits for the GPU, so it includes the kernels that the stage started.
        """
        self._profiler = ProfilerSettings(sync_timings, enabled, begin_on_batch, end_after_batch)

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit = Batch(100),  # noqa: B008  # immutable
        checkpoint_policy: str = "best",
        latest_checkpoint: str | os.PathLike[str] | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        *,
        best_metric: str | None = None,
        smaller_is_better: bool | None = None,
    ) -> None:
        """Train to `max_length`; validate, save checkpoints and report metrics on the way.

        Periods are `pytorch.Batch` or `pytorch.Epoch`, counted from the start of training; None means only after the
        last batch.

        `checkpoint_policy` decides whether a validation is followed by a checkpoint: with `best`, if it is the best so
        far; with `all`, always; with `none`, never. `best` compares the searcher's metric, else `best_metric`, else the
        only metric or the validation loss, and prints which one it compares. `smaller_is_better` is the direction;
        by default it is guessed from the name of the metric (loss, accuracy). If the name does not tell, every
        validation is followed by a checkpoint.

        `latest_checkpoint` is the checkpoint to continue from: an id, a path, a URL, or "latest" for the newest intact
        checkpoint of an earlier run with the same program, hyperparameters and data, if there is one.

        `test_mode` trains and validates one batch and saves. The environment variable DET_TEST_MODE=1, which
        `det experiment create --local --test` sets, does the same.
        """
        is_local = self._context.services.info is None
        is_test = test_mode is True or os.environ.get("DET_TEST_MODE") == "1"
        length = _length(max_length, self._context, is_test)
        _check_period("reporting_period", reporting_period)
        _check_period("validation_period", validation_period, is_optional=True)
        _check_period("checkpoint_period", checkpoint_period, is_optional=True)
        _check_flags(
            step_zero_validation=step_zero_validation, test_mode=test_mode, profiling_enabled=profiling_enabled
        )
        _check_policy(checkpoint_policy, best_metric)
        if test_mode and not is_local:
            raise ValueError("fit(test_mode=True) is for local runs; leave it out where a runner started the trial.")
        if is_local:
            # The variable continues an unchanged program, so it overrides the argument; once, for the first fit().
            latest_checkpoint = os.environ.pop(CHECKPOINT_VARIABLE, None) or latest_checkpoint
        _check_checkpoint(latest_checkpoint)
        settings = FitSettings(
            length=length,
            reporting_period=reporting_period,
            validation_period=validation_period,
            checkpoint_period=checkpoint_period,
            checkpoint_policy=checkpoint_policy,
            best_metric=best_metric,
            smaller_is_better=smaller_is_better,
            latest_checkpoint=latest_checkpoint,
            step_zero_validation=step_zero_validation,
            test_mode=is_test,
            profiler=dataclasses.replace(self._profiler, enabled=True) if profiling_enabled else self._profiler,
            is_first_fit=next(_fit_numbers) == 0,
        )
        run(self._trial, self._context, settings)


def _check_init(hparams: Any, exp_conf: Any, distributed: Any, aggregation_frequency: Any, optimizations: Any) -> None:
    for name, value in (("hparams", hparams), ("exp_conf", exp_conf), ("optimizations", optimizations)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"init({name}={value!r}): pass a dict, or leave it out.")
    if distributed is not None and not isinstance(distributed, core.DistributedContext):
        raise TypeError(f"init(distributed={distributed!r}): pass a core.DistributedContext, or leave it out.")
    if (
        isinstance(aggregation_frequency, bool)
        or not isinstance(aggregation_frequency, int)
        or aggregation_frequency < 1
    ):
        raise ValueError(
            f"init(aggregation_frequency={aggregation_frequency!r}): pass an int of at least 1; 1 steps on every batch."
        )


def _seed(given: Any, ranks: core.DistributedContext) -> int:
    """Return the seed of the run, and seed everything with it unless the program has seeded torch itself."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**32):
        raise ValueError(
            f"exp_conf['reproducibility']['experiment_seed']={given!r}: a seed is an int from 0 to 2**32 - 1."
        )
    of_torch = torch.initial_seed()
    is_of_program = given is None and of_torch not in _NOT_BY_THE_PROGRAM
    seed: int = of_torch % 2**31 if is_of_program else secrets.randbits(31) if given is None else given
    seed, is_of_program = ranks.broadcast((seed, is_of_program))
    if not is_of_program:
        rng.seed_all(seed)
        _NOT_BY_THE_PROGRAM.add(seed)
    return seed


def _name(config: Mapping[str, Any] | None) -> str:
    named = (config or {}).get("name")
    program = pathlib.Path(sys.argv[0])
    return str(named or (f"{program.parent.name}/{program.stem}" if program.stem else "interactive").lstrip("/"))


def _length(max_length: Any, context: PyTorchTrialContext, test_mode: bool) -> TrainUnit:
    if test_mode:
        return Batch(1)
    if max_length is None:
        return _configured_length(context)
    if not isinstance(max_length, (Batch, Epoch)):
        raise TypeError(
            f"fit(max_length={max_length!r}) is not a training length; pass pytorch.Batch(500) or pytorch.Epoch(3)."
        )
    if not isinstance(max_length.value, int):
        raise TypeError(
            f"fit(max_length={max_length!r}) holds a schedule; a training length is one number, such as "
            f"{type(max_length).__name__}(500)."
        )
    if max_length.value < 1:
        raise ValueError(f"fit(max_length={max_length!r}) trains nothing; pass a length of at least 1.")
    return max_length


def _configured_length(context: PyTorchTrialContext) -> TrainUnit:
    """Return the length in the config's searcher, which managed runs may have."""
    config = (context.config_if_any or {}) if context.services.info else {}
    length = (config.get("searcher") or {}).get("max_length")
    if length is None:
        raise ValueError("fit() needs max_length, such as fit(max_length=pytorch.Epoch(3)).")
    unit = configured_unit(length, "searcher.max_length", context.get_global_batch_size)
    if unit is None:
        raise ValueError(_NOT_A_LENGTH.format(name="searcher.max_length", value=length))
    return unit


_NOT_A_LENGTH = """{name}={value!r} in the experiment config is not a length; \
write {{batches: n}}, {{epochs: n}} or {{records: n}} with n of at least 1."""


def configured_unit(value: Any, name: str, batch_size: Callable[[], int]) -> TrainUnit | None:
    """Return a length or period of an experiment config, such as `{epochs: 3}`; None if it is 0.

    `batch_size` returns the global batch size, which converts records to batches.
    """
    parsed = core.parse_length(value)
    if parsed is None:
        raise ValueError(_NOT_A_LENGTH.format(name=name, value=value))
    unit, count = parsed
    if count == 0:
        return None
    if unit is core.Unit.EPOCHS:
        return Epoch(count)
    return Batch(max(count // batch_size(), 1) if unit is core.Unit.RECORDS else count)


def _check_period(name: str, period: Any, is_optional: bool = False) -> None:
    if not isinstance(period, (Batch, Epoch)) and not (period is None and is_optional):
        raise TypeError(f"fit({name}={period!r}) is not a period; pass pytorch.Batch(100) or pytorch.Epoch(1).")


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"fit({name}={value!r}): pass True or False.")


def _check_policy(checkpoint_policy: Any, best_metric: Any) -> None:
    if checkpoint_policy not in POLICIES:
        raise ValueError(
            f"fit(checkpoint_policy={checkpoint_policy!r}): the policies are {', '.join(map(repr, POLICIES))}."
        )
    if best_metric is not None and not isinstance(best_metric, str):
        raise TypeError(f"fit(best_metric={best_metric!r}): pass the name of a validation metric, or leave it out.")


def _check_checkpoint(checkpoint: Any) -> None:
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(
            f"fit(latest_checkpoint={checkpoint!r}): pass the id of a checkpoint or the path of its folder."
        )
    if checkpoint == "":
        raise ValueError("fit(latest_checkpoint=''): pass the id of a checkpoint, a path, or None to start afresh.")
