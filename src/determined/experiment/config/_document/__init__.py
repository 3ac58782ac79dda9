"""Reads a config: from a file, a string or a mapping to plain values with the line of each."""

from determined.experiment.config._document.document import (
    Document,
    document_of_file,
    document_of_text,
    overridden,
    plain,
)

__all__ = ["Document", "document_of_file", "document_of_text", "overridden", "plain"]
