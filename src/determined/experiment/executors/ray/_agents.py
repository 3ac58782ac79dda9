"""The runner's side of an agent: asynchronous calls, in order, and one question for news that is always open."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from determined.experiment.executors.ray._agent import News

_RETRY_S = 0.5
_LEAVE_TIMEOUT_S = 10.0


class AgentLost(Exception):
    """The agent is gone."""

    def __init__(self, message: str, *, is_failure: bool) -> None:
        super().__init__(message)
        self.is_failure = is_failure
        """Whether it could not start, which another one could not either."""


@dataclasses.dataclass(eq=False, slots=True)
class _Order:
    method: str
    arguments: tuple[Any, ...]
    then: Callable[[Any], None] | None
    otherwise: Callable[[str], None] | None


class AgentClient:
    """An agent, as far as this process knows."""

    def __init__(self, node: str, actor: Any) -> None:
        self.node = node
        self.known: list[tuple[int, int]] = []
        """The runs whose exits have come since the last question."""
        self._actor = actor
        self._orders: dict[Any, _Order] = {}
        self._question: Any = None
        self._asks_at = 0.0

    def send(
        self,
        method: str,
        *arguments: Any,
        then: Callable[[Any], None] | None = None,
        otherwise: Callable[[str], None] | None = None,
    ) -> None:
        """Call a method; `then` gets what it returns, `otherwise` the reason why it failed."""
        self._submit(_Order(method, arguments, then, otherwise))

    def expected(self) -> list[Any]:
        """Return the futures to wait for."""
        if self._question is None and time.monotonic() >= self._asks_at:
            self._question = self._actor.wait.remote("poll", self.known)
            self.known = []
        return [*self._orders, *([] if self._question is None else [self._question])]

    def take(self, ref: Any) -> News | None:
        """Take the result of a future that is done: news, if it is the answer to the open question."""
        import ray

        order = self._orders.pop(ref, None)
        if order is None:
            self._question = None
        try:
            result = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:
            # Unknown whether it was done: agents do nothing twice.
            self._asks_at = time.monotonic() + _RETRY_S
            if order is not None:
                self._submit(order)
            return None
        except ray.exceptions.RayTaskError as error:
            if order is None:
                raise
            if order.otherwise is not None:
                order.otherwise(_last_line(str(error)))
            return None
        except ray.exceptions.RayError as error:  # it has died, or its node is no longer there
            text = str(error)
            raise AgentLost(_last_line(text), is_failure="creation task" in text) from error
        if order is None:
            news: News = result
            return news
        if order.then is not None:
            order.then(result)
        return None

    def leave(self) -> None:
        """End the agent."""
        import ray

        from determined.experiment.executors.ray._ray import kill_actor

        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # it is gone, or will be now
            ray.get(self._actor.call.remote("leave"), timeout=_LEAVE_TIMEOUT_S)
        kill_actor(self._actor)

    def _submit(self, order: _Order) -> None:
        self._orders[self._actor.call.remote(order.method, *order.arguments)] = order


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it is gone"
