"""Names, order, kinds and defaults of the parameters that programs rely on."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest

import determined as det
from determined import core, pytorch
from determined.pytorch import samplers
from determined.tensorboard.metric_writers.pytorch import TorchWriter

PYTORCH = {
    "init": "*, hparams=None, exp_conf=None, distributed=None, aggregation_frequency=1, "
    "enable_tensorboard_logging=True, optimizations=None",
    "Trainer": "trial, context",
    "DataLoader": "dataset, batch_size=1, shuffle=False, sampler=None, batch_sampler=None, num_workers=0, "
    "collate_fn=None, pin_memory=False, drop_last=False, timeout=0, worker_init_fn=None, "
    "multiprocessing_context=None, generator=None, *, prefetch_factor=None, persistent_workers=False, **torch_options",
    "adapt_batch_sampler": "batch_sampler, repeat=False, skip=0, num_replicas=1, rank=0",
    "data_length": "data",
    "to_device": "data, device, warned_types=None",
    "LRScheduler": "scheduler, step_mode, frequency=1",
    "TrainUnit": "value, *more",
    "Batch": "value, *more",
    "Epoch": "value, *more",
    "ShouldExit": "skip_exit_checkpoint=False",
    "CheckpointLoadContext": "hparams=None, exp_conf=None",
    "load_trial_from_checkpoint_path": "path, trial_class=None, trial_kwargs=None, torch_load_kwargs=None, **kwargs",
}

TRIAL = {
    "__init__": "context",
    "build_training_data_loader": "",
    "build_validation_data_loader": "",
    "train_batch": "batch, epoch_idx, batch_idx",
    "evaluate_batch": "batch, batch_idx",
    "evaluate_full_dataset": "data_loader",
    "evaluation_reducer": "",
    "build_callbacks": "",
    "get_batch_length": "batch",
}

CONTEXT = {
    "wrap_model": "model",
    "wrap_optimizer": "optimizer, backward_passes_per_step=1, fp16_compression=None, average_aggregated_gradients=None",
    "wrap_lr_scheduler": "lr_scheduler, step_mode, frequency=1",
    "wrap_scaler": "scaler",
    "wrap_reducer": "reducer, name=None, for_training=True, for_validation=True",
    "reset_reducers": "",
    "reduce_metrics": "for_training",
    "backward": "loss, gradient=None, retain_graph=False, create_graph=False",
    "step_optimizer": "optimizer, clip_grads=None, auto_zero_grads=True, scaler=None",
    "configure_apex_amp": "models, optimizers, enabled=True, opt_level='O1', cast_model_type=None, "
    "patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, "
    "cast_model_outputs=None, num_losses=1, verbosity=1, min_loss_scale=None, max_loss_scale=16777216.0",
    "set_profiler": "*args, **kwargs",
    "to_device": "data",
    "get_global_batch_size": "",
    "get_per_slot_batch_size": "",
    "get_hparams": "",
    "get_hparam": "name",
    "get_experiment_config": "",
    "get_data_config": "",
    "get_experiment_id": "",
    "get_trial_id": "",
    "get_trial_seed": "",
    "get_initial_batch": "",
    "is_epoch_start": "",
    "is_epoch_end": "",
    "current_train_epoch": "",
    "current_train_batch": "",
    "get_stop_requested": "",
    "set_stop_requested": "stop_requested",
    "get_tensorboard_path": "",
    "get_tensorboard_writer": "",
    "set_enable_tensorboard_logging": "enable_tensorboard_logging",
    "get_enable_tensorboard_logging": "",
}

EXPERIMENTAL = {
    "use_amp": "dtype=None",
    "disable_dataset_reproducibility_checks": "",
    "disable_auto_to_device": "",
}

TRAINER = {
    "configure_profiler": "sync_timings=True, enabled=False, begin_on_batch=0, end_after_batch=None",
    "fit": "checkpoint_period=None, validation_period=None, max_length=None, reporting_period=Batch(100), "
    "checkpoint_policy='best', latest_checkpoint=None, step_zero_validation=False, test_mode=False, "
    "profiling_enabled=False",
}

CALLBACK = {
    "on_trial_startup": "first_batch_idx, checkpoint_uuid",
    "on_trial_shutdown": "",
    "on_training_start": "",
    "on_training_epoch_start": "epoch_idx",
    "on_training_epoch_end": "epoch_idx",
    "on_training_workload_end": "avg_metrics, batch_metrics",
    "on_validation_start": "",
    "on_validation_epoch_start": "",
    "on_validation_epoch_end": "outputs",
    "on_validation_end": "metrics",
    "on_checkpoint_load_start": "checkpoint",
    "on_checkpoint_save_start": "checkpoint",
    "on_checkpoint_write_end": "checkpoint_dir",
    "on_checkpoint_end": "checkpoint_dir",
    "on_checkpoint_upload_end": "uuid",
    "state_dict": "",
    "load_state_dict": "state_dict",
}

LR_SCHEDULER = {"step": "*args, **kwargs", "get_last_lr": "", "state_dict": "", "load_state_dict": "state_dict"}

SAMPLERS = {
    "RepeatSampler": "sampler",
    "RepeatBatchSampler": "batch_sampler",
    "DistributedSampler": "sampler, num_workers, rank",
    "DistributedBatchSampler": "batch_sampler, num_workers, rank",
    "SkipSampler": "sampler, skip",
    "SkipBatchSampler": "batch_sampler, skip",
    "ReproducibleShuffleSampler": "sampler, seed",
    "ReproducibleShuffleBatchSampler": "batch_sampler, seed",
}

CORE = {
    "init": "*, distributed=None, checkpoint_storage=None, preempt_mode=PreemptMode.WorkersAskChief, "
    "tensorboard_mode=TensorboardMode.AUTO",
    "DistributedContext": "*, rank, size, local_rank, local_size, cross_rank, cross_size, chief_ip=None, "
    "pub_port=12360, pull_port=12376, port_offset=0, force_tcp=False",
}

DISTRIBUTED = {
    "from_torch_distributed": "chief_ip=None",
    "from_horovod": "hvd, chief_ip=None",
    "from_deepspeed": "chief_ip=None",
    "get_rank": "",
    "get_local_rank": "",
    "get_size": "",
    "get_num_agents": "",
    "gather": "stuff",
    "gather_local": "stuff",
    "allgather": "stuff",
    "allgather_local": "stuff",
    "broadcast": "stuff",
    "broadcast_local": "stuff",
    "close": "",
}

TRAIN = {
    "report_training_metrics": "steps_completed, metrics, batch_metrics=None",
    "report_validation_metrics": "steps_completed, metrics",
    "report_metrics": "group, steps_completed, metrics",
    "report_progress": "progress",
    "report_early_exit": "reason",
    "set_status": "status",
    "set_metadata": "metadata",
    "get_metadata": "",
    "get_tensorboard_path": "",
    "get_experiment_best_validation": "",
}

SHARED = "download_mode=DownloadMode.LocalWorkersShareDownload, *, selector=None"
CHECKPOINT = {
    "store_path": "metadata=None, *, shard=False",
    "restore_path": f"storage_id, {SHARED}",
    "upload": "ckpt_dir, metadata=None, *, shard=False, selector=None",
    "download": f"storage_id, ckpt_dir, {SHARED}",
    "get_metadata": "storage_id",
    "delete": "storage_id",
}

OTHERS: dict[Any, dict[str, str]] = {
    core.Context: {"start": "", "close": "", "alert": "title=None, description=None, level='info'"},
    core.PreemptContext: {"should_preempt": "auto_ack=True", "acknowledge_preemption_signal": ""},
    core.SearcherContext: {
        "operations": "searcher_mode=SearcherMode.WorkersAskChief, auto_ack=True",
        "get_configured_units": "",
    },
    core.SearcherOperation: {"report_progress": "length", "report_completed": "searcher_metric"},
    core.ProfilerContext: {"on": "sampling_interval=1, samples_per_report=10", "off": ""},
    det: {
        "get_cluster_info": "",
        "import_from_path": "path",
        "InvalidHP": "msg='the trial gave up on its hyperparameters'",
    },
    TorchWriter: {"__init__": "", "add_scalar": "name, value, step", "reset": "", "flush": ""},
    pytorch.MetricReducer: {"reset": "", "per_slot_reduce": "", "cross_slot_reduce": "per_slot_metrics"},
    pytorch.TrainUnit: {"should_stop": "step_num"},
    pytorch.DataLoader: {"get_data_loader": "repeat=False, skip=0, num_replicas=1, rank=0"},
}

TABLE: dict[Any, dict[str, str]] = {
    pytorch: PYTORCH,
    pytorch.PyTorchTrial: TRIAL,
    pytorch.PyTorchTrialContext: CONTEXT,
    pytorch.PyTorchExperimentalContext: EXPERIMENTAL,
    pytorch.Trainer: TRAINER,
    pytorch.PyTorchCallback: CALLBACK,
    pytorch.LRScheduler: LR_SCHEDULER,
    samplers: SAMPLERS,
    core: CORE,
    core.DistributedContext: DISTRIBUTED,
    core.TrainContext: TRAIN,
    core.CheckpointContext: CHECKPOINT,
    **OTHERS,
}


ROWS = [
    pytest.param(getattr(owner, name), expected, id=f"{owner.__name__}.{name}")
    for owner, signatures in TABLE.items()
    for name, expected in signatures.items()
]


def written(parameter: inspect.Parameter) -> str:
    default = parameter.default
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if default is parameter.empty:
        return stars + parameter.name
    return f"{parameter.name}={default if isinstance(default, enum.Enum) else repr(default)}"


def shown(function: Any) -> list[str]:
    """The parameters as a program sees them, without annotations and `self`."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        del parameters[0]
    texts: list[str] = []
    for parameter in parameters:
        starred = any(text.startswith("*") for text in texts)
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            texts.append("*")
        texts.append(written(parameter))
    return texts


