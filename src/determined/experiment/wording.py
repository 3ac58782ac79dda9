"""Records as text, for the terminal and the page."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from determined import _text, tracking

MAX_CELL = 200
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def cell(value: Any) -> str:
    """Return a value for a table: numbers to 6 digits, mappings as JSON, "-" for None."""
    if value is None or value == {}:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping | list | tuple):
        return _text.plain(tracking.encode_json(value), MAX_CELL)
    return _text.plain_lines(value, MAX_CELL)


def when(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in this machine's time zone, to the second."""
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def duration(started: float, ended: float | None) -> str | None:
    """Return the duration of a finished run as hours:minutes:seconds; None while it runs."""
    if ended is None:
        return None
    return str(datetime.timedelta(seconds=max(round(ended - started), 0)))


def bytes_text(size: int) -> str:
    """Return a number of bytes with a unit that keeps it short."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


_ASKED = {
    tracking.Desired.PAUSED: "pausing",
    tracking.Desired.CANCELED: "canceling",
    tracking.Desired.KILLED: "killing",
}


def clean(text: str) -> str:
    """Return a line of output without colours, with other control characters escaped."""
    return _text.plain(_COLOURS.sub("", text).expandtabs())


def state_text(record: tracking.ExperimentRecord | tracking.TrialRecord) -> str:
    """Return the state with a remark: that no process works on it, or that it is about to change."""
    about = _about_experiment(record) if isinstance(record, tracking.ExperimentRecord) else _about_trial(record)
    if about is None:
        return "ERROR (process gone)" if record.is_lost else record.state.value
    return f"{record.state.value} ({about})"


def _about_experiment(record: tracking.ExperimentRecord) -> str | None:
    if record.is_local or not record.state.has_process:
        return None
    if lacks_runner(record):
        return "no runner"
    return _ASKED.get(record.desired) if record.desired and record.state is tracking.RunState.ACTIVE else None


def _about_trial(record: tracking.TrialRecord) -> str | None:
    if record.request_id is None or record.state.is_final:
        return None
    is_paused = record.state is tracking.RunState.PAUSED
    if record.runner is None or record.runner.is_gone:
        return None if is_paused else "no runner"
    if is_paused or not record.run_id:
        return "waiting"
    return "queued" if record.process is None else None  # as a job of a batch system


def lacks_runner(record: tracking.ExperimentRecord) -> bool:
    """Return whether an experiment should run, and no living process runs it."""
    if record.is_local or not record.state.has_process:
        return False
    return record.runner is None or record.runner.is_gone


def searcher(record: tracking.ExperimentRecord) -> Mapping[str, Any]:
    """Return the searcher section of an experiment; empty for a local run, which has no search."""
    found = (record.config or {}).get("searcher")
    return found if isinstance(found, Mapping) and not record.is_local else {}


def percent(progress: float | None) -> str | None:
    """Return progress from 0 to 1 as a percentage."""
    return None if progress is None else f"{100 * progress:.0f}%"


def best_text(best: tracking.BestValidation | None) -> str | None:
    """Return the best validation with its metric and step."""
    return None if best is None else f"{best.metric} {best.value:.6g} at step {best.steps_completed}"


def masked(config: Any) -> Any:
    """Return an experiment config with its secrets hidden."""
    if not isinstance(config, Mapping):
        return config
    from determined.experiment.config import mask

    return mask(config)


def flat(hparams: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return hyperparameters with nested ones as `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in hparams.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def varying(of_trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the flat hyperparameters that differ between trials; of one trial, all."""
    names = dict.fromkeys(name for hparams in of_trials for name in hparams)
    if len(of_trials) < 2:
        return list(names)
    return [name for name in names if len({repr(hparams.get(name)) for hparams in of_trials}) > 1]
