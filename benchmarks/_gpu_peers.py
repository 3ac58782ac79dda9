"""Other training libraries on the work of benchmarks/gpu.py, as far as they are installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch
from _models import DEVICE, Work
from _timing import TimedBatches
from torch import Tensor, nn
from torch.utils.data import DataLoader


def prepared(work: Work) -> tuple[nn.Module, torch.optim.Optimizer, TimedBatches, DataLoader[Any]]:
    """Return what every library is given."""
    torch.manual_seed(1)
    model, timed = work.make_model().to(DEVICE), TimedBatches(work.batches)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(work.make_data(), work.batch_size, shuffle=True, drop_last=True, collate_fn=timed.collate)
    return model, optimizer, timed, loader


def train_with_lightning(lightning: Any, work: Work) -> float:
    """Train in the mode that it has for measuring its raw speed."""
    model, optimizer, timed, loader = prepared(work)

    class Module(lightning.LightningModule):  # type: ignore[misc]  # a class of a module that may not be there
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return work.loss_of(self.model, *batch)

    trainer = lightning.Trainer(
        accelerator=DEVICE.type, devices=1, barebones=True, max_steps=work.batches, max_epochs=-1
    )
    trainer.fit(Module(), loader)
    return timed.watch.seconds


def train_with_accelerate(accelerate: Any, work: Work) -> float:
    """Train in a loop of one's own over what it prepares."""
    model, optimizer, timed, loader = prepared(work)
    accelerator = accelerate.Accelerator(cpu=DEVICE.type == "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < work.batches:
        for inputs, targets in loader:
            loss = work.loss_of(model, inputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == work.batches:
                break
    return timed.watch.seconds


def train_with_ignite(engine: Any, work: Work) -> float:
    """Train by an engine without handlers."""
    model, optimizer, timed, loader = prepared(work)

    def update(_: Any, batch: Any) -> None:
        inputs, targets = (part.to(DEVICE, non_blocking=True) for part in batch)
        work.loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    engine.Engine(update).run(loader, max_iters=work.batches)
    return timed.watch.seconds


def train_with_transformers(transformers: Any, work: Work) -> float:
    """Train by the Trainer of Hugging Face, which logs, shows and saves nothing."""
    model, optimizer, timed, _ = prepared(work)

    class Trainer(transformers.Trainer):  # type: ignore[misc]  # a class of a module that may not be there
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return work.loss_of(model, *inputs)

    settings = transformers.TrainingArguments(
        output_dir=os.environ["DET_HOME"],
        per_device_train_batch_size=work.batch_size,
        max_steps=work.batches,
        use_cpu=DEVICE.type == "cpu",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
    )
    data, optimizers = work.make_data(), (optimizer, None)
    Trainer(model, settings, data_collator=timed.collate, train_dataset=data, optimizers=optimizers).train()
    return timed.watch.seconds


_KNOWN: list[tuple[str, str, str, Callable[[Any, Work], float]]] = [
    ("Lightning", "lightning", "lightning.pytorch", train_with_lightning),
    ("Lightning", "pytorch-lightning", "pytorch_lightning", train_with_lightning),  # the same under its older name
    ("Accelerate", "accelerate", "accelerate", train_with_accelerate),
    ("Ignite", "pytorch-ignite", "ignite.engine", train_with_ignite),
    ("HF Trainer", "transformers", "transformers", train_with_transformers),
]


def _installed() -> dict[str, Callable[[Work], float]]:
    found: dict[str, Callable[[Work], float]] = {}
    for name, package, module, train in _KNOWN:
        with contextlib.suppress(ImportError):
            imported = importlib.import_module(module)
            found[f"{name} {importlib.metadata.version(package)}"] = functools.partial(train, imported)
    return found


PEERS = _installed()
