"""Runs that a runner started: what they take from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import determined as det
from determined import pytorch, tracking
from determined._home import home
from determined.pytorch import Batch
from trials import LineTrial, assert_same, fit, latest_checkpoint, line_data, records, saved_at, scripted, steps_of

VALIDATION = line_data(8).tensors


def managed_fit(**arguments: Any) -> Any:
    return fit(init={"exp_conf": None}, **({"max_length": None} | arguments))


@pytest.mark.parametrize(
    ("length", "batches"),
    [(5, 5), ({"batches": 4}, 4), ({"epochs": 2}, 12), ({"records": 30}, 3), ({"records": 3}, 1)],
)
def test_managed_length_comes_from_the_searcher(managed: Callable[..., None], length: Any, batches: int) -> None:
    managed({"searcher": {"max_length": length}}, {"global_batch_size": 10})
    assert len(managed_fit().seen) == batches


def test_managed_length_can_be_given(managed: Callable[..., None]) -> None:
    managed({"searcher": {"max_length": 50}})
    assert len(managed_fit(max_length=Batch(2)).seen) == 2


class DividingTrial(LineTrial):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.batch_size = self.context.get_per_slot_batch_size()
        return super().build_training_data_loader()


@pytest.mark.parametrize(("kind", "calls"), [(LineTrial, 2), (DividingTrial, 1)], ids=["fixed", "divided"])
def test_a_batch_of_an_elastic_trial_is_that_of_all_its_slots(
    managed: Callable[..., None], kind: type[LineTrial], calls: int
) -> None:
    config = {"searcher": {"max_length": 4}, "resources": {"slots_per_trial": {"min": 1, "max": 2}}}
    managed(config, {"global_batch_size": 8})
    trial = managed_fit(trial_class=kind)
    expected = [(0, 0), (0, 1), (0, 2), (1, 3)]  # an epoch has 24 samples
    assert trial.seen == [batch for batch in expected for _ in range(calls)]
    assert [one.metrics["batches"] for one in records().metrics(1, "training")] == [4]


def test_leaving_in_the_middle_of_a_batch_trains_it_again(managed: Callable[..., None]) -> None:
    class LeavingTrial(LineTrial):
        leaves = True

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if self.leaves and self.seen.count((0, 1)) == 1:
                raise pytorch.ShouldExit
            return super().train_batch(batch, epoch_idx, batch_idx)

    class StayingTrial(LeavingTrial):
        leaves = False

    managed({"searcher": {"max_length": 4}, "resources": {"slots_per_trial": {"min": 1, "max": 2}}})
    managed_fit(trial_class=LeavingTrial)
    resumed = managed_fit(trial_class=StayingTrial, latest_checkpoint=latest_checkpoint())
    assert resumed.seen[0] == (0, 1)
    managed({"searcher": {"max_length": 4}, "resources": {"slots_per_trial": {"min": 1, "max": 2}}})
    whole = managed_fit(trial_class=StayingTrial)
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


def test_managed_run_takes_hparams_config_seed_and_ids_from_its_runner(managed: Callable[..., None]) -> None:
    managed({"name": "other"}, {})  # so that the ids are not both the first
    managed({"name": "managed", "data": {"path": "x"}}, {"lr": 0.5})
    with pytorch.init(hparams={"lr": 1}, exp_conf={"name": "ignored"}) as context:
        assert context.get_hparams() == {"lr": 0.5}
        assert context.get_experiment_config()["name"] == "managed"
        assert context.get_data_config() == {"path": "x"}
        assert (context.get_trial_seed(), torch.initial_seed()) == (77, 77)
        assert (context.get_experiment_id(), context.get_trial_id()) == (2, 2)


def test_managed_run_reports_into_the_record_of_its_runner(managed: Callable[..., None]) -> None:
    managed({"searcher": {"max_length": 3}})
    managed_fit()
    assert [e.name for e in records().experiments()] == ["managed"]
    assert (steps_of("training"), saved_at()) == ([3], [3])
    assert records().trial(1).state is tracking.RunState.COMPLETED


def test_managed_run_resumes_from_the_checkpoint_it_is_told(managed: Callable[..., None]) -> None:
    managed({"searcher": {"max_length": 5}})
    managed_fit(max_length=Batch(2))
    assert managed_fit(latest_checkpoint=latest_checkpoint()).seen[0] == (0, 2)


def test_managed_run_takes_only_the_weights_of_another_trial(managed: Callable[..., None]) -> None:
    source = fit(max_length=Batch(2))
    managed({"searcher": {"max_length": 5}}, latest_checkpoint=latest_checkpoint())
    info = det.get_cluster_info()
    assert info is not None
    trial = managed_fit(latest_checkpoint=info.latest_checkpoint, step_zero_validation=True)
    assert trial.seen[0] == (0, 0)
    first = records().metrics(2, "validation")[0]
    assert first.steps_completed == 0
    expected = torch.nn.functional.mse_loss(source.model(VALIDATION[0]), VALIDATION[1]).item()
    assert first.metrics["validation_loss"] == pytest.approx(expected)


def test_managed_best_is_the_best_of_the_whole_experiment(managed: Callable[..., None]) -> None:
    managed({"searcher": {"metric": "validation_loss", "max_length": 1}})
    elsewhere = tracking.MetricReport(group="validation", steps_completed=9, metrics={"validation_loss": 0.0}, time=0.0)
    with tracking.TrialWriter.attach(home().database, 1, 1) as recorder:
        recorder.write([elsewhere])
    values = [1.0, 0.5, 2.0]
    assert scripted(values, exp_conf=None)() == [3], "none of them beats the 0.0 of another trial"


@pytest.mark.parametrize("length", [0, True, "5", {"batches": 0}, {"hours": 3}, {"batches": 1, "epochs": 1}])
def test_managed_length_that_makes_no_sense_is_named(managed: Callable[..., None], length: Any) -> None:
    managed({"searcher": {"max_length": length}})
    with pytest.raises(ValueError, match=r"searcher.max_length=.* is not a length; write \{batches: n\}"):
        managed_fit()


def test_managed_records_need_a_global_batch_size(managed: Callable[..., None]) -> None:
    managed({"searcher": {"max_length": {"records": 100}}})
    with pytest.raises(ValueError, match="global_batch_size"):
        managed_fit()


def test_managed_test_mode_is_refused(managed: Callable[..., None]) -> None:
    managed({})
    with pytest.raises(ValueError, match=r"test_mode=True.*local"):
        managed_fit(max_length=Batch(1), test_mode=True)


def test_local_run_does_not_take_its_length_from_the_searcher() -> None:
    with pytest.raises(ValueError, match="max_length"):
        fit(init={"exp_conf": {"searcher": {"max_length": 3}}}, max_length=None)
