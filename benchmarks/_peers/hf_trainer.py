"""The Trainer of Hugging Face's transformers: nothing is logged, shown or saved. It has one optimizer only."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
import transformers
from _worker import BATCH_SIZE, data, loss_of, make_model, make_optimizer, work
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments


class TinyTrainer(Trainer):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        x, y = inputs
        return loss_of(model(x), y)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        x, y = inputs
        return loss_of(model(x), y), None, None


def arguments(**settings: Any) -> TrainingArguments:
    return TrainingArguments(
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        use_cpu=True,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        eval_do_concat_batches=False,
        **settings,
    )


def train(batches: int, shuffle: bool) -> list[nn.Module]:
    model = make_model()
    order = "random" if shuffle else "sequential"
    trainer = TinyTrainer(
        model,
        arguments(max_steps=batches, train_sampling_strategy=order),
        data_collator=default_collate,
        train_dataset=data(),
        optimizers=(make_optimizer(model), None),
    )
    trainer.train()
    return [model]


def validate(batches: int) -> float:
    trainer = TinyTrainer(make_model(), arguments(), data_collator=default_collate, eval_dataset=data(batches))
    with torch.no_grad():
        return float(trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    work(
        versions={"transformers": transformers.__version__, "accelerate": accelerate.__version__},
        train=train,
        validate=validate,
        train_two=None,
    )
