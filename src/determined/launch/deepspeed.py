"""Start one process per slot for DeepSpeed: `python -m determined.launch.deepspeed [torchrun options --] script.py`.

The same as `determined.launch.torch_distributed`: `deepspeed.init_distributed()` finds rank, size and address in the
variables that it sets.
"""

from __future__ import annotations

from determined.launch.torch_distributed import run

if __name__ == "__main__":
    run()
