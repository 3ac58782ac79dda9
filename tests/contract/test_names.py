"""The public names of each package, exactly."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import determined
from determined import pytorch

NAMES: dict[str, str] = {
    "determined": """
        LOG_FORMAT ClusterInfo InvalidHP TrialContext TrialInfo __version__ errors get_cluster_info import_from_path
    """,
    "determined.core": """
        CheckpointContext Context DistributedContext DownloadMode DummyCheckpointContext DummyDistributedContext
        DummyPreemptContext DummyProfilerContext DummySearcherContext DummyTrainContext
        EarlyExitReason PreemptContext PreemptMode
        ProfilerContext SearcherContext SearcherMode SearcherOperation TensorboardMode TrainContext Unit init
    """,
    "determined.pytorch": """
        Batch CheckpointLoadContext DataLoader Epoch LRScheduler MetricReducer PyTorchCallback
        PyTorchExperimentalContext PyTorchTrial PyTorchTrialContext Reducer ShouldExit TorchData TrainUnit Trainer
        _ShouldExit _SimpleReducer _TrainBoundary _TrainBoundaryType _TrialState adapt_batch_sampler
        consolidate_checkpoint data_length init load_trial_from_checkpoint_path samplers to_device
    """,
    "determined.storage": """
        MANIFEST_FILE METADATA_FILE Candidate CheckpointStore FolderMirror FolderStore FsspecStore Manifest Retention
        SavedCheckpoint abandoned_uploads download environment_for errors_naming expired fault_point has_store locate
        location_in locked open_at read_json read_plain remove_abandoned section_of staged store_for sync_folder
    """,
    "determined.tracking": """
        BestValidation Catalog Changeset CheckpointDeleted CheckpointRecord CheckpointSaved CheckpointState
        Continued Control Demand Desired ExperimentChange ExperimentDescription ExperimentRecord ExperimentStore
        KEEP Keep Lease Message MetadataChanged MetricReport MetricSummary ModelRecord ModelVersionRecord
        NewTrial Overview Problem ProgressChanged RELAY_VARIABLE Registry
        RelayedRun RelayedWriter RelayedWrites RunDescription RunProcess RunRecord RunState SearchEvent
        SeedChanged Slots Snapshot StateChanged StatusChanged TrackingReader TrialChange TrialEntry
        TrialOverview TrialRecord TrialRequest TrialWriter Validation as_stored back_up
        check_database encode_json is_away is_comparable
        lacks_room relay searcher_metric when_available
    """,
    "determined.experimental": "Checkpoint Determined Experiment Model ModelVersion Trial client test_one_batch",
    "determined.common": "set_logger",
    "determined.common.experimental": """
        Checkpoint Determined Experiment Model ModelSortBy ModelVersion OrderBy Trial client
    """,
    "determined.util": "chunks download_gcs_blob_with_backoff merge_dicts",
    "determined.experimental.client": """
        Checkpoint CheckpointSortBy CheckpointState CheckpointTrainingMetadata Determined DownloadMode Experiment
        ExperimentSortBy ExperimentState Model ModelSortBy ModelVersion OrderBy Project Trial TrialMetrics TrialSortBy
        TrialState Workspace create_experiment create_model create_workspace get_checkpoint get_experiment get_model
        get_trial get_workspace iter_trials_metrics list_experiments list_models list_workspaces login
        stream_trials_metrics stream_trials_training_metrics stream_trials_validation_metrics
    """,
    "determined.tensorboard": "EventFile current set_current summary_writer",
    "determined.experiment.config": """
        AdaptiveAshaSearcher AsyncHalvingSearcher Categorical Const CustomSearcher Double ExperimentConfig GpSearcher
        GridSearcher Hyperparameter Int Length Log RandomSearcher Searcher SingleSearcher SlotRange Space TpeSearcher
        from_map load mask parse read
    """,
}

SAMPLERS = (
    "RepeatSampler",
    "RepeatBatchSampler",
    "DistributedSampler",
    "DistributedBatchSampler",
    "SkipSampler",
    "SkipBatchSampler",
    "ReproducibleShuffleSampler",
    "ReproducibleShuffleBatchSampler",
)

EXCEPTIONS = (
    "DeterminedException",
    "InvalidExperimentException",
    "InvalidConfig",
    "InternalException",
    "InvalidCheckpointException",
    "CheckpointNotFoundException",
    "StateMismatchException",
    "StorageException",
    "TrackingException",
    "SchemaVersionException",
    "InvalidHP",
    "MisuseError",
    "WrongRankError",
)


@pytest.mark.parametrize("package", NAMES)
def test_package_exports_exactly(package: str) -> None:
    assert sorted(importlib.import_module(package).__all__) == sorted(NAMES[package].split())


@pytest.mark.parametrize("package", NAMES)
def test_everything_exported_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", NAMES)
def test_a_name_that_is_not_there_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(package).no_such_name


@pytest.mark.parametrize("package", NAMES)
def test_public_classes_and_functions_are_documented(package: str) -> None:
    module = importlib.import_module(package)
    objects = {name: getattr(module, name) for name in module.__all__ if not name.startswith("_")}
    documented = {name: inspect.getdoc(value) for name, value in objects.items() if callable(value)}
    assert [name for name, text in documented.items() if not text] == []


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_named(name: str) -> None:
    assert inspect.isclass(getattr(pytorch.samplers, name))


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_form_one_tree(name: str) -> None:
    assert issubclass(getattr(determined.errors, name), determined.errors.DeterminedException)


def test_old_private_name_of_the_exit_exception_is_the_same_class() -> None:
    assert pytorch._ShouldExit is pytorch.ShouldExit


def test_old_private_boundary_types_have_their_members() -> None:
    assert {member.name for member in pytorch._TrainBoundaryType} == {"CHECKPOINT", "REPORT", "VALIDATE", "TRAIN"}


def test_old_private_trial_state_counts_batches_and_epochs() -> None:
    state = pytorch._TrialState()
    assert (state.batches_trained, state.epochs_trained) == (0, 0)


def test_distributed_context_is_found_at_its_old_place() -> None:
    from determined import core
    from determined.core._distributed import DistributedContext

    assert DistributedContext is core.DistributedContext


def test_torch_writer_is_found_at_its_old_place() -> None:
    from determined.tensorboard.metric_writers.pytorch import TorchWriter

    assert {"add_scalar", "reset", "flush"} <= set(vars(TorchWriter))


def test_misuse_can_be_caught_as_assertion_and_as_value_error() -> None:
    assert issubclass(determined.errors.MisuseError, (AssertionError, ValueError))
    assert issubclass(determined.errors.MisuseError, ValueError)


@pytest.mark.parametrize("name", ["StateMismatchException", "WrongRankError"])
def test_errors_that_determined_raised_as_runtime_errors_are_that_too(name: str) -> None:
    assert issubclass(getattr(determined.errors, name), RuntimeError)


def test_invalid_hp_at_the_top_is_the_one_of_errors() -> None:
    assert determined.InvalidHP is determined.errors.InvalidHP


def test_log_format_formats_a_record() -> None:
    import logging

    record = logging.LogRecord("name", logging.INFO, "file", 1, "said %s", ("so",), None)
    assert "said so" in logging.Formatter(determined.LOG_FORMAT).format(record)


def test_importing_the_package_leaves_torch_alone() -> None:
    program = "import sys, determined, determined.core; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
