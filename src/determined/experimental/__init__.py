"""The experiments of this machine from Python, with the API of Determined's client.

`from determined.experimental import client`, or `Determined`, which has the same calls. Both work in this process, on
the tracking database; there is no service to start or to log in to.
"""

from determined.experimental import client
from determined.experimental._checkpoint import Checkpoint
from determined.experimental._determined import Determined
from determined.experimental._experiment import Experiment
from determined.experimental._model import Model, ModelVersion
from determined.experimental._one_batch import test_one_batch
from determined.experimental._trial import Trial

__all__ = ["Checkpoint", "Determined", "Experiment", "Model", "ModelVersion", "Trial", "client", "test_one_batch"]
