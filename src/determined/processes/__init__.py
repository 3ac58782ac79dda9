"""Child processes: read what they write, hear how they end, pass signals on, and end with the parent.

Needs nothing but the standard library, so that a shim in front of every rank starts at once.
"""

from determined.processes._call import call_arguments
from determined.processes._channel import Channel
from determined.processes._events import EventLoop
from determined.processes._exits import RankExit, RankExits
from determined.processes._linux import (
    adopt_orphans,
    children,
    end_with_parent,
    missing_guarantees,
    outlive_parent,
    set_name,
    use_huge_pages,
)
from determined.processes._output import MAX_LINE, TRACEBACK, LineCutter, Output, prefixed
from determined.processes._signals import SignalPipe, reset_signals, signals_blocked

__all__ = [
    "MAX_LINE",
    "TRACEBACK",
    "Channel",
    "EventLoop",
    "LineCutter",
    "Output",
    "RankExit",
    "RankExits",
    "SignalPipe",
    "adopt_orphans",
    "call_arguments",
    "children",
    "end_with_parent",
    "missing_guarantees",
    "outlive_parent",
    "prefixed",
    "reset_signals",
    "set_name",
    "signals_blocked",
    "use_huge_pages",
]