def without_own_additions(actual: list[str], expected: list[str]) -> list[str]:
    """Leave out keyword-only parameters of ours at the end, which programs cannot trip over."""
    rest = actual[len(expected) :]
    keyword_only = "*" in actual[: len(expected)] or rest[:1] == ["*"]
    optional = all("=" in text or text == "*" for text in rest)
    return actual[: len(expected)] if keyword_only and optional else actual


@pytest.mark.parametrize(("function", "text"), ROWS)
def test_signature(function: Any, text: str) -> None:
    expected = text.split(", ") if text else []
    assert without_own_additions(shown(function), expected) == expected


def test_step_modes_have_their_numbers() -> None:
    modes = pytorch.LRScheduler.StepMode
    assert {mode.name: mode.value for mode in modes} == {
        "STEP_EVERY_EPOCH": 1,
        "STEP_EVERY_BATCH": 2,
        "MANUAL_STEP": 3,
        "STEP_EVERY_OPTIMIZER_STEP": 4,
    }


def test_reducers_have_their_numbers() -> None:
    assert {reducer.name: reducer.value for reducer in pytorch.Reducer} == {"AVG": 1, "SUM": 2, "MAX": 3, "MIN": 4}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (core.PreemptMode, {"WorkersAskChief", "ChiefOnly", "WorkersAskMaster"}),
        (core.SearcherMode, {"WorkersAskChief", "ChiefOnly"}),
        (core.DownloadMode, {"LocalWorkersShareDownload", "NoSharedDownload"}),
        (core.TensorboardMode, {"AUTO", "MANUAL"}),
        (core.EarlyExitReason, {"INVALID_HP", "USER_REQUESTED_STOP"}),
    ],
)
def test_choices_of_core(kind: type[enum.Enum], names: set[str]) -> None:
    assert {member.name for member in kind} == names


def test_upload_tensorboard_files_takes_selector_and_mangler() -> None:
    assert list(inspect.signature(core.TrainContext.upload_tensorboard_files).parameters) == [
        "self",
        "selector",
        "mangler",
    ]


def test_context_has_the_attributes_of_the_api() -> None:
    with pytorch.init() as context:
        names = ("device", "distributed", "models", "optimizers", "lr_schedulers", "experimental")
        assert [name for name in names if not hasattr(context, name)] == []


def test_core_context_has_its_services() -> None:
    with core.init() as context:
        names = ("distributed", "train", "checkpoint", "preempt", "searcher", "profiler", "info")
        assert [name for name in names if not hasattr(context, name)] == []


def test_cluster_info_has_the_attributes_of_the_api() -> None:
    trial = det.TrialInfo(trial_id=1, experiment_id=2, trial_seed=3, hparams={}, _config={"data": {"a": 1}})
    info = det.ClusterInfo(trial=trial)
    names = (
        "latest_checkpoint task_type task_id allocation_id slot_ids gpu_uuids container_addrs container_rank "
        "container_slot_counts master_url cluster_id agent_id user_data trial"
    )
    assert [name for name in names.split() if not hasattr(info, name)] == []
    assert trial._steps_completed == 0
