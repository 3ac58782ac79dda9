"""Trial classes as runs, forked from a forkserver."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from executor_runs import CONFIG, SOURCES, TRIAL, Runs, lives

from cases import every
from determined.experiment.executors import EndReason

pytestmark = pytest.mark.process

ENDLESS = {"searcher": CONFIG["searcher"] | {"max_length": {"batches": 10**9}}}


def write(runs: Runs, more: str = "", before: str = "") -> None:
    """Write the program, with lines of its own before and after the trial."""
    runs.write(f"{before}\n{TRIAL}\n{more}")


def steps(runs: Runs, trial_id: int, group: str) -> list[int]:
    return [report.steps_completed for report in runs.records().metrics(trial_id, group)]


def test_trial_is_trained_recorded_and_saved(runs: Runs) -> None:
    write(runs)
    spec = runs.trial()
    ended = runs.run(spec)
    assert (ended.reason, ended.status, ended.message) == (EndReason.COMPLETED, 0, "")
    assert steps(runs, spec.trial_id, "validation") == [2]
    (checkpoint,) = runs.records().checkpoints(trial_id=spec.trial_id)
    assert checkpoint.steps_completed == 2


def test_checkpoint_holds_the_program_and_no_library(runs: Runs) -> None:
    write(runs, before="import helper")
    runs.write("", "helper.py")
    spec = runs.trial()
    runs.run(spec)
    (checkpoint,) = runs.records().checkpoints(trial_id=spec.trial_id)
    code = pathlib.Path(checkpoint.path, "code")
    assert {path.relative_to(code).as_posix() for path in code.rglob("*.py")} == {"model_def.py", "helper.py"}


def test_output_is_stored_by_stream(runs: Runs) -> None:
    write(runs, "import sys; print('for people'); print('for errors', file=sys.stderr); sys.stdout.write('no end')")
    spec = runs.trial()
    runs.run(spec)
    found = {line.text: (line.rank, line.stream) for line in runs.lines(spec)}
    assert found["for people"] == (0, "stdout")
    assert found["for errors"] == (0, "stderr")


# Facts that a trial sees when its module is imported.
PROBE = """
import json, multiprocessing, os, random, signal, sys, threading
import numpy, torch

main = sys.modules["__main__"]
with open("/proc/self/status") as status:
    mask = next(line for line in status if line.startswith("SigBlk")).split()[1]
print("FACTS", json.dumps({
    "folder": os.getcwd(),
    "path": sys.path,
    "argv": sys.argv,
    "main": [main.__name__, main.__spec__.name],
    "variables": dict(os.environ),
    "files": sorted(os.listdir("/proc/self/fd")),
    "stdin": os.readlink("/proc/self/fd/0"),
    "threads": [len(os.listdir("/proc/self/task")), threading.active_count()],
    "cuda": torch.cuda.is_initialized(),
    "compute": torch.get_num_threads(),
    "handlers": [signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM)],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": int(mask, 16),
    "wakeup": signal.set_wakeup_fd(-1),
    "umask": [old := os.umask(0), os.umask(old)][0],
    "session": os.getsid(0),
    "group": [os.getpgid(0), os.getpid()],
    "parent": os.getppid(),
    "random": [random.random(), numpy.random.rand()],
    "torch": [torch.initial_seed(), torch.rand(1).item()],
    "process": multiprocessing.current_process().name,
    "modules": [name for name in sys.modules if name.startswith("own_")],
}))
"""


def facts_of(runs: Runs, **changes: Any) -> dict[str, Any]:
    write(runs, before=PROBE + "\nimport own_module")
    runs.write("", "own_module.py")
    spec = runs.trial(**changes)
    runs.run(spec)
    (line,) = (line for line in runs.text(spec).splitlines() if line.startswith("FACTS"))
    return {"spec": spec, **json.loads(line.removeprefix("FACTS "))}


def test_trial_is_in_the_code_folder(runs: Runs) -> None:
    facts = facts_of(runs)
    assert facts["folder"] == facts["path"][0] == str(runs.code)
    assert "" not in facts["path"]


def test_trial_is_the_program_of_its_process(runs: Runs) -> None:
    facts = facts_of(runs)
    assert facts["main"] == ["__main__", "determined.launch._harness"]
    assert facts["argv"][1:] == ["--trial", "model_def:Trial"]
    assert facts["process"] == "MainProcess"


def test_trial_has_the_environment_of_its_run_alone(runs: Runs) -> None:
    variables = facts_of(runs, environment={"DET_OWN": "x"}, placement={"gpus": []})["variables"]
    assert (variables["DET_OWN"], variables["CUDA_VISIBLE_DEVICES"], variables["PYTHONUNBUFFERED"]) == ("x", "", "1")
    assert not {"DET_FORKSERVER", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & variables.keys()


def test_trial_has_nothing_open_but_its_output(runs: Runs) -> None:
    # Beside the three: the listing itself.
    assert facts_of(runs)["files"] == ["0", "1", "2", "3"]


def test_trial_reads_nothing(runs: Runs) -> None:
    assert facts_of(runs)["stdin"] == "/dev/null"


def test_trial_starts_with_one_thread_and_without_cuda(runs: Runs) -> None:
    facts = facts_of(runs)
    assert (facts["threads"], facts["cuda"]) == ([1, 1], False)


@pytest.mark.thorough
def test_nothing_that_is_imported_ahead_asks_for_gpus() -> None:
    # Which would leave a driver behind that no fork survives.
    program = """
