"""Train the GAN: python examples/gan/train.py"""

from __future__ import annotations

import argparse
import logging

import determined as det
from determined import pytorch
from model import GanTrial

HPARAMS = {"global_batch_size": 256, "width": 128, "learning_rate": 1e-3, "penalty": 0.1}

CONFIG = {
    "name": "gan",
    "searcher": {"metric": "high_quality", "smaller_is_better": False},
    "reproducibility": {"experiment_seed": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30, help="one epoch is 100 batches")
    parser.add_argument("--latest-checkpoint", metavar="ID", help="continue from this checkpoint")
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    with pytorch.init(hparams=HPARAMS, exp_conf=CONFIG) as context:
        trainer = pytorch.Trainer(GanTrial(context), context)
        trainer.fit(
            max_length=pytorch.Epoch(arguments.epochs),
            validation_period=pytorch.Epoch(5),
            latest_checkpoint=arguments.latest_checkpoint,
        )


if __name__ == "__main__":
    main()
