"""Opt-ins that a trial switches on in its constructor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from determined import errors
from determined.pytorch._accelerate.cuda_graphs.options import GraphOptions
from determined.pytorch._optim.precision import Autocast

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from determined.pytorch._backends.fsdp import Units
    from determined.pytorch._context import PyTorchTrialContext


class PyTorchExperimentalContext:
    """Opt-ins: automatic mixed precision, and leaving checks and moves to the trial."""

    def __init__(self, parent: PyTorchTrialContext) -> None:
        self._parent = parent
        self.dataset_checks = True
        """Whether a bare torch loader from a build method is refused."""
        self.auto_to_device = True
        """Whether the loop moves batches to the device."""
        self.prefetches = True
        """Whether batches travel to a GPU on a stream of their own."""
        self.channels_last = False
        """Whether models and batches of images are kept with their channels last."""
        self.compile_options: dict[str, Any] | None = None
        """Options of `torch.compile` for all models; None to leave them as they are."""
        self.graph_options: GraphOptions | None = None
        """How batches are replayed as CUDA graphs; None to train them one by one."""
        self.fuses_optimizers = True
        """Whether optimizers on a GPU step in one kernel where torch has one."""

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Run every model's forward under autocast, scale losses, and step on unscaled gradients.

        `dtype` is `torch.float16` (the default on a GPU), with loss scaling, or `torch.bfloat16` (the default on
        a CPU), which needs none. Outputs of models come back in fp32.
        """
        device = self._parent.device.type
        dtype = dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
        if dtype not in (torch.float16, torch.bfloat16):
            raise errors.InvalidExperimentException(f"use_amp(dtype={dtype}): pass torch.float16 or torch.bfloat16.")
        scaler = torch.amp.GradScaler(device) if dtype == torch.float16 else None
        self._parent.set_precision(Autocast(device, dtype, scaler))

    def use_compile(self, **options: Any) -> None:
        """Compile every model with `torch.compile` and these options when training starts, for evaluation too.

        The first batches take longer, up to minutes, and say so. Weights keep their names in checkpoints.
        """
        from determined.pytorch._accelerate import compile as compiling

        compiling.check_options(options)
        self.compile_options = options

    def use_cuda_graphs(self, *, warmup: int = 3, max_graphs: int = 8, verify: bool = False) -> None:
        """Capture whole batches (forward, backward, clipping, steps, scaling) as CUDA graphs, and replay them.

        Worth much where the GPU waits for Python. The first `warmup` batches train as ever, then each form of batches
        (shapes, types) is captured once, `max_graphs` of them at most. Python code in `train_batch` runs only while
        capturing, so that it must do the same for every batch. What cannot be captured trains as ever, after a message
        that says why. With `verify` some batches are trained both ways, and compared.
        """
        self.graph_options = GraphOptions(warmup=warmup, max_graphs=max_graphs, verify=verify)

    def disable_fused_optimizers(self) -> None:
        """Let optimizers on a GPU step as their program made them, not in one kernel where torch has one."""
        self.fuses_optimizers = False

    def use_channels_last(self) -> None:
        """Keep models and batches of images (four dimensions) with their channels last, as convolutions like best.

        Call it before `wrap_model`.
        """
        if self._parent.models:
            raise errors.InvalidExperimentException("use_channels_last() came after wrap_model(); call it before.")
        self.channels_last = True

    def disable_prefetch(self) -> None:
        """Move batches to a GPU on the stream that trains, not while the one before is trained."""
        self.prefetches = False

    def use_ddp(self, *, sync_batch_norm: bool = False, **options: Any) -> None:
        """Train with several processes by DDP with these options, such as `find_unused_parameters=True`.

        They are those of `torch.nn.parallel.DistributedDataParallel`. With `sync_batch_norm` batch norm layers
        compute their statistics over all ranks, on GPUs only. Call it before `wrap_model`; in one process it has no
        effect.
        """
        if self._parent.models:
            raise errors.InvalidExperimentException("use_ddp() came after wrap_model(); call it before.")
        self._parent.backend.configure(options, sync_batch_norm)

    def use_fsdp(
        self,
        *,
        units: Units | None = None,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
        activation_checkpointing: bool = False,
        reshard_after_forward: bool = True,
        offload_to_cpu: bool = False,
    ) -> None:
        """Spread weights, gradients and optimizer state over all processes by FSDP2, for models too large for one GPU.

        `units` are the classes of modules, or a function that picks modules, whose weights are gathered together
        while they compute; by default the parts of the model's lists and sequences of modules. `mixed_precision` is
        `torch.bfloat16` or a `torch.distributed.fsdp.MixedPrecisionPolicy`. With `activation_checkpointing` units
        compute their activations once more in backward instead of keeping them. Without `reshard_after_forward` whole
        weights are kept from forward to backward: faster, with more memory. With `offload_to_cpu` weights and
        optimizer state are kept in host memory. Call it before `wrap_model`, and start the program with torchrun.
        """
        if self._parent.models or self._parent.optimizers:
            raise errors.InvalidExperimentException("use_fsdp() came after wrap_model(); call it before.")
        if not self._parent.trains:  # it is looked at in one process, with whole models
            return
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise errors.InvalidExperimentException(
                "use_fsdp() spreads models over processes, but there is no process group; start the program with "
                "`torchrun --nproc-per-node N train.py`, also for one process."
            )
        from determined.pytorch._backends import fsdp

        options = fsdp.Options(
            units=units,
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
            offload_to_cpu=offload_to_cpu,
        )
        self._parent.backend = fsdp.Sharded(self._parent.device, self._parent.distributed, options)

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from the build methods, such as a torch `DataLoader`.

        The trial then shards data over ranks by itself, and shuffled data may continue in another order after a
        resume.
        """
        self.dataset_checks = False

    def disable_auto_to_device(self) -> None:
        """Hand batches to the trial as the loader gave them; move them with `context.to_device`."""
        self.auto_to_device = False

    # Old places of calls that are the context's own now.

    def wrap_reducer(self, *args: Any, **kwargs: Any) -> Any:
        """Call `context.wrap_reducer`."""
        return self._parent.wrap_reducer(*args, **kwargs)

    def reset_reducers(self) -> None:
        """Call `context.reset_reducers`."""
        self._parent.reset_reducers()

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Call `context.reduce_metrics`."""
        return self._parent.reduce_metrics(for_training)
