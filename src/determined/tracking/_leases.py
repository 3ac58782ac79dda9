"""What processes hold for as long as they live: an experiment, by its runner, and the slots of a host, by trials."""

from __future__ import annotations

import pathlib
import socket
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from determined import errors

from ._data.changesets import Demand, Lease
from ._data.process import CLAIMED_FOR_S, RunProcess
from ._database import schema as db
from ._database.access import OpenDatabase
from ._database.connections import wait_for_turn
from ._database.migrations import opened
from ._queries import fill, process_columns, process_of, update

_LEASES = db.leases
_RUNNERS = sa.select(db.runners, *(db.experiments.c[name] for name in ("config", "priority", "max_slots"))).join(
    db.experiments, db.experiments.c.id == db.runners.c.id
)


class Slots(OpenDatabase):
    """Hands out the slots of a host, numbered from 0, to trials. Any thread may use it.

    A slot belongs to a trial for as long as the process that holds it lives: whoever asks next frees those of
    processes that are gone. Where a process cannot be seen, its lease ends unless the runner renews it with its claim.
    """

    def __init__(self, url_or_path: str | pathlib.Path, host: str | None = None) -> None:
        self.host = host or socket.gethostname()
        with opened(url_or_path) as engine:
            super().__init__(engine)

    def take(
        self,
        experiment_id: int,
        trial_id: int,
        count: int,
        capacity: int | Sequence[int],
        process: RunProcess | None = None,
        *,
        least: int | None = None,
    ) -> list[int] | None:
        """Give a trial the first free slots and return them; None if too few are free.

        Fewer than `count` do if they are at least `least`.

        `capacity` is how many slots the host has, or the numbers of those that the trial may have. They are held by
        `process`, by default this one. What the trial holds already counts as free.
        """
        if count < 0:
            raise errors.InvalidRequestException(
                f"take(count={count}) for trial {trial_id}: pass a number of slots from 0 on."
            )
        holder = process or RunProcess.current()
        numbers = range(capacity) if isinstance(capacity, int) else capacity
        with self._writing() as connection:
            taken = {lease.slot for lease in self._living(connection) if lease.trial_id != trial_id}
            free = [slot for slot in numbers if slot not in taken][:count]
            if len(free) < (count if least is None else least):
                return None
            connection.execute(sa.delete(_LEASES).where(self._of_trial(trial_id)))
            owner = {"experiment_id": experiment_id, "trial_id": trial_id}
            self._insert(connection, [{"slot": slot, **owner} for slot in free], holder)
            return free

    def hand_over(self, trial_id: int, process: RunProcess) -> None:
        """Let another process hold a trial's slots, such as the shim of its run: they are free when that is gone."""
        columns = _holding(process)
        with self._writing() as connection:
            connection.execute(sa.update(_LEASES).where(self._of_trial(trial_id)).values(columns))

    def release(self, trial_id: int) -> None:
        """Free the slots of a trial."""
        with self._writing() as connection:
            connection.execute(sa.delete(_LEASES).where(self._of_trial(trial_id)))

    def held(self) -> list[Lease]:
        """Return the slots of the host that are in use, by number."""
        with self._reading() as connection:
            return [lease for lease in self._leases(connection) if is_living(lease.process)]

    def demands(self) -> list[Demand]:
        """Return what the living runners on the host want and hold, those that run for longest first."""
        with self._reading() as connection:
            held = defaultdict[int, list[int]](list)
            for lease in self._leases(connection):
                if is_living(lease.process):
                    held[lease.experiment_id].append(lease.slot)
            rows = connection.execute(_RUNNERS).all()
        found = [_demand(row, held[row.id]) for row in rows if self._is_run_here(row)]
        return sorted(found, key=lambda demand: (demand.since, demand.experiment_id))

    def _living(self, connection: sa.Connection) -> list[Lease]:
        """Return the leases whose holders live, and free the others; nobody else can take slots meanwhile."""
        wait_for_turn(connection, "slots", zlib.crc32(self.host.encode()) - 2**31)
        leases = self._leases(connection)
        dead = [lease.slot for lease in leases if not is_living(lease.process)]
        if dead:
            connection.execute(sa.delete(_LEASES).where(_LEASES.c.host == self.host, _LEASES.c.slot.in_(dead)))
        return [lease for lease in leases if lease.slot not in dead]

    def _leases(self, connection: sa.Connection) -> list[Lease]:
        query = sa.select(_LEASES).where(_LEASES.c.host == self.host).order_by(_LEASES.c.slot)
        return [fill(Lease, row, process=process_of(row)) for row in connection.execute(query)]

    def _insert(self, connection: sa.Connection, leases: list[dict[str, int]], holder: RunProcess) -> None:
        values = {"host": self.host, "since": time.time(), **_holding(holder)}
        if leases:
            connection.execute(sa.insert(_LEASES), [{**values, **lease} for lease in leases])

    def _of_trial(self, trial_id: int) -> sa.ColumnElement[bool]:
        return sa.and_(_LEASES.c.host == self.host, _LEASES.c.trial_id == trial_id)

    def _is_run_here(self, runner: sa.Row[Any]) -> bool:
        process = process_of(runner)
        return process is not None and process.host == self.host and is_living(process)


