"""Servers with the protocols of S3, Google Cloud Storage and Azure, on loopback."""

from __future__ import annotations

import http.client
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Read when gcsfs is imported: it asks a service that the emulator does not have, and Google's where it has none.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that all installations of Azurite have in common."""

Answer = Callable[[str, str], int | None]


class S3Server:
    """moto's server in a thread, which can be stopped, started again, and told to refuse requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.refuse: Answer = lambda method, path: None
        """Returns the status with which a request is refused; None lets it through."""
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: Any) -> None:
                pass

        app = DomainDispatcherApplication(create_backend_app)

        def guarded(environ: dict[str, Any], start_response: Any) -> Any:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.requests.append(f"{method} {path}")
            if (status := self.refuse(method, path)) is None:
                return app(environ, start_response)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} Refused", [("Content-Length", "0")])
            return [b""]

        self._server = make_server("127.0.0.1", self._port, guarded, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; what it holds is there again after `start`."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def post(self, path: str, body: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", path, body)
        assert connection.getresponse().status == 200
        connection.close()

    def client(self, service: str = "s3") -> Any:
        import boto3

        keys = {"aws_access_key_id": "tests", "aws_secret_access_key": "tests"}
        return boto3.client(service, endpoint_url=self.url, region_name="us-east-1", **keys)


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    """One S3 server for all tests of this process."""
    pytest.importorskip("moto.server", reason="the S3 server of the tests is not there: pip install 'moto[server]'")
    pytest.importorskip("s3fs", reason="pip install s3fs")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The S3 server, with credentials for it in the environment."""
    for name, value in {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3_session.requests.clear()
    yield s3_session
    s3_session.refuse = lambda method, path: None


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """The name of a new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    s3.client().create_bucket(Bucket=name)
    return name


@pytest.fixture
def s3_url(s3: S3Server, bucket: str) -> str:
    """The URL of a new folder of a bucket."""
    return f"s3://{bucket}/team?endpoint_url={s3.url}"


@pytest.fixture(scope="session")
def gcs_session() -> Iterator[str]:
    """The URL of a server with the protocol of Google Cloud Storage."""
    pytest.importorskip("gcsfs", reason="pip install gcsfs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        emulator = pytest.importorskip(
            "gcp_storage_emulator.server", reason="the GCS server is not there: pip install gcp-storage-emulator"
        )
        port = _free_port()
        server = emulator.create_server("127.0.0.1", port, in_memory=True)
        server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def gcs_url(gcs_session: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket."""
    import gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_session)
    name = f"bucket-{uuid.uuid4().hex}"
    gcsfs.GCSFileSystem(token="anon", use_listings_cache=False).mkdir(name)
    return f"gs://{name}/team"


@pytest.fixture(scope="session")
def azure_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an account of Azurite."""
    pytest.importorskip("adlfs", reason="pip install adlfs")
    program = shutil.which(os.environ.get("AZURITE_BLOB") or "azurite-blob")
    if program is None:
        pytest.skip("Azurite is not there: npm install -g azurite, or set AZURITE_BLOB to its azurite-blob")
    port, folder = _free_port(), tmp_path_factory.mktemp("azurite")
    command = [program, "--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--blobPort", str(port)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield f"http://127.0.0.1:{port}/devstoreaccount1"
        finally:
            process.terminate()


def azure_keys(url: str) -> str:
    """Return the connection string of an account of Azurite."""
    return f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={url};"


@pytest.fixture
def azure_section(azure_session: str) -> dict[str, str]:
    """A `checkpoint_storage` section for a new container."""
    import adlfs

    name = f"container-{uuid.uuid4().hex}"
    keys = azure_keys(azure_session)
    adlfs.AzureBlobFileSystem(connection_string=keys, use_listings_cache=False).mkdir(name)
    return {"type": "azure", "container": name, "connection_string": keys}


@pytest.fixture(params=["folder", "memory", "s3", "gcs", "azure"])
def location(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Any:
    """A place for checkpoints, of each kind in turn."""
    match request.param:
        case "folder":
            return (tmp_path / "store").as_uri()
        case "memory":
            return f"memory://{uuid.uuid4().hex}/team"
    return request.getfixturevalue({"s3": "s3_url", "gcs": "gcs_url", "azure": "azure_section"}[request.param])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
