"""Mistakes in what a trial brings, returns and asks: data, metrics, callbacks, reducers, questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from determined import errors, pytorch
from determined.pytorch import PyTorchTrialContext
from mistakes import LineTrial, Mistake, Mistakes, Unsized, check, in_context, train, variant
from trials import line_data, trainer

mistake = Mistakes()


# Data


def no_data(self: Any) -> pytorch.DataLoader:
    return pytorch.DataLoader(line_data(3), batch_size=4, drop_last=True)


@mistake(ValueError, "no batches", "batch_size is 4", "drop_last is True", "smaller batch size")
def empty_training_loader() -> None:
    train(variant(build_training_data_loader=no_data))


@mistake(RuntimeError, "validation data loader has no batches", "check", "drop_last")
def empty_validation_loader() -> None:
    train(variant(build_validation_data_loader=no_data))


@mistake(ValueError, "no batch in a whole pass", "not empty")
def empty_iterable_training_data() -> None:
    train(variant(build_training_data_loader=lambda self: pytorch.DataLoader(Unsized(0))))


@mistake(RuntimeError, "validation data loader has no batches", "check", trains=True)
def empty_iterable_validation_data() -> None:
    train(variant(build_validation_data_loader=lambda self: pytorch.DataLoader(Unsized(0))))


def torch_loader(self: Any) -> Any:
    return torch.utils.data.DataLoader(line_data(8), batch_size=4)


@mistake(
    RuntimeError,
    "build_training_data_loader()",
    "determined.pytorch.DataLoader",
    "disable_dataset_reproducibility_checks()",
)
def bare_torch_loader() -> None:
    train(variant(build_training_data_loader=torch_loader))


@mistake(RuntimeError, "build_validation_data_loader()", "NoneType", "determined.pytorch.DataLoader")
def forgotten_return_of_the_loader() -> None:
    train(variant(build_validation_data_loader=lambda self: None))


@mistake(ValueError, "batch_size=None", "single samples", "batch_size=1")
def loader_without_batches() -> None:
    train(variant(build_training_data_loader=lambda self: pytorch.DataLoader(line_data(8), batch_size=None)))


# Metrics


def returning(method: str, *values: Any) -> type[LineTrial]:
    """A trial whose method returns these, one after another."""
    left = list(values)
    return variant(**{method: lambda self, *args: left.pop(0)})


@mistake(TypeError, "train_batch() returned 0.5", "loss tensor or a dict", '{"loss": loss}')
def training_metrics_as_number() -> None:
    train(returning("train_batch", 0.5))


@mistake(TypeError, "evaluate_batch() returned None", "dict of metrics", '{"validation_loss": loss}', trains=True)
def validation_without_metrics() -> None:
    train(returning("evaluate_batch", None))


@mistake(TypeError, "evaluate_batch() returned None", "dict of metrics", trains=True)
def validation_without_metrics_in_the_second_batch() -> None:
    train(returning("evaluate_batch", {"a": 1.0}, None))


@mistake(ValueError, "['b']", "batch 1", "['a']", "same names for every batch", trains=True)
def validation_metric_names_that_change() -> None:
    train(returning("evaluate_batch", {"a": 1.0}, {"b": 1.0}))


def add_a_name(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    metrics: dict[str, Any] = self.__dict__.setdefault("metrics", {})
    metrics[f"m{batch_idx}"] = 1.0
    return metrics


@mistake(ValueError, "['m0', 'm1']", "['m0']", "same names for every batch", trains=True)
def validation_metric_names_that_grow_in_one_dict() -> None:
    train(variant(evaluate_batch=add_a_name))


def evaluating_all(result: Any) -> type[LineTrial]:
    return variant(
        evaluate_batch=pytorch.PyTorchTrial.evaluate_batch, evaluate_full_dataset=lambda self, loader: result
    )


@mistake(TypeError, "evaluate_full_dataset() returned 0.9", "return a dict of metrics", trains=True)
def metrics_of_the_whole_data_as_number() -> None:
    train(evaluating_all(0.9))


@mistake(TypeError, "{1: 0.5", "metric names (str)", trains=True)
def metric_names_as_numbers() -> None:
    train(evaluating_all({1: 0.5}))


@mistake(RuntimeError, "'accuracy'", "not among", "validation_loss", "return it from evaluate_batch()", trains=True)
def searcher_metric_that_no_validation_has() -> None:
    train(init={"exp_conf": {"searcher": {"metric": "accuracy"}}}, checkpoint_policy="best")


@mistake(RuntimeError, "'grade'", "'good', 'bad'", "not a number", "exp_conf['searcher']['metric']", trains=True)
def searcher_metric_that_is_no_number() -> None:
    trial_class = returning("evaluate_batch", {"grade": "good"}, {"grade": "bad"})
    train(trial_class, init={"exp_conf": {"searcher": {"metric": "grade"}}})


@mistake(errors.InvalidExperimentException, "'avg'", "pytorch.Reducer", "Reducer.AVG", "wrap_reducer()")
def evaluation_reducer_as_text() -> None:
    train(variant(evaluation_reducer=lambda self: "avg"))


@mistake(errors.InvalidExperimentException, "'validation_loss'", "<built-in function max>", "wrap_reducer()")
def evaluation_reducer_as_function() -> None:
    train(variant(evaluation_reducer=lambda self: {"validation_loss": max}))


@mistake(errors.InvalidExperimentException, "['accuracy']", "['validation_loss']", "each metric a reducer", trains=True)
def evaluation_reducers_of_other_metrics() -> None:
    train(variant(evaluation_reducer=lambda self: {"accuracy": pytorch.Reducer.AVG}))


# Callbacks


@mistake(TypeError, "build_callbacks() returned [", "dict from names to callbacks", '{"early_stopping"')
def callbacks_as_list() -> None:
    train(variant(build_callbacks=lambda self: [pytorch.PyTorchCallback()]))


@mistake(TypeError, "'stop'", "PyTorchCallback", "instances")
def callback_class_for_callback() -> None:
    train(variant(build_callbacks=lambda self: {"stop": pytorch.PyTorchCallback}))


@mistake(TypeError, "7:", "names are str")
def callback_name_as_number() -> None:
    train(variant(build_callbacks=lambda self: {7: pytorch.PyTorchCallback()}))


# Reducers


class Gathering(pytorch.MetricReducer):
    def __init__(self, result: Any = 1.0) -> None:
        self.result = result

    def reset(self) -> None:
        pass

    def per_slot_reduce(self) -> Any:
        return None

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return self.result


def wrap_twice(context: PyTorchTrialContext) -> None:
    reducer = Gathering()
    context.wrap_reducer(reducer, "a")
    context.wrap_reducer(reducer, "b")


@mistake(AssertionError, "Gathering", "wrapped already", "wrap each one once")
def reducer_wrapped_twice() -> None:
    in_context(wrap_twice)


@mistake(AssertionError, "Gathering", "a function, an instance of pytorch.MetricReducer")
def reducer_class_for_reducer() -> None:
    in_context(lambda context: context.wrap_reducer(Gathering, "a"))


@mistake(AssertionError, "wrap_reducer('mean')", "a function")
def reducer_as_text() -> None:
    in_context(lambda context: context.wrap_reducer("mean", "a"))


@mistake(AssertionError, "name=3", "is a str")
def reducer_name_as_number() -> None:
    in_context(lambda context: context.wrap_reducer(Gathering(), 3))  # type: ignore[arg-type]


def reduce_with(result: Any, name: str | None) -> None:
    def act(context: PyTorchTrialContext) -> None:
        context.wrap_reducer(Gathering(result), name)
        context.reduce_metrics(for_training=True)

    in_context(act)


@mistake(AssertionError, "'f1' (Gathering)", "{'a': 1}", "without a name")
def named_reducer_of_a_dict() -> None:
    reduce_with({"a": 1}, "f1")


@mistake(AssertionError, "Gathering", "0.5", "give wrap_reducer a name")
def nameless_reducer_of_a_number() -> None:
    reduce_with(0.5, None)


# Profiling


def profile(**settings: Any) -> None:
    with trainer() as (its_trainer, _):
        its_trainer.configure_profiler(**settings)


@mistake(ValueError, "begin_on_batch=-1", "int >= 0")
def profiling_from_a_negative_batch() -> None:
    profile(begin_on_batch=-1)


@mistake(ValueError, "begin_on_batch=9", "end_after_batch=3", "ends before it begins", "later end, or None")
def profiling_that_ends_before_it_begins() -> None:
    profile(begin_on_batch=9, end_after_batch=3)


@mistake(TypeError, "enabled='yes'", "True or False")
def profiling_switch_as_text() -> None:
    profile(enabled="yes")


# Batches and checkpoints by themselves


@mistake(ValueError, "{}", "empty", "get_batch_length")
def length_of_an_empty_batch() -> None:
    pytorch.data_length({})


@mistake(TypeError, "'text'", "str", "get_batch_length")
def length_of_text() -> None:
    pytorch.data_length("text")


@mistake(errors.InvalidCheckpointException, "nothing at", "/nowhere", "det checkpoint describe")
def trial_from_nowhere() -> None:
    pytorch.load_trial_from_checkpoint_path("/nowhere")


# Questions to the context


@mistake(ValueError, "no hyperparameters", "pytorch.init(hparams={...})")
def hparams_that_were_not_given() -> None:
    in_context(lambda context: context.get_hparams())


@mistake(ValueError, "'lr'", "['batch_size']", "pytorch.init(hparams={'lr': ...})")
def hparam_that_was_not_given() -> None:
    in_context(lambda context: context.get_hparam("lr"), hparams={"batch_size": 3})


@mistake(ValueError, "no experiment config", "pytorch.init(exp_conf={...})")
def config_that_was_not_given() -> None:
    in_context(lambda context: context.get_experiment_config())


@mistake(ValueError, "global_batch_size='many'", "at least 1")
def batch_size_as_text() -> None:
    in_context(lambda context: context.get_global_batch_size(), hparams={"global_batch_size": "many"})


@mistake(errors.InternalException, "is_epoch_start()", "only while Trainer.fit() runs", "train_batch")
def question_about_a_loop_that_does_not_run() -> None:
    in_context(lambda context: context.is_epoch_start())


@mistake(AssertionError, "set_stop_requested('now')", "True or False")
def stop_request_as_text() -> None:
    in_context(lambda context: context.set_stop_requested("now"))  # type: ignore[arg-type]


@mistake(AssertionError, "set_enable_tensorboard_logging(1)", "True or False")
def tensorboard_switch_as_number() -> None:
    in_context(lambda context: context.set_enable_tensorboard_logging(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "error", "words", "trains"), mistake)
def test_mistake(make: Mistake, error: type[Exception], words: tuple[str, ...], trains: bool) -> None:
    check(make, error, words, trains)
