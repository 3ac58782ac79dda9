"""Save or delete one checkpoint, without a training: what the sweep over system calls interrupts.

`save ID` saves a checkpoint under an id known before, so that its files can be named to strace; `delete ID` deletes
it; `hold ID` waits in the middle of saving until its input ends.
"""

from __future__ import annotations

import sys
import uuid

from determined import core


def save(context: core.Context, hold: bool) -> None:
    context.train.report_training_metrics(3, {"loss": 0.25})
    with context.checkpoint.store_path({"steps_completed": 3}) as (folder, _):
        (folder / "code").mkdir()
        (folder / "code" / "model.py").write_text("answer = 42\n")
        (folder / "weights").write_bytes(bytes(range(256)) * 64)
        if hold:
            print("holding", flush=True)
            sys.stdin.read()


def main(command: str, checkpoint_id: str) -> None:
    uuid.uuid4 = lambda: uuid.UUID(checkpoint_id)
    with core.init() as context:
        if command == "delete":
            context.checkpoint.delete(checkpoint_id)
        else:
            save(context, hold=command == "hold")


if __name__ == "__main__":
    main(*sys.argv[1:])
