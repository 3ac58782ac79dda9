"""Refuse to start ranks with Horovod, and say what starts them: `python -m determined.launch.torch_distributed`."""

from __future__ import annotations

import sys

from determined.launch._command import MODULE
from determined.launch._supervisor import say

if __name__ == "__main__":
    say(f"Resolute trains without Horovod. Start the ranks of a PyTorchTrial with python -m {MODULE}.")
    sys.exit(2)
