"""Upload of a checkpoint to a local S3 server: throughput against s3fs, memory, and how long a save holds up training.

    python benchmarks/object_storage.py [--mb 1024] [--rounds 3]

Needs moto[server] and s3fs. Each upload runs in a process of its own; the two kinds take turns.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

UPLOADS = ("resolute", "s3fs")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=(*UPLOADS, "pause-url", "pause-folder", "imports"))
    options = parser.parse_args()
    if options.child:
        _child(options.child, options.mb)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DET_HOME"] = f"{folder}/home"
        with _server(folder) as server:
            try:
                _compare(options.mb, options.rounds)
            finally:
                server.terminate()


def _server(folder: str) -> subprocess.Popen[bytes]:
    import boto3
    from botocore.config import Config

    keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
    port, os.environ["TMPDIR"] = "5123", folder
    os.environ.update(keys, ENDPOINT=f"http://127.0.0.1:{port}")
    program = "import sys; from moto.server import main; main(sys.argv[1:])"
    server = subprocess.Popen([sys.executable, "-c", program, "-p", port], stderr=subprocess.DEVNULL)
    client = boto3.client("s3", endpoint_url=os.environ["ENDPOINT"], config=Config(retries={"max_attempts": 20}))
    client.create_bucket(Bucket="benchmark")
    return server


def _compare(mb: int, rounds: int) -> None:
    print(f"peak memory of a process that only imports s3fs: {_run('imports', 0)[1]:.0f} MB")
    ratios = []
    for number in range(rounds):
        figures = {kind: _run(kind, mb) for kind in UPLOADS}
        ratios.append(figures["s3fs"][0] / figures["resolute"][0])
        for kind, (seconds, peak) in figures.items():
            print(f"round {number}: {kind:8} {mb / seconds:6.0f} MB/s, peak memory {peak:.0f} MB")
        for kind in ("pause-url", "pause-folder"):
            print(f"round {number}: {kind:12} {_run(kind, mb)[0]:6.2f} s until the program goes on")
    print(f"throughput of resolute over s3fs: {sorted(ratios)[len(ratios) // 2]:.2f} (median)")


def _run(kind: str, mb: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--child", kind, "--mb", str(mb)]
    seconds, peak = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-2:]
    return float(seconds), float(peak)


def _child(kind: str, mb: int) -> None:
    import s3fs

    seconds = 0.0
    if kind == "s3fs":
        files = s3fs.S3FileSystem(endpoint_url=os.environ["ENDPOINT"])
        with tempfile.TemporaryDirectory() as folder:
            path = _fill(pathlib.Path(folder), mb)
            begin = time.perf_counter()
            files.put(str(path), "benchmark/plain")
            seconds = time.perf_counter() - begin
        files.rm("benchmark/plain")
    elif kind != "imports":
        seconds = _save(kind, mb)
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _save(kind: str, mb: int) -> float:
    """Return the seconds from the end of the block to the next line, or until the upload is complete."""
    from determined import storage
    from determined._home import home

    url = f"s3://benchmark/team?endpoint_url={os.environ['ENDPOINT']}"
    store = storage.store_for(None if kind == "pause-folder" else url, home().checkpoints)
    store.begin()
    with store.create("one") as folder:
        _fill(folder, mb)
        begin = time.perf_counter()
    if kind == "resolute":
        begin = time.perf_counter()
        store.wait()
    seconds = time.perf_counter() - begin
    store.wait()
    store.delete("one")
    return seconds


def _fill(folder: pathlib.Path, mb: int) -> pathlib.Path:
    path, piece = folder / "state_dict.pth", os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(mb):
            file.write(piece)
    return path


if __name__ == "__main__":
    main()
