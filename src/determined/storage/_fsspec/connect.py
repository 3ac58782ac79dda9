"""From a URL or a `checkpoint_storage` section to a store, and the credentials that it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import posixpath
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from determined import errors
from determined._home import home, make_private
from determined._secrets import MASK, STORAGE_SECRETS
from determined.storage._base import CheckpointStore
from determined.storage._fsspec.objects import Objects
from determined.storage._fsspec.store import FsspecStore
from determined.storage._local import FolderStore
from determined.storage._locks import locked

CREDENTIALS_VARIABLE = "DET_STORAGE_CREDENTIALS"
"""Environment variable: the keys of configs as JSON, by location, for processes that do not share the home folder."""

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60

Keys = Mapping[str, str]


class _Place(NamedTuple):
    """What names a store: a bucket, a folder in it, and where the service is if that is not the usual place."""

    scheme: str
    bucket: str
    prefix: str
    endpoint: str | None

    @property
    def location(self) -> str:
        """The URL that stands for the store on record."""
        base = f"{self.scheme}://{posixpath.join(self.bucket, self.prefix) if self.prefix else self.bucket}"
        option = _SERVICES[self.scheme].endpoint
        return base if self.endpoint is None else f"{base}?{option}={urllib.parse.quote(self.endpoint, safe=':/')}"


class _Service(NamedTuple):
    """A kind of object store."""

    package: str
    extra: str
    endpoint: str
    """The key of configs, and the option of URLs, that says where the service is; empty if nothing does."""
    example: str
    remedy: str
    options: Callable[[_Place, Keys], dict[str, Any]]
    """What its class in fsspec is made with."""


def of_url(url: str) -> CheckpointStore:
    """Return the store at a URL such as `s3://bucket/prefix` or `s3://bucket?endpoint_url=https://minio:9000`."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    if scheme == "file":
        path = urllib.parse.unquote(rest)
        if not os.path.isabs(path):
            raise errors.StorageException(
                f"checkpoint_storage={url!r} must have an absolute path after file://, such as file:///data/checkpoints."
            )
        return FolderStore(pathlib.Path(os.path.normpath(path)))
    bucket, _, prefix = rest.partition("/")
    service = _SERVICES[scheme]
    if "@" in bucket:  # not repeated, since it may be a key
        raise errors.StorageException(
            f"A {scheme}:// URL of checkpoint_storage has an '@' before its first slash; leave credentials out of it. "
            f"{service.remedy}"
        )
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    endpoint = options.pop(service.endpoint, None) if service.endpoint else None
    if options:
        allowed = f"only {service.endpoint!r} is allowed" if service.endpoint else "none is allowed"
        raise errors.StorageException(
            f"A {scheme}:// URL of checkpoint_storage has the option {next(iter(options))!r}, but {allowed}; write it "
            f"like {service.example}."
        )
    return _store(_checked(_Place(scheme, bucket, prefix, endpoint), url), {})


def of_section(section: Mapping[str, Any]) -> CheckpointStore:
    """Return the store of a section with `type: s3`, `gcs` or `azure`."""
    kind = section["type"]
    scheme, name = {"s3": ("s3", "bucket"), "gcs": ("gs", "bucket"), "azure": ("az", "container")}[kind]
    known = (name, "prefix", "endpoint_url", "account_url", *STORAGE_SECRETS)
    values = {key: section[key] for key in known if section.get(key) is not None}
    for key, value in values.items():
        if not isinstance(value, str) or not value:
            shown = MASK if key in STORAGE_SECRETS else value
            raise errors.StorageException(f"checkpoint_storage.{key}={shown!r} must be a string that is not empty.")
    if name not in values:
        raise errors.StorageException(f"checkpoint_storage of type {kind!r} needs a {name}; write {name}: my-{name}.")
    keys = {key: values[key] for key in STORAGE_SECRETS if values.get(key, MASK) != MASK}
    endpoint = values.get(_SERVICES[scheme].endpoint) if _SERVICES[scheme].endpoint else None
    if endpoint is None and "connection_string" in keys:
        endpoint = _account_url(keys["connection_string"])
    place = _Place(scheme, values[name], values.get("prefix", ""), endpoint)
    return _store(_checked(place, values[name]), keys)


