"""Which validations are saved."""

from __future__ import annotations

import math

import pytest

import trials
from determined.pytorch import Batch
from trials import ScriptedTrial, fit, latest_checkpoint, saved_at, scripted


def test_best_saves_improvements_and_the_end() -> None:
    assert scripted([3.0, 2.0, 2.5, 1.0, 1.0, 4.0])() == [1, 2, 4, 6]


def test_all_saves_every_validation() -> None:
    assert scripted([3.0, 4.0, 5.0])(checkpoint_policy="all") == [1, 2, 3]


def test_none_saves_the_end_alone() -> None:
    assert scripted([3.0, 2.0, 1.0])(checkpoint_policy="none") == [3]


def test_best_is_the_default() -> None:
    with trials.trainer() as (trainer, _):
        trainer.fit(max_length=Batch(3), validation_period=Batch(1))
    assert saved_at() == [1, 2, 3]


def test_best_by_the_searcher_of_the_config() -> None:
    searcher = {"metric": "accuracy", "smaller_is_better": False}
    values = [{"accuracy": a, "validation_loss": -a} for a in (0.5, 0.4, 0.6, 0.1)]
    assert scripted(values, exp_conf={"searcher": searcher})() == [1, 3, 4]


def test_searchers_metric_is_smaller_is_better_unless_told() -> None:
    values = [{"error": e, "validation_loss": -e} for e in (0.5, 0.6, 0.4, 0.9)]
    assert scripted(values, exp_conf={"searcher": {"metric": "error"}})() == [1, 3, 4]


def test_best_metric_of_fit() -> None:
    values = [{"a": a, "b": -a} for a in (1, 3, 2, 0)]
    assert scripted(values)(best_metric="a", smaller_is_better=False) == [1, 2, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(bad: float) -> None:
    assert scripted([bad, 2.0, bad, 1.0, bad])() == [2, 4, 5]


def test_best_of_several_scalars_is_the_loss_by_its_usual_name() -> None:
    values = [{"accuracy": -x, "val_loss": x} for x in (2.0, 3.0, 1.0, 5.0)]
    assert scripted(values)() == [1, 3, 4]


@pytest.mark.parametrize("name", ["accuracy", "val_PSNR", "ndcg@10", "mAP50", "f1Score", "rocAUC", "top-5"])
def test_best_of_one_score_is_the_largest(name: str) -> None:
    assert scripted([{name: a} for a in (0.5, 0.4, 0.6, 0.1)])() == [1, 3, 4]


@pytest.mark.parametrize("name", ["dice_loss", "IoULoss", "brier_score", "top1_error", "val_mse", "WER"])
def test_best_of_one_loss_is_the_smallest_whatever_other_words_are_in_its_name(name: str) -> None:
    assert scripted([{name: a} for a in (0.5, 0.6, 0.4, 0.9)])() == [1, 3, 4]


@pytest.mark.parametrize("name", ["whatever", "lossy", "accumulated", "neg_mean_squared_error"])
def test_where_a_name_does_not_tell_the_direction_every_validation_is_saved(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert scripted([{name: 2.0}, {name: 3.0}, {name: 1.0}])() == [1, 2, 3]
    (warning,) = caplog.messages
    assert f"does not know whether a smaller or a larger {name!r} is better" in warning
    assert "smaller_is_better=..." in warning


def test_named_metric_that_does_not_tell_the_direction_is_not_guessed_either() -> None:
    values = [{"a": x, "b": 0.0} for x in (2.0, 3.0, 1.0)]
    assert scripted(values)(best_metric="a") == [1, 2, 3]


def test_metric_that_nobody_named_is_not_best_where_it_is_no_number() -> None:
    assert scripted([2.0, "lost", 1.0, 3.0])() == [1, 3, 4]


def test_what_fit_says_of_the_direction_goes_before_the_name() -> None:
    values = [{"accuracy": a} for a in (0.5, 0.4, 0.6, 0.9)]
    assert scripted(values)(smaller_is_better=True) == [1, 2, 4]


def test_chosen_metric_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    scripted([2.0, 1.0, 3.0])()
    said = [line for line in capsys.readouterr().out.splitlines() if "The best checkpoint" in line]
    assert len(said) == 1
    assert said[0].endswith("The best checkpoint is the one with the smallest validation_loss.")


def test_where_nothing_says_what_to_compare_every_validation_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    assert scripted([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 3.0}, {"a": 2.0, "b": 3.0}])() == [1, 2, 3]
    assert [m.partition(";")[0] for m in caplog.messages] == [
        "checkpoint_policy='best' does not know which of the validation metrics ['a', 'b'] to "
        "compare, so every validation is followed by a checkpoint"
    ]


def test_missing_searcher_metric_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'accuracy'.*not among .*'a'"):
        scripted([{"a": 1.0}], exp_conf={"searcher": {"metric": "accuracy"}})()


@pytest.mark.parametrize("policy", ["best", "all", "none"])
@pytest.mark.parametrize("value", ["good", {"a": 1.0}, [[1.0], [1.0, 2.0]]], ids=["string", "mapping", "ragged"])
def test_searcher_metric_that_is_no_number_is_an_error_under_every_policy(policy: str, value: object) -> None:
    run = scripted([{"grade": value}], exp_conf={"searcher": {"metric": "grade"}})
    with pytest.raises(RuntimeError, match=r"'grade'.*(good|'a': 1.0|1.0, 2.0).*not a number"):
        run(checkpoint_policy=policy)


def test_list_of_numbers_can_be_compared_by_its_mean() -> None:
    values = [{"grade": [x, x + 2]} for x in (3.0, 1.0, 2.0, 5.0)]
    assert scripted(values, exp_conf={"searcher": {"metric": "grade"}})() == [1, 2, 4]


def test_best_survives_a_resume() -> None:
    assert scripted([1.0])() == [1]

    class Later(ScriptedTrial):
        values = [2.0, 0.5, 3.0]

    fit(
        Later,
        max_length=Batch(4),
        validation_period=Batch(1),
        checkpoint_policy="best",
        latest_checkpoint=latest_checkpoint(),
    )
    assert saved_at(2) == [3, 4]
