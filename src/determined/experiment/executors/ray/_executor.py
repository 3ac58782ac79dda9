"""Runs on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from determined import errors
from determined.core.distributed import DEFAULT_TIMEOUT_S
from determined.experiment.executors._base import EndReason, Handle, Placement, RankGroup, RunExit, RunSpec
from determined.experiment.executors._exit_file import read_exit, write_json
from determined.experiment.executors.ray._agent import LogChunk, News
from determined.experiment.executors.ray._agents import AgentClient, AgentLost

_SETTLING_TIMEOUT_S = 20.0
"""How long the ranks on other nodes have to end by themselves after some have failed: until they notice."""
_FIND_TIMEOUT_S = 10.0
_RESTARTS = 3
"""How often a node gets a new agent within a minute before it counts as lost."""
_ORDER = [
    *(EndReason.INTERRUPTED, EndReason.INVALID_HP, EndReason.NOT_STARTED, EndReason.FAILED, EndReason.KILLED),
    *(EndReason.STOPPED, EndReason.COMPLETED),
]


@dataclasses.dataclass(eq=False, slots=True)
class _Run:
    """A run, and its part on each node."""

    spec: RunSpec
    parts: dict[str, RunSpec]
    exits: dict[str, RunExit] = dataclasses.field(default_factory=dict)
    wanted: EndReason | None = None
    has_started: bool = False
    kills_at: float | None = None
    abandoned: set[str] = dataclasses.field(default_factory=set)
    """The nodes whose agents were lost, which may have ended its part there."""

    @property
    def living(self) -> list[str]:
        """The nodes on which it goes on."""
        return [node for node in self.parts if node not in self.exits]


class RayExecutor:
    """Tells the agents of the nodes what to run. An agent and its runs outlive this process for a while."""

    def __init__(
        self,
        make_agent: Callable[[str], Any],
        agents: Callable[[], Mapping[str, Any]],
        is_alive: Callable[[str], bool],
        on_adopt: Callable[[int, Placement], None],
    ) -> None:
        self._make_agent = make_agent
        self._existing = agents
        self._is_alive = is_alive
        self._on_adopt = on_adopt
        self._agents: dict[str, AgentClient] = {}
        self._made: dict[str, list[float]] = {}
        self._runs: dict[int, _Run] = {}
        self._exits: list[RunExit] = []

    def start(self, spec: RunSpec) -> None:
        if spec.trial_id in self._runs:
            raise errors.MisuseError(f"Trial {spec.trial_id} has a run already; start another when it has ended.")
        nodes = spec.placement["nodes"]
        run = self._runs[spec.trial_id] = _Run(spec, {})
        if len(nodes) == 1:
            self._start_parts(run, 0)
        else:
            first = self._agent(nodes[0]["node"])
            run.parts = _parts(spec, 0)  # so that the run ends if a node is lost before it has begun
            first.send("free_port", nodes[0]["address"], then=functools.partial(self._start_parts, run))

    def handle(self, trial_id: int) -> Handle | None:
        run = self._runs.get(trial_id)
        return None if run is None else {"placement": run.spec.placement}

    def stop(self, trial_id: int) -> None:
        self._end(trial_id, EndReason.STOPPED, "stop")

    def kill(self, trial_id: int) -> None:
        self._end(trial_id, EndReason.KILLED, "kill")

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._hear(0.0 if self._exits else left)
            self._kill_overdue()
            if self._exits or left == 0.0 or (not self._runs and left is None):
                exits, self._exits = self._exits, []
                return exits

    def adopt(self, spec: RunSpec, handle: Handle | None) -> None:
        if (exit := read_exit(spec)) is not None:
            self._exits.append(exit)
            return
        placement = self._find(spec) if handle is None else handle["placement"]
        if placement is None:
            self._exits.append(RunExit.of(spec, EndReason.KILLED, "before it had begun"))
            return
        spec = dataclasses.replace(spec, placement=placement)
        run = self._runs[spec.trial_id] = _Run(spec, _parts(spec, 0), has_started=True)
        with contextlib.suppress(ValueError):  # the group is gone
            self._on_adopt(spec.trial_id, placement)
        for node in run.parts:
            self._adopt_part(run, node)

    def close(self) -> None:
        """End the agents; runs that still go on are asked to stop, as if this process had ended."""
        for agent in self._agents.values():
            agent.leave()
        self._agents.clear()

    # Starting and ending

    def _start_parts(self, run: _Run, port: int) -> None:
        if self._runs.get(run.spec.trial_id) is not run or run.exits:
            return
        if run.wanted is not None:
            self._conclude(run, RunExit.of(run.spec, run.wanted, "before it had begun"))
            return
        run.parts, run.has_started = _parts(run.spec, port), True
        for node, part in run.parts.items():
            refused = functools.partial(self._on_refused, run, node)
            self._agent(node).send("start", part.to_json(), run.spec.placement, otherwise=refused)

    def _end(self, trial_id: int, wanted: EndReason, order: str) -> None:
        run = self._runs.get(trial_id)
        if run is not None:
            run.wanted = wanted
            for node in run.living if run.has_started else ():
                self._agent(node).send(order, trial_id)

    def _adopt_part(self, run: _Run, node: str) -> None:
        if not self._is_alive(node):
            self._on_part_exit(run, node, RunExit.of(run.spec, EndReason.INTERRUPTED, _lost(node)))
            return
        received = {rank: path.stat().st_size for rank, path in run.spec.files.logs().items()}
        refused = functools.partial(self._on_refused, run, node)
        self._agent(node).send("adopt", run.parts[node].to_json(), run.spec.placement, received, otherwise=refused)

    def _find(self, spec: RunSpec) -> Placement | None:
        """Return where a run is of which there is no handle, since its runner was gone too early."""
        import ray

        for agent in self._existing().values():
            with contextlib.suppress(ray.exceptions.RayError):
                question = agent.call.remote("placement", spec.trial_id, spec.run_id)
                found: Placement | None = ray.get(question, timeout=_FIND_TIMEOUT_S)
                if found is not None:
                    return found
        return None

    # Agents

    def _agent(self, node: str) -> AgentClient:
        if node not in self._agents:
            self._made.setdefault(node, []).append(time.monotonic())
            self._agents[node] = AgentClient(node, self._make_agent(node))
        return self._agents[node]

    def _hear(self, timeout_s: float | None) -> None:
        import ray

        refs = {ref: agent for agent in self._agents.values() for ref in agent.expected()}
        if not refs:
            if timeout_s:
                time.sleep(timeout_s)
            return
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        if not done:
            done, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
        for ref in done:
            agent = refs[ref]
            if self._agents.get(agent.node) is agent:
                try:
                    if (news := agent.take(ref)) is not None:
                        self._take(agent, news)
                except AgentLost as lost:
                    self._on_agent_lost(agent, lost)

    def _take(self, agent: AgentClient, news: News) -> None:
        for chunk in news.logs:
            self._store(chunk)
        for value in news.exits:
            exit = RunExit.from_json(value)
            run = self._runs.get(exit.trial_id)
            if run is not None and run.spec.run_id == exit.run_id and agent.node in run.parts:
                if agent.node in run.abandoned and exit.reason is EndReason.KILLED and run.wanted is not exit.reason:
                    exit = dataclasses.replace(exit, reason=EndReason.INTERRUPTED)
                self._on_part_exit(run, agent.node, exit)
            agent.known.append((exit.trial_id, exit.run_id))

    def _store(self, chunk: LogChunk) -> None:
        run = self._runs.get(chunk.trial_id)
        if run is None or run.spec.run_id != chunk.run_id:
            return
        with contextlib.suppress(OSError):  # a full disk is no reason to lose a training
            run.spec.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(run.spec.files.log(chunk.rank), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, chunk.data, chunk.offset)
            finally:
                os.close(file)

    def _on_agent_lost(self, agent: AgentClient, lost: AgentLost) -> None:
        """Give the node a new agent, which finds the runs of the old one, or count its runs as lost."""
        del self._agents[agent.node]
        runs = [run for run in self._runs.values() if agent.node in run.living]
        recent = [at for at in self._made[agent.node] if time.monotonic() - at < 60]
        for run in runs:
            if lost.is_failure:
                self._on_refused(run, agent.node, str(lost))
            elif self._is_alive(agent.node) and len(recent) <= _RESTARTS and run.has_started:
                run.abandoned.add(agent.node)
                self._adopt_part(run, agent.node)
            else:
                self._on_part_exit(run, agent.node, RunExit.of(run.spec, EndReason.INTERRUPTED, _lost(agent.node)))

    # Exits

    def _on_refused(self, run: _Run, node: str, why: str) -> None:
        self._on_part_exit(run, node, RunExit.of(run.spec, EndReason.NOT_STARTED, why))

    def _on_part_exit(self, run: _Run, node: str, exit: RunExit) -> None:
        if self._runs.get(run.spec.trial_id) is not run or node in run.exits:
            return
        run.exits[node] = exit
        if not run.living or not run.has_started:
            self._conclude(run, _whole(run, self._first_ranks(run)))
        elif run.kills_at is None:
            is_bad = exit.reason not in (EndReason.COMPLETED, EndReason.STOPPED)
            longest = max(run.spec.grace_period, DEFAULT_TIMEOUT_S)
            run.kills_at = time.monotonic() + (_SETTLING_TIMEOUT_S if is_bad else longest)
        elif exit.reason not in (EndReason.COMPLETED, EndReason.STOPPED):
            run.kills_at = min(run.kills_at, time.monotonic() + _SETTLING_TIMEOUT_S)

    def _first_ranks(self, run: _Run) -> dict[str, range]:
        """Return the ranks on each node."""
        found = {}
        for node, part in run.parts.items():
            first = 0 if part.group is None else part.group.first_rank
            found[node] = range(first, first + part.ranks)
        return found

    def _conclude(self, run: _Run, exit: RunExit) -> None:
        del self._runs[run.spec.trial_id]
        with contextlib.suppress(OSError):  # a full disk: the runner still hears it
            run.spec.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(run.spec.files.exit, exit.to_json())
        self._exits.append(exit)

    def _kill_overdue(self) -> None:
        for run in self._runs.values():
            if run.kills_at is not None and time.monotonic() > run.kills_at:
                run.kills_at = float("inf")
                for node in run.living:
                    self._agent(node).send("kill", run.spec.trial_id)


def _parts(spec: RunSpec, port: int) -> dict[str, RunSpec]:
    """Return the run of each node that together are a run."""
    nodes = spec.placement["nodes"]
    if len(nodes) == 1:
        ranks = len(nodes[0]["slots"])  # not known from an earlier runner otherwise
        return {nodes[0]["node"]: dataclasses.replace(spec, ranks=ranks, placement=_local(nodes[0]))}
    sizes = [len(node["slots"]) for node in nodes]
    addresses = [node["address"] for node in nodes]
    shared = {
        "DET_CHIEF_IP": addresses[0],
        "DET_CHIEF_PORT": str(port),
        "DET_CONTAINER_ADDRS": json.dumps(addresses),
        "DET_CONTAINER_SLOT_COUNTS": json.dumps(sizes),
        "DET_DISTRIBUTED_KEY": spec.environment.get("DET_DISTRIBUTED_KEY") or secrets.token_hex(16),
    }
    return {
        node["node"]: dataclasses.replace(
            spec,
            ranks=sizes[number],
            group=RankGroup(number=number, sizes=sizes, addresses=addresses, port=port),
            placement=_local(node),
            environment={**spec.environment, **shared, "DET_CONTAINER_RANK": str(number)},
        )
        for number, node in enumerate(nodes)
    }


def _local(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: node[name] for name in ("slots", "gpus", "threads")}


def _whole(run: _Run, ranks: Mapping[str, range]) -> RunExit:
    """Return the exit of a run from those of its parts: of failures the first, unless it was the doing of another."""
    worst = min((exit.reason for exit in run.exits.values()), key=_ORDER.index)
    same = {node: exit for node, exit in run.exits.items() if exit.reason is worst}
    own = {node: exit for node, exit in same.items() if exit.blamed is None or exit.blamed in ranks[node]}
    first = min((own or same).values(), key=lambda exit: exit.ended)
    matches = {pattern: line for exit in run.exits.values() for pattern, line in exit.matches.items()}
    return dataclasses.replace(first, matches=matches)


def _lost(node: str) -> str:
    return f"node {node[:8]} of the Ray cluster was lost"