def _checked(place: _Place, given: str) -> _Place:
    service = _SERVICES[place.scheme]
    if not place.bucket or "/" in place.bucket or "?" in place.bucket:
        raise errors.StorageException(f"checkpoint_storage={given!r} names no bucket; write it like {service.example}.")
    parts = [part for part in place.prefix.split("/") if part]
    if {".", ".."} & set(parts) or "?" in place.prefix:
        raise errors.StorageException(
            f"The prefix {place.prefix!r} of checkpoint_storage has '.', '..' or '?' in it; use names such as "
            "checkpoints/team."
        )
    if place.endpoint is not None and not place.endpoint.startswith(("http://", "https://")):
        raise errors.StorageException(
            f"checkpoint_storage.{service.endpoint}={place.endpoint!r} is not a URL; write https://HOST."
        )
    return place._replace(prefix="/".join(parts))


def _store(place: _Place, given: Keys) -> FsspecStore:
    service = _SERVICES[place.scheme]
    if importlib.util.find_spec(service.package) is None:
        raise errors.StorageException(
            f"checkpoint_storage={place.location!r} needs the package {service.package}, which is not installed; run: "
            f"pip install 'resolute[{service.extra}]'"
        )
    if given:
        _given[place.location] = dict(given)
    keys = known_keys(place.location)

    def connect() -> Any:
        import fsspec  # type: ignore[import-untyped]  # has no types

        options = {"use_listings_cache": False, **service.options(place, known_keys(place.location))}
        return fsspec.filesystem(place.scheme, **options)

    remedy = service.remedy
    if keys and not given:
        remedy += f" Those used here are the keys of an earlier config, in {home().storage_credentials}."
    root = posixpath.join(place.bucket, place.prefix)
    secrets = [*keys.values(), *(_parts(keys["connection_string"]).values() if "connection_string" in keys else ())]
    long = [one for one in secrets if len(one) > 4]
    objects = Objects(place.location, root, connect, remedy, long)
    return FsspecStore(objects, lambda: _keep(place.location, given))


_given: dict[str, dict[str, str]] = {}
"""The keys that configs have named in this process, by location."""


def known_keys(location: str) -> Keys:
    """Return the keys that a config has named for a location: in this process, its environment, or the home folder.

    Empty if the usual means of the client library provide them.
    """
    if location in _given:
        return _given[location]
    given = _keys_in(os.environ.get(CREDENTIALS_VARIABLE, ""))
    if location in given:
        return given[location]
    try:
        return _keys_in(home().storage_credentials.read_text()).get(location, {})
    except FileNotFoundError:
        return {}


def environment_for(location: str) -> dict[str, str]:
    """Return the environment variable by which a process without this home folder gets the keys of a location."""
    keys = known_keys(location)
    return {CREDENTIALS_VARIABLE: json.dumps({location: dict(keys)})} if keys else {}


def _keep(location: str, keys: Keys) -> None:
    """Write keys into a file for the owner alone: configs on record have none."""
    path = home().storage_credentials
    if not keys:
        return
    make_private(path.parent)
    with locked(path):
        present = _keys_in(path.read_text()) if path.exists() else {}
        if present.get(location) == keys:
            return
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
        with open(descriptor, "w") as file:
            json.dump({**present, location: dict(keys)}, file)
        os.replace(name, path)


def _keys_in(text: str) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(keys, dict) for keys in found.values()):
        raise errors.StorageException(
            f"The keys of checkpoint stores in {home().storage_credentials} or {CREDENTIALS_VARIABLE} are not JSON of "
            "mappings by location; delete the file and name the keys in a config again."
        )
    return found


