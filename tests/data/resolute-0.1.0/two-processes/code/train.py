"""Train some batches, then save and stop: `python train.py 7`."""

import sys

from model_def import Trial

from determined import pytorch

Trial.stops_after = int(sys.argv[1])
config = {"name": "everything", "reproducibility": {"experiment_seed": 3}}
with pytorch.init(exp_conf=config, aggregation_frequency=2) as context:
    trainer = pytorch.Trainer(Trial(context), context)
    trainer.fit(max_length=pytorch.Batch(10), reporting_period=pytorch.Batch(3), checkpoint_policy="none")
