"""What programs for Determined import from here: `set_logger`, and `experimental` for the client."""

from __future__ import annotations

import logging
from typing import NoReturn

from determined._text import LOG_FORMAT

__all__ = ["set_logger"]


def set_logger(debug_enabled: bool) -> None:
    """Log to the error output from DEBUG on, or from INFO on, in the format `determined.LOG_FORMAT`."""
    level = logging.DEBUG if debug_enabled else logging.INFO
    logging.basicConfig(level=level, format=LOG_FORMAT)
    logging.getLogger().setLevel(level)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'determined.common' has no attribute {name!r}; Resolute offers set_logger() here, and "
        "determined.common.experimental, which is determined.experimental."
    )
