"""Parameters of wrapped optimizers that belong to no wrapped model: saved and restored like weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from determined import pytorch
from determined.errors import InvalidExperimentException
from determined.pytorch import Batch
from saving import change_state, save, state_in, train
from trials import TemperatureTrial, assert_resumes_exactly


@pytest.mark.parametrize("aggregation", [1, 2])
def test_resume_is_exact(aggregation: int) -> None:
    assert_resumes_exactly(TemperatureTrial, 3, 7, aggregation_frequency=aggregation)


def test_resume_is_exact_with_fp32_copies_of_half_weights() -> None:
    class Trial(TemperatureTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.configure_apex_amp(self.model, self.optimizer, opt_level="O2")

    assert_resumes_exactly(Trial, 3, 7)


def test_checkpoint_names_them_by_optimizer_group_and_position() -> None:
    assert list(state_in(save(TemperatureTrial))["free_parameters"]) == ["0.1.0"]


def test_load_trial_restores_them() -> None:
    folder = save(TemperatureTrial)
    trial = pytorch.load_trial_from_checkpoint_path(folder, TemperatureTrial)
    assert trial.temperature == state_in(folder)["free_parameters"]["0.1.0"] != 2.0


def test_checkpoint_without_them_loads_with_a_warning_that_names_them() -> None:
    folder = save(TemperatureTrial)
    change_state(folder, free_parameters=None)
    with pytest.warns(UserWarning, match=r"does not hold .*: parameter 0 of group 1 of optimizer 0 \(shape \(\)\)"):
        train(TemperatureTrial, latest_checkpoint=folder, max_length=Batch(2))


def test_parameter_without_values_is_refused_by_its_shape_and_group() -> None:
    class Trial(TemperatureTrial):
        def make_temperature(self) -> nn.Parameter:
            return nn.Parameter(torch.empty(3, 2, device="meta"))

    with pytest.raises(InvalidExperimentException, match=r"parameter 0 of group 1 of optimizer 0 \(shape \(3, 2\)\)"):
        train(Trial)