def is_living(process: RunProcess) -> bool:
    """Return whether a process still counts as the holder of slots."""
    # A container that was started again keeps its name, and cannot ask for the processes from before.
    return not process.is_gone and (process.is_here or process.host != socket.gethostname())


def _holding(process: RunProcess) -> dict[str, Any]:
    columns = process_columns(process)
    del columns["host"]  # that of the slots
    return {**columns, "alive_until": time.time() + CLAIMED_FOR_S}


def _demand(row: sa.Row[Any], slots: Sequence[int]) -> Demand:
    resources = (row.config or {}).get("resources") or {}
    unit = resources.get("slots_per_trial") or 1
    if is_elastic := isinstance(unit, dict):
        unit = unit["min"]
    values = {"experiment_id": row.id, "unit": unit, "is_elastic": is_elastic}
    return fill(Demand, row, **values, wanted=row.wanted_slots, slots=slots)


# Experiments: at most one living process runs one


def claim(connection: sa.Connection, experiment_id: int, process: RunProcess, *, force: bool) -> None:
    """Make a process the runner of an experiment, unless another one is or may be."""
    wait_for_turn(connection, "claims", experiment_id)
    if not force:
        _require_free(experiment_id, _holder(_locked(connection, experiment_id)), process)
    now = time.time()
    connection.execute(sa.delete(db.runners).where(db.runners.c.id == experiment_id))
    columns = {**process_columns(process), "wanted_slots": 0, "since": now, "alive_until": now + CLAIMED_FOR_S}
    connection.execute(sa.insert(db.runners), {"id": experiment_id, **columns})


def renew(connection: sa.Connection, experiment_id: int, process: RunProcess) -> None:
    """Prolong the claim of a process on an experiment, and the leases of the slots of its trials.

    `ConflictException` if it has no claim any more.
    """
    require_claim(connection, experiment_id, process)
    values = {"alive_until": time.time() + CLAIMED_FOR_S}
    update(connection, db.runners, values, db.runners.c.id == experiment_id)
    connection.execute(sa.update(_LEASES).where(_LEASES.c.experiment_id == experiment_id).values(values))


def _require_free(experiment_id: int, holder: RunProcess | None, process: RunProcess) -> None:
    if holder is None or holder.is_gone or holder.is_same(process):
        return
    if holder.is_here:
        raise errors.ConflictException(
            f"experiment {experiment_id} is run by process {holder.pid} on this machine, so process {process.pid} "
            f"cannot run it, too; pause it first by `det experiment pause {experiment_id}`, or end that process."
        )
    raise errors.ConflictException(
        f"experiment {experiment_id} is run by process {holder.pid} on {holder.host!r}, which cannot be asked from "
        f"here whether it still runs; pause it there. If it is gone, wait two minutes until its claim has expired, or "
        f"take over at once by `det experiment activate {experiment_id} --force` (in Python claim(force=True))."
    )


def _locked(connection: sa.Connection, experiment_id: int) -> sa.Row[Any] | None:
    """Return the claim on an experiment, which nobody else can change meanwhile."""
    query = sa.select(db.runners).where(db.runners.c.id == experiment_id)
    return connection.execute(query.with_for_update(key_share=True)).one_or_none()


def _holder(row: sa.Row[Any] | None) -> RunProcess | None:
    return None if row is None else process_of(row)


def require_claim(connection: sa.Connection, experiment_id: int, process: RunProcess | None) -> None:
    """Raise `ConflictException` unless a process has claimed an experiment and still has it."""
    if process is None:
        raise errors.ConflictException(
            f"this store has not claimed experiment {experiment_id}; call claim() before commit()."
        )
    holder = _holder(_locked(connection, experiment_id))
    if holder is not None and holder.is_same(process):
        return
    now = "nobody runs it" if holder is None else f"process {holder.pid} on {holder.host!r} runs it"
    raise errors.ConflictException(
        f"experiment {experiment_id} is no longer run by process {process.pid}: {now} now; nothing was stored. "
        "End this runner, or claim() the experiment again and read what is stored."
    )


def release(connection: sa.Connection, experiment_id: int, process: RunProcess) -> None:
    """Let others run an experiment that a process has claimed; nothing happens if another one has."""
    holder = _holder(_locked(connection, experiment_id))
    if holder is not None and holder.is_same(process):
        connection.execute(sa.delete(db.runners).where(db.runners.c.id == experiment_id))
