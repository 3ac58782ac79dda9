"""Train and measure: python examples/metrics/train.py"""

from __future__ import annotations

import argparse
import logging

import determined as det
from determined import pytorch
from model import MetricsTrial

HPARAMS = {"global_batch_size": 64, "learning_rate": 0.1, "width": 64, "patience": 4}

CONFIG = {
    "name": "metrics",
    "searcher": {"metric": "validation_loss", "smaller_is_better": True},
    "reproducibility": {"experiment_seed": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60, help="at most; it stops early")
    parser.add_argument("--latest-checkpoint", metavar="ID", help="continue from this checkpoint")
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    with pytorch.init(hparams=HPARAMS, exp_conf=CONFIG) as context:
        trainer = pytorch.Trainer(MetricsTrial(context), context)
        trainer.fit(
            max_length=pytorch.Epoch(arguments.epochs),
            validation_period=pytorch.Epoch(1),
            latest_checkpoint=arguments.latest_checkpoint,
        )


if __name__ == "__main__":
    main()
