"""How this package tells itself that the database is damaged."""

from __future__ import annotations


class Damage(Exception):
    """What is stored is not what was written; `remedy` says what to do about it, if not the usual."""

    def __init__(self, finding: str, remedy: str | None = None) -> None:
        super().__init__(finding)
        self.remedy = remedy
