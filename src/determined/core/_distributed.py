"""The import path of `DistributedContext` that programs use."""

from determined.core.distributed import DistributedContext

__all__ = ["DistributedContext"]
