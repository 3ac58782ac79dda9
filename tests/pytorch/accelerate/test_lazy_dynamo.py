"""torch's compiler is loaded when somebody compiles, and then it is as it always was."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable

import pytest

Run = Callable[..., str]

PRELUDE = """
import sys
import torch
from determined import pytorch
from determined.pytorch._accelerate.lazy_dynamo import defer_compiler

def is_loaded():
    return "torch._dynamo.eval_frame" in sys.modules
"""


@pytest.fixture
def run(run_program: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """Runs a program in a process that has loaded no compiler yet, and returns the last line that it prints."""

    def run(program: str, **variables: str) -> str:
        done = run_program(PRELUDE + textwrap.dedent(program), **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run


WHOLE_RUN = """
from saving import save
from trials import LineTrial, fit

class Trial(LineTrial):
    def __init__(self, context):
        super().__init__(context)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        clip = lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)
        return {"loss": loss}

checkpoint = save(Trial)
resumed = fit(Trial, max_length=pytorch.Batch(9), validation_period=pytorch.Batch(3), latest_checkpoint=checkpoint)
print(is_loaded(), resumed.model.weight.tolist())
"""


def test_a_run_does_without_the_compiler_and_trains_the_same(run: Run) -> None:
    without, with_it = run(WHOLE_RUN), run(WHOLE_RUN, DET_LAZY_COMPILER="0")
    assert without.startswith("False")
    assert with_it.startswith("True")
    assert without.removeprefix("False") == with_it.removeprefix("True")


USES = [
    "import torch._dynamo.config; torch._dynamo.config.suppress_errors",
    "from torch._dynamo import optimize",
    "import torch._dynamo; torch._dynamo.reset()",
    "torch._dynamo.something = 1; assert torch._dynamo.something == 1; del torch._dynamo.something",
    "assert 'optimize' in dir(torch._dynamo)",
    "assert torch._dynamo.disable(len)([1]) == 1",
    "assert torch._dynamo.disable()(abs)(-1) == 1",
    "held = torch._dynamo; held.reset(); assert held.disable is torch._dynamo.disable",
]


def test_whoever_wants_more_of_the_compiler_gets_it(run: Run) -> None:
    program = f"""
        import os
        defer_compiler()
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        assert not is_loaded()
        failed = []
        for use in {USES!r}:
            if child := os.fork():
                if os.waitpid(child, 0)[1]:
                    failed.append(use)
                continue
            exec(use)
            assert is_loaded()
            assert type(sys.modules["torch._dynamo"]).__name__ == "module"
            assert torch._dynamo is sys.modules["torch._dynamo"]
            os._exit(0)
        print(failed)
    """
    assert run(program) == "[]"


def test_looking_at_all_modules_loads_nothing(run: Run) -> None:
    program = """
        import inspect
        defer_compiler()
        inspect.getmodule(run_me := lambda: None)
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        import torch._dynamo
        print(is_loaded(), repr(torch._dynamo).startswith("<module 'torch._dynamo' from"))
    """
    assert run(program) == "False True"


COMPILED_STEP = """
if LATER:
    defer_compiler()
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
optimizer = torch.optim.AdamW(model.parameters())

def step():
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()

step()
assert is_loaded() is not LATER
found = torch._dynamo.explain(step)()
torch._dynamo.reset()
for _ in range(3):
    torch.compile(step, backend="eager")()
print(found.graph_count, found.graph_break_count, model.weight.tolist())
"""


def test_what_is_compiled_afterwards_is_compiled_as_ever(run: Run) -> None:
    assert run("LATER = True\n" + COMPILED_STEP) == run("LATER = False\n" + COMPILED_STEP)


def test_several_threads_may_want_it_at_once(run: Run) -> None:
    program = """
        import threading
        defer_compiler()
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        stand_in, found = torch._dynamo, []
        threads = [threading.Thread(target=lambda: found.append(stand_in.optimize)) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(len(found), len(set(found)))
    """
    assert run(program) == "4 1"


def test_a_compiler_that_is_there_already_stays(run: Run) -> None:
    program = """
        import torch._dynamo
        before = torch._dynamo
        defer_compiler()
        print(torch._dynamo is before is sys.modules["torch._dynamo"])
    """
    assert run(program) == "True"


def test_a_compiler_that_cannot_be_loaded_says_so_each_time(run: Run) -> None:
    program = """
        defer_compiler()
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        sys.modules["torch._dynamo.aot_compile"] = sys.modules["torch._dynamo.eval_frame"] = None
        stand_in, reasons = torch._dynamo, []
        for _ in range(2):
            try:
                stand_in.optimize
            except ImportError as error:
                reasons.append(type(error).__name__)
        print(reasons)
    """
    assert run(program) == "['ModuleNotFoundError', 'ModuleNotFoundError']"