def _s3(place: _Place, keys: Keys) -> dict[str, Any]:
    # s3fs repeats requests itself.
    timeouts = {"connect_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S, "retries": {"max_attempts": 1}}
    return {
        "key": keys.get("access_key"),
        "secret": keys.get("secret_key"),
        "endpoint_url": place.endpoint,
        "config_kwargs": timeouts,
    }


def _gcs(place: _Place, keys: Keys) -> dict[str, Any]:
    # The variable by which Google's libraries are pointed to an emulator, which knows no accounts.
    return {"token": "anon"} if os.environ.get("STORAGE_EMULATOR_HOST") else {}


def _azure(place: _Place, keys: Keys) -> dict[str, Any]:
    timeouts = {"connection_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S}
    if "connection_string" in keys:
        return {"connection_string": keys["connection_string"], **timeouts}
    if place.endpoint is None:
        return timeouts  # AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_NAME and others
    account, credential = _account(place.endpoint), keys.get("credential")
    if credential is None:
        return {"account_name": account, "account_host": _host(place.endpoint), "anon": False, **timeouts}
    is_sas = "sig=" in credential
    key = f"SharedAccessSignature={credential.lstrip('?')}" if is_sas else f"AccountKey={credential}"
    return {"connection_string": f"BlobEndpoint={place.endpoint};AccountName={account};{key}", **timeouts}


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


def _account(url: str) -> str:
    """Return the account in the URL of its blobs: the first part of the host, or the path where emulators have it."""
    parts = urllib.parse.urlsplit(url)
    return parts.path.strip("/") or parts.netloc.partition(".")[0]


def _account_url(connection_string: str) -> str | None:
    """Return the URL of the account in a connection string of Azure."""
    parts = _parts(connection_string)
    if "BlobEndpoint" in parts:
        return parts["BlobEndpoint"].rstrip("/")
    suffix = parts.get("EndpointSuffix", "core.windows.net")
    return f"https://{parts['AccountName']}.blob.{suffix}" if "AccountName" in parts else None


def _parts(connection_string: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in connection_string.split(";")) if value}


def _memory(place: _Place, keys: Keys) -> dict[str, Any]:
    return {}


_SERVICES = {
    "s3": _Service(
        "s3fs",
        "s3",
        "endpoint_url",
        "s3://my-bucket/checkpoints",
        "Check access_key and secret_key in checkpoint_storage, or the credentials of the environment "
        "(AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws, the role of the machine).",
        _s3,
    ),
    "gs": _Service(
        "gcsfs",
        "gcs",
        "",
        "gs://my-bucket/checkpoints",
        "Check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`.",
        _gcs,
    ),
    "az": _Service(
        "adlfs",
        "azure",
        "account_url",
        "az://my-container/checkpoints?account_url=https://me.blob.core.windows.net",
        "Check connection_string or credential in checkpoint_storage, or the credentials of the environment "
        "(AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY).",
        _azure,
    ),
    "memory": _Service("fsspec", "s3", "", "memory://checkpoints", "", _memory),
}


def section_of(url: str) -> dict[str, Any]:
    """Return the `checkpoint_storage` section that a URL stands for in an experiment config."""
    scheme, _, rest = url.partition("://")
    store = of_url(url) if scheme in ("file", "s3", "gs", "az") and rest else None
    if isinstance(store, FolderStore):
        return {"type": "directory", "container_path": store.location}
    if store is None:
        raise errors.StorageException("Write a URL that all processes can use, such as s3://my-bucket/checkpoints.")
    base, _, query = store.location.partition("?")
    bucket, _, prefix = base.partition("://")[2].partition("/")
    kind, name = {"s3": ("s3", "bucket"), "gs": ("gcs", "bucket"), "az": ("azure", "container")}[scheme]
    section = {"type": kind, name: bucket, "prefix": prefix, **dict(urllib.parse.parse_qsl(query))}
    return {key: value for key, value in section.items() if value}
