"""A stand-in for Horovod, which Resolute does not use: an error names what to use instead."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["hvd"]


class _NoHorovod:
    """Raises AttributeError with the remedy for whatever Horovod would offer."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"hvd.{name}: Resolute trains without Horovod. Use context.distributed (get_rank(), get_size(), "
            "allgather(), broadcast()), and start the ranks with `python -m determined.launch.torch_distributed`."
        )


hvd = _NoHorovod()
