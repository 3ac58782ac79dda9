"""What the training loop and the validation loop cost above plain PyTorch, in instructions per batch.

The work of benchmarks/loop_overhead.py, counted by valgrind instead of timed, which does not depend on what else the
machine does. All threads count. Each figure is a slope between a short and a long run. What goes by the clock, such as
the progress bar, counts for more than elsewhere, since a batch takes many times as long. Takes about six minutes.

    python benchmarks/instructions.py [--batches 1000] [--jobs 2]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SHORT = 100
CONTENDERS = ("plain", "ours")
JOBS = {"training": "train(batches, True)", "validation": "validate(batches)", "two": "train_two(batches, True)"}
VALGRIND = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
PROGRAM = """
import sys
import torch
import {contender}

torch.set_num_threads(1)
batches = {batches}
{contender}.{job}
"""


def count(contender: str, job: str, batches: int) -> int:
    """Return the instructions of a process that does a job."""
    stderr = run(VALGRIND, contender, job, batches)
    found = re.search(r"I +refs: +([\d,]+)", stderr)
    if not found:
        raise SystemExit(f"{contender} could not be counted: {stderr[-2000:]}")
    return int(found[1].replace(",", ""))


def run(prefix: list[str], contender: str, job: str, batches: int) -> str:
    """Return the error output of a process that does a job."""
    program = PROGRAM.format(contender=contender, job=JOBS[job], batches=batches)
    with tempfile.TemporaryDirectory() as home:
        # Of instructions beyond AVX2, valgrind knows none; the hash seed settles the order of sets.
        settings = {"ATEN_CPU_CAPABILITY": "default", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        paths = [str(pathlib.Path(__file__).parent / "_peers"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths), "DET_HOME": home}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [*prefix, sys.executable, "-c", program]
        done = subprocess.run(command, env=environment | {"DET_PROGRESS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contender} could not do {job}: {done.stderr[-2000:]}")
    return done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if not shutil.which("valgrind"):
        print("benchmarks/instructions.py needs valgrind, which is not installed; `apt install valgrind` gets it.")
        return 0
    for job in JOBS:
        for contender in CONTENDERS:
            run([], contender, job, 1)  # writes bytecode: compiling it takes more instructions than all batches
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        counts = {
            (job, contender, batches): pool.submit(count, contender, job, batches)
            for job in JOBS
            for contender in CONTENDERS
            for batches in (SHORT, SHORT + arguments.batches)
        }
        for job in JOBS:
            plain, ours = (
                (counts[job, contender, SHORT + arguments.batches].result() - counts[job, contender, SHORT].result())
                / arguments.batches
                for contender in CONTENDERS
            )
            name = "two optimizers" if job == "two" else job
            print(f"{name}: {plain:,.0f} instructions a batch plain, {ours:,.0f} ours: {ours / plain:.3f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
