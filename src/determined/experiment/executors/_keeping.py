"""The life of a keeper, from the order that it gets to the end that it tells."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from typing import Any

from determined._home import make_private
from determined.experiment.executors._base import EndReason, RunExit, RunSpec
from determined.experiment.executors._files import write_json
from determined.experiment.executors._keeper import STOPPING, Keeper
from determined.experiment.executors._processes import Identity, adopt_orphans, call_this
from determined.experiment.executors._wakeup import woken_by
from determined.launch._line import Line
from determined.tracking import lacks_room

_BETWEEN_ATTEMPTS_S = 1.0


def keep(link: socket.socket) -> None:
    """Keep the run that the other end of a socket describes, and tell it how the run ended."""
    os.setsid()
    adopt_orphans()
    line = Line(link)
    orders: list[dict[str, Any]] | None = []
    while orders == []:
        orders = line.hear()
    me = Identity.of(os.getpid()).to_json()
    if orders is None or not _tell(link, {"keeper": me}):
        return  # the runner is gone, and nothing has begun
    order, *further = orders
    spec = RunSpec.from_json(order["spec"])
    call_this(f"det-keeper-{spec.trial_id}")
    woken = woken_by(signal.SIGCHLD, *STOPPING)
    problem: Exception | None = None
    try:
        _make_folder(spec, {**me, "server": order["server"]}, link)
        ended = Keeper(spec, order["environment"], line, woken).run(further)
    except OSError as error:
        problem, ended = error, RunExit.of(spec, EndReason.NOT_STARTED, f"{error}")
    except Exception as error:
        problem, ended = (
            error,
            RunExit.of(spec, EndReason.KILLED, f"its keeper failed: {type(error).__name__}: {error}"),
        )
    _announce(spec, ended, link)
    if problem is not None:
        raise problem  # with which this process ends, and all that it started


def _make_folder(spec: RunSpec, keeper: dict[str, Any], link: socket.socket) -> None:
    """Make the folder of a run, as soon as the disk has room for it; an order or the runner's end ends the waiting."""
    while True:
        try:
            make_private(spec.folder)
            write_json(spec.files.keeper, keeper)
            return
        except OSError as error:
            if not lacks_room(error) or select.select([link], [], [], _BETWEEN_ATTEMPTS_S)[0]:
                raise


def _announce(spec: RunSpec, ended: RunExit, link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a full disk: the runner still hears it
        write_json(spec.files.end, ended.to_json())
    _tell(link, {"ended": ended.to_json()})


def _tell(link: socket.socket, message: dict[str, Any]) -> bool:
    try:
        link.sendall(json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n")
    except OSError:
        return False
    return True
