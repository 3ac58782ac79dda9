"""Every test gets folders of its own, one compute thread and an environment that no other test can see."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

import forking
import postgres_server
from hosts import Hosts, connected
from slurm import Slurm, running

pytest_plugins = ["object_servers"]

# Read when torch, NumPy and their libraries are loaded, so set before any test module imports them;
# programs that tests start inherit them.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

# In memory where there is room: tests write through to the disk many thousand times.
if "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30:
    tempfile.tempdir = os.environ["TMPDIR"] = "/dev/shm"

# A shell starts what it runs in the background deaf to Ctrl-C, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Checkpoints hold the program's files: what git tracks around it. Here that would be the whole repository, each time.
os.environ["GIT_CEILING_DIRECTORIES"] = str(pathlib.Path(__file__).resolve().parents[1])

# What a launcher or a runner would tell a training process.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

settings.register_profile("suite", deadline=None, max_examples=30)  # a loaded machine is no reason to fail
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.register_profile("torture", deadline=1000, max_examples=10_000)
settings.load_profile("suite")

USES_SERVER = os.environ.get("DET_TEST_DATABASE") == "postgresql"
"""Whether each test shall use a PostgreSQL database of its own where it would use the file in its home folder."""


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of this session's own, in which fixtures that several tests share work as well."""
    folder = tmp_path_factory.mktemp("session")
    os.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def matplotlib_folder(session_folder: pathlib.Path) -> pathlib.Path:
    """One font cache for all tests: making it takes seconds."""
    return session_folder / "matplotlib"


@pytest.fixture(scope="session")
def postgresql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL server that all tests of this session share."""
    own = tmp_path_factory.getbasetemp()
    with postgres_server.shared(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) as url:
        yield url


@pytest.fixture
def postgresql_database(postgresql_server: str) -> Iterator[str]:
    """The URL of a new, empty database on a PostgreSQL server."""
    with postgres_server.database(postgresql_server) as url:
        yield url


@pytest.fixture(scope="module")
def module_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """What DET_DATABASE is for a home folder that the tests of a module share."""
    if USES_SERVER:
        with postgres_server.database(request.getfixturevalue("postgresql_server")) as url:
            yield url
    else:
        yield ""


@pytest.fixture
def on_a_file() -> None:
    """For tests of what SQLite files do, which have nothing to say of a server."""
    if "DET_DATABASE" in os.environ:
        pytest.skip("this is about SQLite files, not about the server that DET_TEST_DATABASE asks for")


@pytest.fixture(autouse=True)
def own_environment(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    session_folder: pathlib.Path,
    matplotlib_folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Give the test its own home folders and a working folder, and fail it if it wrote into the user's home."""
    user = pathlib.Path(tempfile.mkdtemp(prefix="user-", dir=session_folder))
    monkeypatch.chdir(user)
    for variable in [name for name in os.environ if name.startswith("DET_")]:
        monkeypatch.delenv(variable)
    for variable in (*LAUNCHER_VARIABLES, "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.setenv("MPLCONFIGDIR", str(matplotlib_folder))
    monkeypatch.setenv("DET_HOME", str(tmp_path / "det-home"))
    monkeypatch.setenv("DET_PROGRESS", "0")
    if USES_SERVER:
        monkeypatch.setenv("DET_DATABASE", request.getfixturevalue("postgresql_database"))
    _use_one_torch_thread()
    yield
    caches = (".cache", ".nv", ".triton")  # the last two are of compilers for GPUs
    leaked = sorted(path.name for path in user.iterdir() if path.name not in caches)
    assert not leaked, f"the test wrote {leaked} into the user's home folder; it belongs under DET_HOME"
    shutil.rmtree(user, ignore_errors=True)  # a process that outlives the test may still write there


@pytest.fixture
def run_program(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python program in a process of its own, with the test's home folder."""

    def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": forking.PYTHONPATH, **variables}
        return forking.run(["-W", "always", "-c", program], env=env, cwd=tmp_path, capture_output=True, timeout=120)

    return run


@pytest.fixture
def run_in_new_interpreter(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python program as `run_program` does, in an interpreter that has imported nothing."""

    def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "always", "-c", program]
        env = {**os.environ, "PYTHONPATH": forking.PYTHONPATH, **variables}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that makes the test's process a managed one: it trains a trial that a runner has recorded."""
    import determined as det
    from determined._home import home
    from managed import record_trial

    def start(config: dict[str, Any], hparams: dict[str, Any] | None = None, **info: Any) -> det.ClusterInfo:
        told = det.ClusterInfo(trial=record_trial(home().database, config, hparams or {}), **info)
        for name, value in told.to_environment().items():
            monkeypatch.setenv(name, value)
        return told

    return start


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two machines with a cable between them."""
    with connected() as made:
        yield made


@pytest.fixture(scope="session")
def slurm_of_session() -> Iterator[Slurm]:
    """A Slurm that several tests share, since jobs of one do not harm those of others."""
    with running() as made:
        yield made


@pytest.fixture
def slurm(slurm_of_session: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A real Slurm, which the commands of this process and its children find."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_of_session.config))
    return slurm_of_session


def _use_one_torch_thread() -> None:
    # Tests that need no torch must not pay for importing it.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
