"""An experiment whose trial goes on with the slots that there are."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator

import pytest
from driven import Experiments, config, eventually, experiments

from determined.experiment import control
from determined.experiment.executors import read_logs
from determined.tracking import RunState, Slots

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROGRAM = """
from program import Quick

class Told(Quick):
    def __init__(self, context):
        super().__init__(context)
        print("processes:", context.distributed.size, flush=True)
"""


@pytest.fixture
def lab(tmp_path: pathlib.Path) -> Iterator[Experiments]:
    with experiments(tmp_path) as made:
        (made.code / "elastic.py").write_text(PROGRAM)
        yield made


def test_a_trial_goes_on_with_the_slots_that_are_free(lab: Experiments) -> None:
    searcher = {"name": "single", "metric": "validation_loss", "max_length": {"batches": 40}}
    settings = config(
        entrypoint="elastic:Told",
        searcher=searcher,
        hyperparameters={"seconds": 0.05},
        resources={"slots_per_trial": {"min": 1, "max": 2}},
    )
    id = lab.create(settings, slots=2)
    eventually(lambda: any(trial.steps_completed >= 4 for trial in lab.records.trials(id)))
    control.pause(id, lab.home)
    eventually(lambda: lab.state(id) is RunState.PAUSED)
    with Slots(lab.home.database) as slots:
        eventually(lambda: not slots.held())
        slots.take(99, 99, 1, 2)
        control.activate(id, lab.home, 2)
        assert control.wait(id, 120, lab.home) is RunState.COMPLETED
        slots.release(99)
    lines = [line.text for line in read_logs(lab.home.trial(id, 1))]
    told = [line for line in lines if line.startswith("processes:")]
    assert [line for line, _ in itertools.groupby(told)] == ["processes: 2", "processes: 1"]
    whole = lab.run({**settings, "resources": {"slots_per_trial": 2}}, slots=2)
    changed, unchanged = (lab.records.trials(one)[0] for one in (id, whole))
    assert changed.steps_completed == unchanged.steps_completed == 40
    one, two = (lab.records.metrics(trial.id, "validation")[-1].metrics for trial in (changed, unchanged))
    assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-4)
