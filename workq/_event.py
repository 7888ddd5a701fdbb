"""Events: what hooks are told, and how they are called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeAlias

logger = logging.getLogger("workq")


EventKind: TypeAlias = Literal["enqueued", "started", "completed", "failed", "retried", "lost", "released"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a task. (W: "Events".)

    | kind | when |
    |---|---|
    | enqueued | after the INSERT, in the process that enqueued (`in_tx`: your transaction may still roll back) |
    | started | when its handler is about to run |
    | completed | after success is committed; `duration` |
    | failed | after a failed run is stored; `error`, `duration`; `retry_at` if it runs again, None = final |
    | retried | after `retry` (`in_tx` as above) |
    | lost | the lease was taken over, or the task deleted, while it ran here |
    | released | handed back: unfinished, by `stop` or by `Later`; or before its start |
    """

    kind: EventKind
    id: int
    queue: str
    name: str
    key: str | None
    attempt: int
    """From 1: failed runs before this one + 1."""
    headers: Mapping[str, str]
    at: datetime
    """By this machine's clock."""
    in_tx: bool
    """Inside the caller's transaction, which may still roll back."""
    duration: float | None
    """Seconds the handler ran."""
    error: BaseException | str | None
    retry_at: datetime | None
    """For `failed`: when its policy runs it again; None if it does not."""


Hook: TypeAlias = Callable[[Event], object]


# An Event before it is frozen: the same fields in the same order.
_Draft = make_dataclass("_Draft", [field.name for field in fields(Event)], slots=True)


def event_of(
    kind: EventKind,
    id: int,
    queue: str,
    name: str,
    key: str | None,
    attempt: int,
    headers: Mapping[str, str],
    at: datetime,
    *,
    in_tx: bool,
    duration: float | None = None,
    error: BaseException | str | None = None,
    retry_at: datetime | None = None,
) -> Event:
    """Event(...), in 1.0 us instead of 2.9, twice for every task: a frozen dataclass sets its fields slowly."""
    draft: Any = _Draft(kind, id, queue, name, key, attempt, headers, at, in_tx, duration, error, retry_at)
    draft.__class__ = Event  # Python allows that between classes of equal slots
    event: Event = draft
    return event


def tell(hooks: Sequence[Hook], event: Event) -> None:
    """Call every hook. What one raises is logged and changes nothing."""
    for hook in hooks:
        try:
            hook(event)
        except BaseException:
            logger.exception("the event hook %s failed on %r of task %d", _name(hook), event.kind, event.id)


def _name(hook: Hook) -> str:
    """Not its repr, which may show what it was made with: a token, say."""
    while isinstance(hook, partial):
        hook = hook.func
    try:
        return f"{hook.__module__}.{hook.__qualname__}"
    except Exception:  # an instance, or a proxy that raises what it likes
        return f"{type(hook).__module__}.{type(hook).__qualname__}"
