"""Train the digits network: python examples/digits/train.py"""

from __future__ import annotations

import argparse
import logging

import determined as det
from determined import pytorch
from model import DigitsTrial

HPARAMS = {"global_batch_size": 64, "learning_rate": 3e-3, "channels": 16, "dropout": 0.25}

CONFIG = {
    "name": "digits",
    # Which checkpoint is the best one:
    "searcher": {"metric": "validation_accuracy", "smaller_is_better": False},
    # The same seed gives the same weights, every time:
    "reproducibility": {"experiment_seed": 7},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--latest-checkpoint", metavar="ID", help="continue from this checkpoint")
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    with pytorch.init(hparams=HPARAMS, exp_conf=CONFIG) as context:
        trainer = pytorch.Trainer(DigitsTrial(context), context)
        trainer.fit(
            max_length=pytorch.Epoch(arguments.epochs),
            validation_period=pytorch.Epoch(1),
            checkpoint_period=pytorch.Epoch(5),
            latest_checkpoint=arguments.latest_checkpoint,
        )


if __name__ == "__main__":
    main()
