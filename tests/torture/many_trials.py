"""Let ten thousand simulated trials run by ASHA with the real runner: `python tests/torture/many_trials.py`."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from simulation import assert_search_is_sound

TRIALS = 10_000

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        assert_search_is_sound(pathlib.Path(folder), TRIALS)
        print(f"{TRIALS} trials in {time.monotonic() - began:.0f} s: the optimum within the budget of theory")
