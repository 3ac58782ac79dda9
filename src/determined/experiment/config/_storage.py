"""The section `checkpoint_storage`: where checkpoints go, and which of them are kept."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Discriminator, Tag

from determined import errors, storage
from determined.experiment.config._section import (
    Natural,
    RuleViolation,
    Section,
    Text,
    ignored,
    key,
    rule_error,
    secret,
    tagged,
)

_Prefix = Annotated[Text | None, key("Prefix of all file names in the bucket.", "checkpoints")]


class _Storage(Section):
    """Which checkpoints are kept when an experiment has ended."""

    save_experiment_best: Annotated[Natural, key("Number of best checkpoints of the whole experiment to keep.", 3)] = 0
    save_trial_best: Annotated[Natural, key("Number of best checkpoints of each trial to keep.", 1)] = 1
    save_trial_latest: Annotated[Natural, key("Number of latest checkpoints of each trial to keep.", 1)] = 1


class HomeStorage(_Storage):
    """Checkpoints are kept in the home folder; the default without `type`."""


class SharedFsStorage(_Storage):
    """Checkpoints are kept in a folder, which may be on a shared file system."""

    type: Literal["shared_fs"] = "shared_fs"
    host_path: Annotated[str, key("An absolute path.", "/mnt/shared")]
    storage_path: Annotated[str | None, key("A folder below `host_path`.", "checkpoints")] = None
    propagation: Annotated[Any, ignored("How the path is mounted in a container.", "rprivate")] = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that a path is relative, or leaves the shared folder."""
        yield from _absolute("host_path", self.host_path, "/mnt/shared")
        folder = os.path.normpath(os.path.join(self.host_path, self.storage_path or ""))
        if not pathlib.PurePath(folder).is_relative_to(os.path.normpath(self.host_path)):
            yield RuleViolation(
                ("storage_path",),
                f"it leaves host_path={self.host_path!r}",
                "Write a folder below it, such as storage_path: checkpoints.",
            )


class DirectoryStorage(_Storage):
    """Checkpoints are kept in a folder."""

    type: Literal["directory"] = "directory"
    container_path: Annotated[str, key("An absolute path.", "/data/checkpoints")]

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that the path is relative."""
        yield from _absolute("container_path", self.container_path, "/data/checkpoints")


class GcsStorage(_Storage):
    """Checkpoints are kept in Google Cloud Storage."""

    type: Literal["gcs"] = "gcs"
    bucket: Annotated[Text, key("The name of the bucket.", "my-bucket")]
    prefix: _Prefix = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that the prefix leaves the bucket."""
        yield from _inside(self.prefix)


class S3Storage(_Storage):
    """Checkpoints are kept in Amazon S3, or in a store with the same API."""

    type: Literal["s3"] = "s3"
    bucket: Annotated[Text, key("The name of the bucket.", "my-bucket")]
    prefix: _Prefix = None
    access_key: Annotated[Text | None, secret("The access key; requires `secret_key`.", "AKIA0123")] = None
    secret_key: Annotated[Text | None, secret("The secret key; requires `access_key`.", "wJal0123")] = None
    endpoint_url: Annotated[
        Text | None, key("URL of the store, if it is not Amazon's.", "https://minio.example:9000")
    ] = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the keys that do not go together."""
        yield from _inside(self.prefix)
        yield from _url("endpoint_url", self.endpoint_url)
        if (self.access_key is None) != (self.secret_key is None):
            missing = "access_key" if self.access_key is None else "secret_key"
            yield RuleViolation(
                (missing,),
                "access_key and secret_key go together",
                "Write both, or neither to use the credentials of the machine.",
            )


class AzureStorage(_Storage):
    """Checkpoints are kept in Azure Blob Storage.

    Without `connection_string` and `account_url`, the account is that of the environment.
    """

    type: Literal["azure"] = "azure"
    container: Annotated[Text, key("The name of the container.", "my-container")]
    prefix: _Prefix = None
    connection_string: Annotated[
        Text | None,
        secret("Connection string of the account, instead of `account_url`.", "AccountName=me;AccountKey=k3y"),
    ] = None
    account_url: Annotated[Text | None, key("URL of the account.", "https://me.blob.core.windows.net")] = None
    credential: Annotated[Text | None, secret("Credential for `account_url`.", "k3y")] = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the keys that do not go together."""
        yield from _inside(self.prefix)
        yield from _url("account_url", self.account_url)
        if self.connection_string is not None and self.account_url is not None:
            yield RuleViolation(
                (),
                "azure takes one of connection_string and account_url",
                "Remove account_url; connection_string includes it.",
            )
        elif self.credential is not None and self.account_url is None:
            yield RuleViolation(
                ("credential",), "it goes with account_url", "Remove it; connection_string includes the credential."
            )


class RegisteredStorage(_Storage):
    """Checkpoints are kept by a store that has registered its `type` and has no section here; it checks its keys."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str


STORAGES = (SharedFsStorage, DirectoryStorage, GcsStorage, S3Storage, AzureStorage)
HOME = tagged(tagged("home"))  # no string under `type` can equal these two
_REGISTERED = tagged(tagged("registered"))


def _section_of_url(value: Any) -> Any:
    """Return the section that a URL stands for; other values as they are."""
    if not isinstance(value, str) or "://" not in value:
        return value
    try:
        return storage.section_of(value)
    except errors.StorageException as error:
        raise rule_error([RuleViolation((), "it names no store for an experiment", str(error))]) from None


def _kind(value: Any) -> str | None:
    if not isinstance(value, Mapping | _Storage):
        return None
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if kind is None:
        return HOME
    if not isinstance(kind, str):
        return None
    is_ours = any(kind == one.model_fields["type"].default for one in STORAGES)
    return _REGISTERED if not is_ours and storage.has_store(kind) else tagged(kind)


CheckpointStorage = Annotated[
    Annotated[HomeStorage, Tag(HOME)]
    | Annotated[SharedFsStorage, Tag(tagged("shared_fs"))]
    | Annotated[DirectoryStorage, Tag(tagged("directory"))]
    | Annotated[GcsStorage, Tag(tagged("gcs"))]
    | Annotated[S3Storage, Tag(tagged("s3"))]
    | Annotated[AzureStorage, Tag(tagged("azure"))]
    | Annotated[RegisteredStorage, Tag(_REGISTERED)],
    Discriminator(_kind),
    BeforeValidator(_section_of_url),
]


def _absolute(name: str, path: str, example: str) -> Iterator[RuleViolation]:
    if not os.path.isabs(path):
        yield RuleViolation((name,), "it is not an absolute path", f"Write {name}: {example}.")


def _inside(prefix: str | None) -> Iterator[RuleViolation]:
    if prefix is not None and ".." in prefix.split("/"):
        yield RuleViolation(("prefix",), "it leaves the bucket with '..'", "Write prefix: checkpoints.")


def _url(name: str, url: str | None) -> Iterator[RuleViolation]:
    if url is not None and not url.startswith(("http://", "https://")):
        yield RuleViolation((name,), "it is not a URL", f"Write {name}: https://...")