import torch
asked = []
for name in ("is_available", "device_count", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
import determined.launch._harness
print(asked)
"""
    variables = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_trial_computes_with_the_threads_it_is_given(runs: Runs) -> None:
    assert facts_of(runs)["compute"] == 1


def test_variables_that_matter_when_libraries_are_loaded_do(own_runs: Runs) -> None:
    own_runs.write("HERE = 'found from the code folder'", "lib/extra.py")
    write(own_runs, before="import extra, torch; print(extra.HERE, torch.get_num_threads(), hash('text'))")
    variables = {"PYTHONPATH": "lib", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "0"}
    spec = own_runs.trial(environment=variables, placement={"threads": 1})
    assert own_runs.run(spec).reason is EndReason.COMPLETED, own_runs.text(spec)
    hashed = subprocess.run(
        [sys.executable, "-c", "print(hash('text'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True
    ).stdout
    assert own_runs.text(spec).splitlines()[0] == f"found from the code folder 2 {hashed.strip()}"


def test_trial_gets_signals_as_a_new_process_does(runs: Runs) -> None:
    facts = facts_of(runs)
    assert facts["handlers"] == [0] * 4
    assert (facts["interrupt"], facts["blocked"], facts["wakeup"]) == (True, 0, -1)


def test_trial_has_a_session_and_a_group_of_its_own(runs: Runs) -> None:
    facts = facts_of(runs)
    group, pid = facts["group"]
    assert group == pid
    assert facts["session"] == facts["parent"] == json.loads(facts["spec"].files.shim.read_text())["pid"]


def test_trial_keeps_the_umask(runs: Runs) -> None:
    before = os.umask(0o22)
    os.umask(before)
    assert facts_of(runs)["umask"] == before


def test_trials_draw_numbers_of_their_own(runs: Runs) -> None:
    first, second = facts_of(runs), facts_of(runs)
    assert all(a != b for a, b in zip(first["random"], second["random"], strict=True))
    assert first["torch"] == second["torch"]  # as in every new process


def test_trial_imports_its_own_snapshot(runs: Runs) -> None:
    assert facts_of(runs)["modules"] == []
    other = runs.folder / "other"
    other.mkdir()
    (other / "model_def.py").write_text(TRIAL + "\nprint('the other one')")
    spec = runs.trial(code=other)
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert "the other one" in runs.text(spec)


@pytest.mark.thorough
def test_module_that_takes_the_place_of_a_library_does_so(runs: Runs) -> None:
    runs.write("SHOWN = 'ours'", "cProfile.py")
    write(runs, before="import sys, cProfile; print(cProfile.SHOWN, sys.argv)")
    spec = runs.trial()
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert "ours" in runs.text(spec)


def test_process_ends_as_a_program_does(runs: Runs) -> None:
    write(
        runs,
        """
import atexit, ctypes, threading, time
threading.Thread(target=lambda: (time.sleep(2), print("thread awaited"))).start()
atexit.register(print, "exit called")
atexit.register(ctypes.CDLL(None).printf, b"printed in C\\n")
""",
    )
    spec = runs.trial()
    assert runs.run(spec).reason is EndReason.COMPLETED
    for text in ("thread awaited", "exit called", "printed in C"):
        assert text in runs.text(spec)


def test_program_that_leaves_has_its_status(runs: Runs) -> None:
    write(runs, "class Leaves(Trial):\n    def begin(self):\n        raise SystemExit('enough')")
    ended = runs.run(runs.trial("model_def:Leaves"))
    assert (ended.reason, ended.status, ended.message) == (EndReason.FAILED, 1, "enough")


def test_traceback_begins_with_the_training(runs: Runs) -> None:
    write(runs, "class Fails(Trial):\n    def begin(self):\n        raise ValueError('too wide')")
    spec = runs.trial("model_def:Fails")
    ended = runs.run(spec)
    assert (ended.reason, ended.status, ended.message) == (EndReason.FAILED, 1, "ValueError: too wide")
    written = runs.text(spec)
    assert "executors" not in written
    assert written.startswith("Traceback (most recent call last):\n  File ")
    assert "raise ValueError('too wide')" in written


def test_hook_of_the_program_shows_errors(runs: Runs) -> None:
    hook = "import sys; sys.excepthook = lambda kind, error, trace: print('shown by the program:', error)"
    write(runs, f"{hook}\nclass Fails(Trial):\n    def begin(self):\n        raise ValueError('too wide')")
    spec = runs.trial("model_def:Fails")
    assert runs.run(spec).status == 1
    assert "shown by the program: too wide" in runs.text(spec)


def test_interrupted_program_dies_of_the_signal(runs: Runs) -> None:
    write(runs, "class Stops(Trial):\n    def begin(self):\n        raise KeyboardInterrupt")
    ended = runs.run(runs.trial("model_def:Stops"))
    assert (ended.reason, ended.status) == (EndReason.FAILED, 130)


def test_invalid_hyperparameters(runs: Runs) -> None:
    write(runs, "class Gives(Trial):\n    def begin(self):\n        raise det.InvalidHP('no such width')")
    ended = runs.run(runs.trial("model_def:Gives"))
    assert (ended.reason, ended.status, ended.message) == (EndReason.INVALID_HP, 0, "no such width")


@pytest.mark.parametrize(
    ("entrypoint", "more", "said"),
    [
        ("modle_def:Trial", "", "ModuleNotFoundError: --trial modle_def:Trial: there is no module 'modle_def'"),
        ("model_def:Trail", "", "AttributeError: --trial model_def:Trail: there is no 'Trail'"),
        ("model_def:NAME", "NAME = 3", "TypeError: --trial model_def:NAME: 3 is not a subclass"),
        ("model_def:Trial", "def (", "SyntaxError: invalid syntax"),
        ("model_def:Trial", "import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("model_def:Trial", "import boto3.no_such", "pip install 'resolute[determined]'"),
    ],
)
def test_class_that_cannot_be_had_is_not_started(entrypoint: str, more: str, said: str, runs: Runs) -> None:
    write(runs, more)
    spec = runs.trial(entrypoint)
    ended = runs.run(spec)
    assert ended.reason is EndReason.NOT_STARTED
    assert said in ended.message
    assert said in runs.text(spec)


def test_stopped_trial_goes_on_from_its_checkpoint(runs: Runs) -> None:
    write(runs)
    spec = runs.start(runs.trial(config=ENDLESS | {"scheduling_unit": 1}))
    runs.await_text(spec, "batch 3/")
    runs.executor.stop(spec.trial_id)
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.STOPPED, 143)
    (checkpoint,) = runs.records().checkpoints(trial_id=spec.trial_id)
    done = checkpoint.steps_completed
    config = {"searcher": CONFIG["searcher"] | {"max_length": {"batches": done + 2}}, "scheduling_unit": 1}
    again = runs.trial(trial_id=spec.trial_id, run_id=2, config=config, latest_checkpoint=checkpoint.uuid)
    assert runs.run(again).reason is EndReason.COMPLETED
    assert steps(runs, spec.trial_id, "training")[-2:] == [done + 1, done + 2]
    assert {line.run for line in runs.lines(again)} == {1, 2}


def test_killed_trial_has_failed(runs: Runs) -> None:
    write(runs)
    spec = runs.start(runs.trial(config=ENDLESS | {"scheduling_unit": 1}))
    runs.await_text(spec, "batch 1/")
    runs.rank(spec).kill()
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.FAILED, 137)
    assert "memory runs out" in ended.message


@pytest.mark.parametrize("context", every(2, ["fork", "spawn"]))
def test_trial_has_loader_workers(context: str, runs: Runs) -> None:
    write(runs, f"class Loads(Trial):\n    loader = dict(num_workers=1, multiprocessing_context={context!r})")
    spec = runs.trial("model_def:Loads")
    ended = runs.run(spec)
    assert ended.reason is EndReason.COMPLETED, runs.text(spec)


def test_loader_workers_are_gone_with_the_shim(runs: Runs) -> None:
    write(runs, "class Loads(Trial):\n    loader = dict(num_workers=2)")
    spec = runs.start(runs.trial("model_def:Loads", config=ENDLESS | {"scheduling_unit": 1}))
    runs.await_text(spec, "batch 1/")
    rank = runs.rank(spec)
    workers = rank.children()
    assert len(workers) >= 2
    runs.shim(spec).kill()
    assert runs.end(spec).reason is EndReason.KILLED
    assert not any(lives(process.pid) for process in (rank, *workers))


def test_two_ranks_train_together(runs: Runs) -> None:
    write(runs, "print('rank', __import__('os').environ['RANK'])")
    spec = runs.trial(ranks=2, slot_ids=[0, 1])
    ended = runs.run(spec)
    assert (ended.reason, ended.status) == (EndReason.COMPLETED, 0), runs.text(spec)
    said = {line.rank: line.text for line in runs.lines(spec) if line.text.startswith("rank")}
    assert said == {0: "rank 0", 1: "rank 1"}
    assert steps(runs, spec.trial_id, "validation") == [2]


def test_failure_of_one_rank_is_told(runs: Runs) -> None:
    write(
        runs,
        """
class Fails(Trial):
    def begin(self):
        if self.context.distributed.rank == 1:
            raise ValueError("on one rank only")
""",
    )
    ended = runs.run(runs.trial("model_def:Fails", ranks=2, slot_ids=[0, 1]))
    assert (ended.reason, ended.message) == (EndReason.FAILED, "rank 1: ValueError: on one rank only")


@pytest.mark.thorough
def test_rank_that_is_frozen_after_the_training_is_ended_and_named(runs: Runs) -> None:
    write(
        runs,
        """
import os
import signal

class Freezes(Trial):
    def build_callbacks(self):
        class Callback(pytorch.PyTorchCallback):
            def on_trial_shutdown(self):
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGSTOP)

        return {"freezes": Callback()}
