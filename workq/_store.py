"""The operations on the table: the only place that mentions a statement. Values in, values out."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from workq import _json
from workq._clock import Clock
from workq._ending import Settled
from workq._new import Item, alike, ids_in_order, in_lock_order
from workq._place import PATIENT, Callers, Place
from workq._task import EMPTY, Claimed, Lease, State, TaskRow
from workq.dialect import Connection, Dialect, Params, Row, Rows, Statement, Transaction, Urgency

UNDEFINED_TABLE = "42P01"


class Lane(NamedTuple):
    """Where the next claim goes on, in one (name, priority)."""

    name: str
    priority: int
    run_at: datetime
    id: int


class Wanted(NamedTuple):
    """What a claim asks for."""

    queue: str
    names: list[str]
    limit: int
    token: int
    lease: timedelta
    cursor: list[Lane]
    schedules: list[tuple[str, str]]
    """(name, key) of the schedules served here."""
    tokens: list[int]
    """Of claims whose reply was lost: rows that have them are ours."""
    takeover: bool
    """Expired leases too, or only rows that nobody holds."""
    suspect: int
    """From so many vanished holders on, the next one included, a row is a suspect."""
    suspects: bool
    """Only rows whose holders vanished again and again, instead of all others."""
    ahead: bool
    """The page ends before a row that a vanished process held."""


class Repaired(NamedTuple):
    """What `retry` set free, for its event."""

    id: int
    queue: str
    name: str
    key: str | None
    headers: Mapping[str, str]


class Left(NamedTuple):
    """A due task that `wait` still waits for."""

    queue: str
    name: str
    running: bool


@cache
def node_name(pid: int) -> str:
    """host:pid, for people. Nothing depends on it."""
    return f"{socket.gethostname()}:{pid}"


def parse_headers(text: str | None) -> Mapping[str, str]:
    """The stored headers, read-only; whatever is not as we write it is left out."""
    if text is None:
        return EMPTY
    try:
        parsed = json.loads(text)
    except ValueError:
        return EMPTY
    if not isinstance(parsed, dict):
        return EMPTY
    pairs = cast("dict[str, object]", parsed)
    return MappingProxyType({key: value for key, value in pairs.items() if isinstance(value, str)})


async def advised(fetch: Awaitable[Rows]) -> Rows:
    """Its rows; or its error, which says what makes the table if there is none."""
    try:
        return await fetch
    except Exception as error:
        if getattr(error, "sqlstate", None) == UNDEFINED_TABLE or str(error).startswith("no such table"):
            error.add_note("workq's table is made by `await queue.migrate()`, or by the SQL of queue.schema_sql()")
        raise


class Store:
    """One table of tasks. Reads and writes go over the connection, or the caller's transaction, that is given."""

    def __init__(self, dialect: Dialect, clock: Clock) -> None:
        self.dialect = dialect
        self.clock = clock
        self._sql = dialect.sql

    async def _own(self, conn: Connection, statement: Statement, params: Params, urgency: Urgency = PATIENT) -> Rows:
        # The time is read before the statement waits for SQLite's writer; PostgreSQL takes its own.
        return await advised(conn.fetch(statement, {"now": self.clock.now(), "series": 1, **params}, urgency))

    async def _at(self, place: Place, statement: Statement, params: Params) -> Rows:
        return await advised(place.fetch(statement, {"now": self.clock.now(), "series": 1, **params}))

    async def now(self, conn: Connection) -> datetime:
        """The time that decides what is due."""
        ((now,),) = await self._own(conn, self._sql.now, {})
        assert isinstance(now, datetime)
        return now

    async def claim(self, conn: Connection, wanted: Wanted, urgency: Urgency) -> list[Claimed]:
        """Take due tasks, in the order they are to start."""
        params = wanted._asdict() | {"node": node_name(os.getpid())}
        rows = await self._own(conn, self._sql.claim, params, urgency)
        page = [claimed_of(row, wanted.queue, wanted.token) for row in rows]
        page.sort(key=lambda task: (task.priority, task.run_at, task.lease.id))
        return page

    async def extend(
        self, conn: Connection, leases: Sequence[Lease], lease: timedelta, urgency: Urgency
    ) -> dict[tuple[int, int], bool]:
        """Beat. Returns, by (id, version), those still held; False: locked by a transaction, not extended."""
        rows = await self._own(conn, self._sql.extend, {"leases": sorted(leases), "lease": lease}, urgency)
        return {(row[0], row[1]): bool(row[2]) for row in rows}

    async def succeed(self, conn: Connection, leases: Sequence[Lease], urgency: Urgency) -> set[int]:
        """Delete finished tasks. Returns the ids that were ours and not locked."""
        rows = await self._own(conn, self._sql.succeed, {"leases": sorted(leases)}, urgency)
        return {row[0] for row in rows}

    async def settle(
        self, conn: Connection, endings: Sequence[tuple[Lease, Settled]], urgency: Urgency
    ) -> dict[int, datetime]:
        """Write what is to stay of ended runs. Returns, by id, when each is due that was ours and not locked."""
        params = {"endings": [(*lease, *settled) for lease, settled in sorted(endings, key=lambda pair: pair[0])]}
        rows = await self._own(conn, self._sql.settle, params, urgency)
        return {row[0]: row[1] for row in rows}

    async def look(self, conn: Connection, ids: Sequence[int], urgency: Urgency) -> dict[int, Lease]:
        """Who holds these rows, as last committed: (id, version, token), token 0 for nobody."""
        rows = await self._own(conn, self._sql.look, {"ids": sorted(ids)}, urgency)
        return {row[0]: Lease(row[0], row[1], row[2] or 0) for row in rows}

    async def complete(self, tx: Transaction, lease: Lease) -> bool:
        """Delete a task inside its handler's transaction. False: it was not ours."""
        params = {"id": lease.id, "version": lease.version, "token": lease.token}
        return bool(await self._at(Callers(self.dialect, tx), self._sql.complete, params))

    async def complete_schedule(self, tx: Transaction, lease: Lease, run_at: datetime, payload: str) -> bool:
        """Move a schedule on inside its handler's transaction. False: it was not ours."""
        params = {"id": lease.id, "version": lease.version, "token": lease.token, "run_at": run_at, "payload": payload}
        return bool(await self._at(Callers(self.dialect, tx), self._sql.complete_schedule, params))

    async def insert_schedules(self, conn: Connection, rows: Sequence[tuple[object, ...]], urgency: Urgency) -> None:
        """Make the rows (queue, name, key, payload, priority, run_at) that do not exist yet."""
        await self._own(conn, self._sql.insert_schedules, {"items": sorted(rows, key=lambda row: row[:3])}, urgency)

    async def left(
        self,
        conn: Connection,
        names: Sequence[str] | None,
        schedules: Sequence[tuple[str, str, str]],
        limit: int,
    ) -> list[Left]:
        """Some of the due, unfailed tasks of these names (None: of all)."""
        params = {"names": names, "schedules": schedules, "limit": limit}
        rows = await self._own(conn, self._sql.left, params)
        return [Left(row[0], row[1], bool(row[2])) for row in rows]

    async def insert(self, place: Place, items: Sequence[Item]) -> list[int | None]:
        """Store tasks with one statement. Returns the id of each, None where a live task has the key."""
        if not items:
            return []
        if len(items) == 1 and items[0].key is None:
            return [row[0] for row in await self._at(place, self._sql.insert_one, items[0]._asdict())]
        if items[0].key is None and alike(items):
            params = {**items[0]._asdict(), "payloads": [item.payload for item in items]}
            return ids_in_order(items, await self._at(place, self._sql.insert_alike, params))
        if all(item.key is None for item in items):
            params = {"items": [item[:7] for item in items]}
            return ids_in_order(items, await self._at(place, self._sql.insert, params))
        order = in_lock_order(items)
        in_order = [items[at] for at in order]
        rows = await self._at(place, self._sql.insert_keyed, {"items": in_order})
        ids: list[int | None] = [None] * len(items)
        for at, id in zip(order, ids_in_order(in_order, rows), strict=True):
            ids[at] = id
        return ids

    async def retry(self, place: Place, id: int, run_at: datetime | None, payload: str | None) -> Repaired | None:
        """Set a failed task free. None: there was none, or (SQLite) its key is taken."""
        rows = await self._at(place, self._sql.retry, {"id": id, "run_at": run_at, "payload": payload})
        return repaired_of(rows[0]) if rows else None

    async def retry_all(
        self,
        place: Place,
        *,
        name: str | None,
        queue: str | None,
        error_like: str | None,
        limit: int,
    ) -> list[Repaired]:
        """Set failed tasks free, the longest failed first."""
        params = {"name": name, "queue": queue, "error_like": error_like, "limit": limit}
        return [repaired_of(row) for row in await self._at(place, self._sql.retry_all, params)]

    async def reschedule(self, place: Place, id: int, run_at: datetime | None) -> str | None:
        """Move a waiting task. Returns its queue."""
        rows = await self._at(place, self._sql.reschedule, {"id": id, "run_at": run_at})
        return rows[0][1] if rows else None

    async def disable(self, place: Place, id: int) -> bool:
        """Park a waiting task."""
        return bool(await self._at(place, self._sql.disable, {"id": id}))

    async def delete(self, place: Place, id: int) -> bool:
        """Delete a task in any state."""
        return bool(await self._at(place, self._sql.delete, {"id": id}))

    async def get(self, place: Place, id: int) -> TaskRow | None:
        """One row."""
        rows = await self._at(place, self._sql.get, {"id": id})
        return row_of(rows[0]) if rows else None

    async def find(
        self,
        place: Place,
        *,
        state: State | None,
        name: str | None,
        queue: str | None,
        key: str | None,
        limit: int,
        after: int,
    ) -> list[TaskRow]:
        """Rows by id."""
        statement = self._sql.find_failed if state == "failed" else self._sql.find
        params = {"state": state, "name": name, "queue": queue, "key": key, "limit": limit, "after": after}
        return [row_of(row) for row in await self._at(place, statement, params)]


