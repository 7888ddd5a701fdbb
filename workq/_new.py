"""New tasks, from what a producer says to the rows of an INSERT: checked and encoded before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict, overload

from typing_extensions import Unpack

from workq import _json
from workq._checks import check_delay, check_headers, check_instant, check_key, check_name, check_priority, check_size
from workq._spec import P, Spec, Target

NO_PAYLOAD = object()
NO_DELAY = timedelta()


class Options(TypedDict, total=False):
    """What can be said of a single task beside its payload."""

    delay: float
    """Seconds from now, by the database's clock."""
    run_at: datetime
    """An aware point in time; not together with `delay`."""
    key: str
    """Instead of the one that the Spec computes."""
    priority: int
    """-100 (first) to 100 (last), instead of the Spec's."""
    queue: str
    """Instead of the Spec's."""
    headers: Mapping[str, str]
    """Small texts for the handler, beside the payload."""


class NewTask:
    """One item of `enqueue_many`: what `enqueue` takes, without the transaction.

    Raises TypeError for an unknown option.
    """

    __slots__ = ("options", "payload", "target")

    @overload
    def __init__(self, target: Spec[None], /, **options: Unpack[Options]) -> None: ...
    @overload
    def __init__(self, target: Spec[P], payload: P, /, **options: Unpack[Options]) -> None: ...
    @overload
    def __init__(self, target: str, payload: object = None, /, **options: Unpack[Options]) -> None: ...
    def __init__(self, target: Target, payload: object = NO_PAYLOAD, /, **options: Unpack[Options]) -> None:
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            known = ", ".join(Options.__annotations__)
            raise TypeError(f"there is no option {sorted(unknown)[0]!r}; there are {known}")
        self.target: Target = target
        self.payload: object = payload
        self.options: Options = options


class Item(NamedTuple):
    """One row to insert: the first eight fields are the statement's columns, in its order."""

    queue: str
    name: str
    payload: str
    headers: str | None
    priority: int
    run_at: datetime | None
    delay: timedelta | None
    key: str | None


def item_of(task: NewTask, max_payload: int, common: Mapping[str, str] | None = None) -> Item:
    """Check and encode one task. Raises PayloadError, ValueError or TypeError."""
    target, payload, options = task.target, task.payload, task.options
    if isinstance(target, Spec) and not options:
        return _plainly(target, None if payload is NO_PAYLOAD else payload, max_payload, common)
    if isinstance(target, Spec):
        name, queue, priority = target.name, target.queue, target.priority
        value: Any = None if payload is NO_PAYLOAD else payload
        text = target.codec().dumps(value)
        key = target.key_of(value) if options.get("key") is None else options.get("key")
    elif isinstance(target, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        name, queue, priority, key = check_name("name", target), "", 0, options.get("key")
        text = _json.dumps(None if payload is NO_PAYLOAD else payload)
    else:
        raise TypeError(f"the second argument says what to enqueue: a Spec, a handler, or a name, not {target!r:.80}")

    if options.get("queue") is not None:
        queue = check_name("queue", options.get("queue"), empty=True)
    if options.get("priority") is not None:
        priority = check_priority(options.get("priority"))
    run_at, delay = when_of(options.get("run_at"), options.get("delay"))
    headers = dict(common or {})
    if options.get("headers") is not None:
        headers |= check_headers(options.get("headers"))
    return Item(
        queue=queue,
        name=name,
        payload=check_size(text, max_payload),
        headers=json.dumps(headers, ensure_ascii=False) if headers else None,
        priority=priority,
        run_at=run_at,
        delay=delay,
        key=None if key is None else check_key(key),
    )


def _plainly(target: Spec[Any], value: Any, max_payload: int, common: Mapping[str, str] | None) -> Item:
    """What nearly every task is, in half the time."""
    text, key = target.codec().dumps(value), target.key_of(value)
    return Item(
        target.queue,
        target.name,
        check_size(text, max_payload),
        json.dumps(common, ensure_ascii=False) if common else None,
        target.priority,
        None,
        NO_DELAY,
        None if key is None else check_key(key),
    )


def when_of(run_at: object, delay: object) -> tuple[datetime | None, timedelta | None]:
    """When a new task is due: at a time, or so long from now."""
    if run_at is None:
        return None, NO_DELAY if delay is None else check_delay(delay)
    if delay is not None:
        raise ValueError("give run_at or delay, not both")
    return check_instant("run_at", run_at), None


def alike(items: Sequence[Item]) -> bool:
    """Do they differ in nothing but their payloads?"""
    before, after = items[0][:2], items[0][3:]
    return all(item[3:] == after and item[:2] == before for item in items)


def ids_in_order(items: Sequence[Item], rows: Sequence[Sequence[Any]]) -> list[int | None]:
    """The id of each item, None for one whose key was taken.

    The rows of an INSERT come back in no promised order, but ids rise in the order of the items; a row with a key
    names itself. `items` may hold a key twice: the first has the row.
    """
    if len(rows) == 1 and len(items) == 1:
        return [rows[0][0]]
    unkeyed: list[int] = []
    keyed: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if len(row) > 1 and row[3] is not None:
            keyed[row[1], row[2], row[3]] = row[0]
        else:
            unkeyed.append(row[0])
    unkeyed.sort()
    following = iter(unkeyed)
    return [
        next(following) if item.key is None else keyed.pop((item.queue, item.name, item.key), None) for item in items
    ]


def in_lock_order(items: Sequence[Item]) -> list[int]:
    """Positions of the items sorted by (queue, name, key): crossing orders of keys in two INSERTs would deadlock."""
    return sorted(range(len(items)), key=lambda at: (items[at].queue, items[at].name, items[at].key or ""))
