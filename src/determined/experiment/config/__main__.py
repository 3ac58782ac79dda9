"""Writes the reference of all keys: `python -m determined.experiment.config > docs/reference/config.md`."""

import sys

from determined.experiment.config._reference import reference

sys.stdout.write(reference())
