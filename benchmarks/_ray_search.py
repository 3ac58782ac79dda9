"""Search with Ray Tune's ASHA, in an environment that has it: what benchmarks/search_speed.py compares with.

    python _ray_search.py PLAN RESULT

PLAN is a JSON file that says what to try and where; what came of it is left in RESULT.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time
import types
from typing import Any

# Before Ray is imported: nothing is sent to its makers, and no files of metrics are written, which take time.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1")

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator


def train(config: dict[str, Any], plan: dict[str, Any]) -> None:
    """Do by a plain loop what the example's trial does, and report after each epoch."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(plan["threads"])
    torch.manual_seed(config["seed"])
    model = example(plan["example"])
    training, validation = model.load_digits()
    network = model.DigitsNet(channels=config["channels"], dropout=config["dropout"])
    optimizer = torch.optim.AdamW(network.parameters(), lr=config["learning_rate"])
    batches = DataLoader(training, batch_size=config["global_batch_size"], shuffle=True)
    for epoch in range(1, plan["max_time"] + 1):
        loss = train_epoch(network, optimizer, batches)
        metrics = evaluate(network, DataLoader(validation, batch_size=60))
        report({**metrics, "loss": loss, "epochs": epoch, "moment": time.time()}, plan, network, optimizer)


def example(folder: str) -> Any:
    """Import the model of the example as it is; for the trial class in it, which is not used here, a base is enough."""
    library: Any = types.ModuleType("determined")
    library.pytorch = types.SimpleNamespace(PyTorchTrial=object)
    sys.modules.setdefault("determined", library)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import model

    return model


def train_epoch(network: Any, optimizer: Any, batches: Any) -> float:
    import torch

    network.train()
    losses = []
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def evaluate(network: Any, batches: Any) -> dict[str, float]:
    import torch

    network.eval()
    losses, hits = [], []
    with torch.no_grad():
        for images, labels in batches:
            scores = network(images)
            losses.append(torch.nn.functional.cross_entropy(scores, labels))
            hits.append((scores.argmax(dim=1) == labels).float().mean())
    return {
        "validation_loss": torch.stack(losses).mean().item(),
        "validation_accuracy": torch.stack(hits).mean().item(),
    }


def report(metrics: dict[str, Any], plan: dict[str, Any], network: Any, optimizer: Any) -> None:
    if not plan["checkpoints"]:
        tune.report(metrics)
        return
    import torch

    with tempfile.TemporaryDirectory() as folder:
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epochs": metrics["epochs"]}
        torch.save(state, pathlib.Path(folder, "state.pt"))
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


class Reports(tune.Callback):
    """Collects what trials report."""

    def __init__(self) -> None:
        self.trials: dict[str, dict[str, Any]] = {}

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        of_trial = self.trials.setdefault(trial.trial_id, {"point": result["config"], "reports": []})
        of_trial["reports"].append([result["moment"], result["epochs"], result["validation_accuracy"]])


def tuner_of(plan: dict[str, Any], reports: Reports) -> tune.Tuner:
    points = plan["points"]
    return tune.Tuner(
        tune.with_parameters(train, plan=plan),
        param_space={name: tune.choice([point[name] for point in points]) for name in points[0]},
        tune_config=tune.TuneConfig(
            metric="validation_accuracy",
            mode="max",
            num_samples=len(points),
            search_alg=BasicVariantGenerator(points_to_evaluate=points, max_concurrent=plan["slots"]),
            scheduler=ASHAScheduler(
                time_attr="epochs",
                max_t=plan["max_time"],
                grace_period=plan["first_rung"],
                reduction_factor=plan["divisor"],
            ),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="digits", storage_path=plan["storage"], callbacks=[reports], verbose=0),
    )


def main() -> None:
    plan = json.loads(pathlib.Path(sys.argv[1]).read_text())
    ray.init(num_cpus=plan["slots"], include_dashboard=False, log_to_driver=False, _temp_dir=plan["session"])
    began = time.time()
    reports = Reports()
    found = tuner_of(plan, reports).fit()
    ended = time.time()
    result = {"began": began, "ended": ended, "failed": found.num_errors, "trials": list(reports.trials.values())}
    pathlib.Path(sys.argv[2]).write_text(json.dumps({**result, "version": ray.__version__}))
    ray.shutdown()


if __name__ == "__main__":
    main()
