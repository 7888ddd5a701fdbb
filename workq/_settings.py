"""What an executor was told, checked: values that the stages read and nobody changes."""

from __future__ import annotations

import contextvars
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workq._checks import check_name
from workq._run import Middleware
from workq._schedule import Schedule, When
from workq._spec import Handler, require_handler
from workq._task import Claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one executor."""

    queue: str
    handlers: Mapping[str, Handler[Any, Any]]
    schedules: Mapping[tuple[str, str], Schedule]
    """By (name, key)."""
    middleware: tuple[Middleware, ...]
    workers: int
    poll_interval: float
    lease: float
    max_lost: int
    stop_timeout: float
    claim_ahead: bool
    context: contextvars.Context
    """The context the executor was made in; each run gets a copy."""

    def when(self, claimed: Claimed) -> When | None:
        """The function of a claimed schedule; None for a one-shot task."""
        return self.schedules[claimed.name, claimed.key or ""].when if claimed.scheduled else None


def by_name(handlers: Iterable[Handler[Any, Any]]) -> dict[str, Handler[Any, Any]]:
    """The handlers by name. Raises ValueError for two of one name, or none at all."""
    if isinstance(handlers, Handler):
        raise TypeError("give a list of handlers: Executor(queue, [handler])")
    found: dict[str, Handler[Any, Any]] = {}
    for given in handlers:
        handler = require_handler(given)
        if handler.name in found:
            raise ValueError(f"two handlers have the name {handler.name!r}; a task goes to one of them only")
        found[handler.name] = handler
    if not found:
        raise ValueError("an executor needs at least one handler")
    return found


def queue_of(handlers: Collection[Handler[Any, Any]], queue_name: str | None) -> str:
    """The one queue an executor serves. Raises ValueError if its handlers name several."""
    if queue_name is not None:
        return check_name("queue_name", queue_name, empty=True)
    queues = {handler.queue for handler in handlers}
    if len(queues) > 1:
        raise ValueError(
            f"the handlers are of several queues ({', '.join(map(repr, sorted(queues)))}): make one Executor for each, "
            "or give queue_name="
        )
    return queues.pop()


def by_key(schedules: Iterable[Schedule], handlers: Mapping[str, Handler[Any, Any]]) -> dict[tuple[str, str], Schedule]:
    """The schedules by (name, key). Raises ValueError for doubles and for handlers that are not served here."""
    if isinstance(schedules, Schedule):
        raise TypeError("give a list of schedules: schedules=[Schedule(...)]")
    found: dict[tuple[str, str], Schedule] = {}
    for schedule in schedules:
        if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"schedules are made by workq.Schedule(handler, when), not {schedule!r:.80}")
        name = schedule.handler.name
        if handlers.get(name) is not schedule.handler:
            raise ValueError(f"the schedule of {name!r} needs its handler among the executor's handlers")
        if (name, schedule.key) in found:
            raise ValueError(f"two schedules of {name!r} have the key {schedule.key!r}: give them different keys")
        found[name, schedule.key] = schedule
    return found
