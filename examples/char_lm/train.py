"""Train the language model: python examples/char_lm/train.py"""

from __future__ import annotations

import argparse
import logging

import determined as det
from determined import pytorch
from model import CharTrial

AGGREGATION = 2

HPARAMS = {
    "global_batch_size": 16,
    "length": 64,
    "width": 128,
    "layers": 2,
    "dropout": 0.1,
    "learning_rate": 3e-3,
    "warmup_steps": 50,
}

CONFIG = {
    "name": "char_lm",
    "searcher": {"metric": "validation_bits_per_character", "smaller_is_better": True},
    "reproducibility": {"experiment_seed": 11},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1200)
    parser.add_argument("--latest-checkpoint", metavar="ID", help="continue from this checkpoint")
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    hparams = {**HPARAMS, "total_steps": arguments.batches // AGGREGATION}
    with pytorch.init(hparams=hparams, exp_conf=CONFIG, aggregation_frequency=AGGREGATION) as context:
        trial = CharTrial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(arguments.batches),
            validation_period=pytorch.Batch(200),
            step_zero_validation=True,
            latest_checkpoint=arguments.latest_checkpoint,
        )
        print(trial.sample("The harbour ", count=400))


if __name__ == "__main__":
    main()
