"""Options that a trial sets in its constructor."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch

from determined import errors
from determined.pytorch._optim.precision import HALF_TYPES, Autocast

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from determined.pytorch._backends.fsdp import Units
    from determined.pytorch._context import PyTorchTrialContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """The arguments of `use_cuda_graphs`, checked."""

    warmup: int
    max_graphs: int
    verify: bool

    def __post_init__(self) -> None:
        for name, value, smallest in (("warmup", self.warmup, 3), ("max_graphs", self.max_graphs, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise errors.InvalidExperimentException(
                    f"use_cuda_graphs({name}={value!r}): pass an int of at least {smallest}."
                )
        if not isinstance(self.verify, bool):
            raise errors.InvalidExperimentException(f"use_cuda_graphs(verify={self.verify!r}): pass True or False.")


class PyTorchExperimentalContext:
    """Options of training: mixed precision, compilation, CUDA graphs, DDP, FSDP, data checks and moves.

    Call its methods in the trial's `__init__`, as `context.experimental.use_amp()`.
    """

    def __init__(self, parent: PyTorchTrialContext) -> None:
        self._parent = parent
        # What the methods below set; the options of an acceleration that is off are None.
        self.dataset_checks = True
        self.auto_to_device = True
        self.prefetches = True
        self.channels_last = False
        self.compile_options: dict[str, Any] | None = None
        self.graph_options: GraphOptions | None = None
        self.fuses_optimizers = True
        # Methods of the context, for programs that call them here.
        self.wrap_reducer = parent.wrap_reducer
        self.reset_reducers = parent.reset_reducers
        self.reduce_metrics = parent.reduce_metrics

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Run every model's forward under autocast, scale losses, and step on unscaled gradients.

        `dtype` is `torch.float16` (the default on a GPU), with loss scaling, or `torch.bfloat16` (the default on
        a CPU), which needs none. Outputs of models come back in fp32.
        """
        device = self._parent.device.type
        dtype = dtype or (torch.float16 if device == "cuda" else torch.bfloat16)
        if dtype not in HALF_TYPES:
            raise errors.InvalidExperimentException(f"use_amp(dtype={dtype}): pass torch.float16 or torch.bfloat16.")
        scaler = torch.amp.GradScaler(device) if dtype == torch.float16 else None
        self._parent.set_precision(Autocast(device, dtype, scaler))

    def use_compile(self, **options: Any) -> None:
        """Compile every model with `torch.compile` and these options when training starts, also for evaluation.

        The first batches take longer, up to minutes, with a message. Weights keep their names in checkpoints.
        """
        known = inspect.signature(torch.compile).parameters.keys() - {"model"}
        if unknown := sorted(options.keys() - known):
            raise errors.InvalidExperimentException(
                f"use_compile({unknown[0]}=...): the options of torch.compile are {sorted(known)}."
            )
        self.compile_options = options

    def use_cuda_graphs(self, *, warmup: int = 3, max_graphs: int = 8, verify: bool = False) -> None:
        """Capture whole batches (forward, backward, clipping, steps, scaling) as CUDA graphs, and replay them.

        This helps most if the GPU waits for Python. The first `warmup` batches train without a graph; then each form
        of batches (shapes, types) is captured once, at most `max_graphs` of them. Python code in `train_batch` runs
        only during the capture, so it must do the same for every batch. Batches that cannot be captured train without
        a graph, with a message that gives the reason. With `verify`, some batches are trained both ways and compared.
        """
        self.graph_options = GraphOptions(warmup=warmup, max_graphs=max_graphs, verify=verify)

    def disable_fused_optimizers(self) -> None:
        """Keep the step implementation of optimizers on a GPU. By default they use a fused kernel if torch has one."""
        self.fuses_optimizers = False

    def use_channels_last(self) -> None:
        """Keep models and batches of images (four dimensions) in channels-last memory format, for fast convolutions.

        Call it before `wrap_model`.
        """
        if self._parent.models:
            raise errors.InvalidExperimentException("use_channels_last() came after wrap_model(); call it before.")
        self.channels_last = True

    def disable_prefetch(self) -> None:
        """Copy batches to a GPU on the training stream, not in parallel to the training of the batch before."""
        self.prefetches = False

    def use_ddp(self, *, sync_batch_norm: bool = False, **options: Any) -> None:
        """Set options of `torch.nn.parallel.DistributedDataParallel`, such as `find_unused_parameters=True`.

        With `sync_batch_norm`, batch norm layers compute their statistics over all ranks (on GPUs only). Call it
        before `wrap_model`. It has no effect in one process.
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
        """Shard weights, gradients and optimizer state over all processes by FSDP2, for models too large for one GPU.

        `units` are the module classes, or a function that selects modules, whose weights are gathered together
        while they compute; by default the entries of the model's `ModuleList`s and `Sequential`s. `mixed_precision` is
        `torch.bfloat16` or a `torch.distributed.fsdp.MixedPrecisionPolicy`. With `activation_checkpointing`, units
        recompute their activations in backward instead of keeping them. Without `reshard_after_forward`, full weights
        are kept from forward to backward: faster, with more memory. With `offload_to_cpu`, weights and optimizer state
        are kept in host memory. Call it before `wrap_model`, and start the program with torchrun.
        """
        if self._parent.models or self._parent.optimizers:
            raise errors.InvalidExperimentException("use_fsdp() came after wrap_model(); call it before.")
        if not self._parent.trains:  # loaded in one process, with whole models
            return
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise errors.InvalidExperimentException(
                "use_fsdp() shards models over processes, but there is no process group; start the program with "
                "`torchrun --nproc-per-node N train.py`, also for one process."
            )
        from determined.pytorch._backends import fsdp

        self._parent.backend = fsdp.Sharded(
            self._parent.device,
            self._parent.distributed,
            units=units,
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
            offload_to_cpu=offload_to_cpu,
        )

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from the build methods, such as a torch `DataLoader`.

        The trial must then shard data over ranks, and shuffled data may continue in another order after a resume.
        """
        self.dataset_checks = False

    def disable_auto_to_device(self) -> None:
        """Pass batches to the trial as the loader yields them; move them with `context.to_device`."""
        self.auto_to_device = False
