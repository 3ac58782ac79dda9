"""`--follow`: watch an experiment until it ends, live in a terminal, line by line elsewhere."""

from ._session import follow

__all__ = ["follow"]