def claimed_of(row: Row, queue: str, token: int) -> Claimed:
    """A row of the claim's RETURNING."""
    id, version, name, key, scheduled, priority, run_at, attempt, lost, payload, headers, now = row
    lease = Lease(id, version, token)
    return Claimed(lease, queue, name, key, bool(scheduled), priority, run_at, attempt, lost, payload, headers, now)


def repaired_of(row: Row) -> Repaired:
    """A row of RETURNING after `retry`."""
    return Repaired(row[0], row[1], row[2], row[3], parse_headers(row[4]))


def row_of(row: Row) -> TaskRow:
    """A row of `get` or `find`. A payload that is not JSON (someone wrote it by hand) is shown as its text."""
    (
        id,
        queue,
        name,
        key,
        state,
        scheduled,
        priority,
        payload,
        headers,
        created_at,
        run_at,
        attempt,
        lost,
        node,
        locked_until,
        failed_at,
        finished_at,
        error,
    ) = row
    try:
        parsed: Any = _json.loads(payload)
    except ValueError:
        parsed = payload
    return TaskRow(
        id=id,
        queue=queue,
        name=name,
        key=key,
        state=state,
        scheduled=bool(scheduled),
        priority=priority,
        payload=parsed,
        headers=parse_headers(headers),
        created_at=created_at,
        run_at=run_at,
        attempt=attempt,
        lost=lost,
        node=node,
        locked_until=locked_until,
        failed_at=failed_at,
        finished_at=finished_at,
        error=error,
    )