""",
    )
    short = {"grace_period": 1.0, "environment": {"DET_DISTRIBUTED_TIMEOUT": "5"}}
    ended = runs.run(runs.trial("model_def:Freezes", ranks=2, slot_ids=[0, 1], **short))
    assert ended.reason is EndReason.FAILED
    assert ended.message.startswith("rank 1: it did not end within 5 s after another rank had")


def test_invalid_hyperparameters_on_one_rank(runs: Runs) -> None:
    write(
        runs,
        """
class Gives(Trial):
    def begin(self):
        if self.context.distributed.rank == 1:
            raise det.InvalidHP("too wide")
""",
    )
    ended = runs.run(runs.trial("model_def:Gives", ranks=2, slot_ids=[0, 1]))
    assert (ended.reason, ended.message) == (EndReason.INVALID_HP, "too wide")


def test_killed_rank_ends_all(runs: Runs) -> None:
    write(runs)
    spec = runs.start(runs.trial(ranks=2, slot_ids=[0, 1], config=ENDLESS | {"scheduling_unit": 1}))
    runs.await_text(spec, "batch 1/")
    runs.rank(spec, 1).kill()
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.FAILED, 137)
    assert ended.message.startswith("rank 1: it was killed by SIGKILL")


def test_two_ranks_stop_together(runs: Runs) -> None:
    write(runs)
    spec = runs.start(runs.trial(ranks=2, slot_ids=[0, 1], config=ENDLESS | {"scheduling_unit": 1}))
    runs.await_text(spec, "batch 1/")
    runs.executor.stop(spec.trial_id)
    assert runs.end(spec).reason is EndReason.STOPPED
    assert len(runs.records().checkpoints(trial_id=spec.trial_id)) == 1


def test_script_starts_a_rank_for_each_slot(runs: Runs) -> None:
    runs.write("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])", "train.py")
    spec = runs.trial(f"{sys.executable} -m determined.launch.torch_distributed train.py", ranks=2, slot_ids=[4, 5])
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert sorted(runs.text(spec).splitlines()) == ["[rank=0] rank 0 of 2", "[rank=1] rank 1 of 2"]


def test_trial_goes_on_without_the_forkserver(runs: Runs) -> None:
    write(runs)
    spec = runs.start(runs.trial(config=ENDLESS | {"scheduling_unit": 1}))
    runs.await_text(spec, "batch 1/")
    runs.server(spec).kill()
    runs.executor.stop(spec.trial_id)
    ended = runs.end(spec)
    assert (ended.reason, ended.status) == (EndReason.STOPPED, 143)
    assert len(runs.records().checkpoints(trial_id=spec.trial_id)) == 1
