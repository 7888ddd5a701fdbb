"""What the tests stand on: a database of either kind, and small ways to see and to wait."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import aiosqlite
import asyncpg

import workq
from workq.dialect import Dialect, Interrupted, Params, Rows, Statement, Urgency

SOON = 10.0
"""Seconds after which a test gives up waiting for what must happen. No test passes by it."""


class Caller(Protocol):
    """An application's connection with an open transaction."""

    tx: workq.Transaction

    async def execute(self, sql: str) -> None:
        """Run one statement of the application's own."""
        ...

    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...


class Database(Protocol):
    """A database with a table of its own for one test."""

    url: str
    schema: str | None
    table: str
    """Qualified and quoted."""

    def open(self, **options: Any) -> AbstractAsyncContextManager[Dialect]:
        """workq.connect, with this test's schema."""
        ...

    def caller(self) -> AbstractAsyncContextManager[Caller]:
        """An application's connection, its transaction begun; rolled back unless the test commits."""
        ...

    async def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement beside everything else, committed. `{table}` is filled in."""
        ...

    async def age(self, id: int, seconds: float) -> None:
        """Let time pass for one task: it was due, and its lease ends, so much earlier."""
        ...


class PostgresDatabase:
    """A schema of its own on the session's server, perhaps behind a pooler in transaction mode."""

    def __init__(self, url: str, schema: str, *, pooled: bool = False) -> None:
        self.url = url
        self.options: dict[str, Any] = {"listen": False} if pooled else {}
        """What `workq.connect` needs."""
        self.driver_options: dict[str, Any] = {"statement_cache_size": 0} if pooled else {}
        """What asyncpg needs."""
        self.schema: str | None = schema
        self.table = f'"{schema}"."workq"'

    def open(self, **options: Any) -> AbstractAsyncContextManager[Dialect]:
        return workq.connect(self.url, schema=self.schema, **self.options, **options)

    @asynccontextmanager
    async def caller(self) -> AsyncGenerator[Caller]:
        conn = await asyncpg.connect(self.url, **self.driver_options)
        try:
            await conn.execute("begin")
            yield PostgresCaller(conn)
        finally:
            await conn.close()

    async def rows(self, sql: str) -> list[tuple[Any, ...]]:
        conn = await asyncpg.connect(self.url, **self.driver_options)
        try:
            return [tuple(row) for row in await conn.fetch(sql.replace("{table}", self.table))]
        finally:
            await conn.close()

    async def age(self, id: int, seconds: float) -> None:
        await self.rows(
            f"update {{table}} set run_at = run_at - interval '{seconds} s', "
            f"locked_until = locked_until - interval '{seconds} s' where id = {id}"
        )


class PostgresCaller:
    def __init__(self, conn: asyncpg.Connection[Any]) -> None:
        self._conn = conn
        self.tx = cast(workq.Transaction, conn)

    async def execute(self, sql: str) -> None:
        await self._conn.execute(sql)

    async def commit(self) -> None:
        await self._conn.execute("commit")

    async def rollback(self) -> None:
        await self._conn.execute("rollback")


class SQLiteDatabase:
    """A file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self.schema: str | None = None
        self.table = '"main"."workq"'

    def open(self, **options: Any) -> AbstractAsyncContextManager[Dialect]:
        return workq.connect(self.url, **options)

    @asynccontextmanager
    async def caller(self) -> AsyncGenerator[Caller]:
        async with aiosqlite.connect(self.path) as conn:
            await conn.execute("begin immediate")
            yield SQLiteCaller(conn)

    async def rows(self, sql: str) -> list[tuple[Any, ...]]:
        async with aiosqlite.connect(self.path, isolation_level=None) as conn:
            return [tuple(row) for row in await conn.execute_fetchall(sql.replace("{table}", self.table))]

    async def age(self, id: int, seconds: float) -> None:
        micros = int(seconds * 1e6)
        await self.rows(
            f"update {{table}} set run_at = run_at - {micros}, locked_until = locked_until - {micros} where id = {id}"
        )


class SQLiteCaller:
    def __init__(self, conn: aiosqlite.Connection) -> None:
        self._conn = conn
        self.tx = cast(workq.Transaction, conn)

    async def execute(self, sql: str) -> None:
        await self._conn.execute(sql)

    async def commit(self) -> None:
        await self._conn.commit()

    async def rollback(self) -> None:
        await self._conn.rollback()


class Events(list[workq.Event]):
    """A hook that remembers, and can be waited on."""

    def __init__(self) -> None:
        super().__init__()
        self._came = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, event: workq.Event) -> None:
        self.append(event)
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._came:
            self._came.notify_all()

    def kinds(self) -> list[str]:
        return [event.kind for event in self]

    def count(self, kind: str) -> int:  # type: ignore[override]
        return sum(event.kind == kind for event in self)

    async def until(self, kind: str, number: int = 1, timeout: float = SOON) -> workq.Event:
        """Wait until `number` events of a kind came, and return the last of them."""
        async with asyncio.timeout(timeout), self._came:
            await self._came.wait_for(lambda: self.count(kind) >= number)
        return [event for event in self if event.kind == kind][number - 1]


class Runs:
    """Counts starts by payload, and lets a test hold handlers where it wants them."""

    def __init__(self) -> None:
        self.started: Counter[Any] = Counter()
        self.order: list[Any] = []
        self.running: set[Any] = set()
        self.go = asyncio.Event()
        self._came = asyncio.Event()

    async def hold(self, payload: Any) -> None:
        """For a handler: say that it runs, and wait for `go`."""
        self.started[payload] += 1
        self.order.append(payload)
        self.running.add(payload)
        self._came.set()
        try:
            await self.go.wait()
        finally:
            self.running.discard(payload)
            self._came.set()

    async def until(self, fact: Callable[[], bool], timeout: float = SOON) -> None:
        """Wait until a fact holds, looking whenever a handler begins or ends."""
        async with asyncio.timeout(timeout):
            while not fact():
                self._came.clear()
                await self._came.wait()


async def eventually(fact: Callable[[], Awaitable[object]], timeout: float = SOON) -> None:
    """Wait until a look at the outside world is true."""
    async with asyncio.timeout(timeout):
        for pause in itertools.chain((0.001, 0.002, 0.005, 0.01), itertools.repeat(0.02)):
            if await fact():
                return
            await asyncio.sleep(pause)


@asynccontextmanager
async def hooked(database: Database, *hooks: workq.Hook, **options: Any) -> AsyncGenerator[workq.Queue]:
    """A migrated queue with hooks (and options of Queue) of the test's own."""
    async with database.open() as db:
        queue = workq.Queue(db, on_event=hooks, **options)
        await queue.migrate()
        yield queue


class Replies(Protocol):
    """What a test does with the reply to a statement: it is called when the database has done it."""

    def __call__(self, rows: Rows) -> Awaitable[Rows]: ...


class Wire:
    """The database behind a wire that a test can hold up: every statement is done, its reply may be late or lost."""

    def __init__(self, db: Dialect) -> None:
        self._db = db
        self.sql = db.sql
        self.replies: dict[Statement, Replies] = {}
        self.asked: Counter[Statement] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def connection(self, purpose: str, *, first: bool = False) -> WiredConnection:
        return WiredConnection(self, self._db.connection(purpose, first=first))


class WiredConnection:
    def __init__(self, wire: Wire, connection: Any) -> None:
        self._wire = wire
        self._connection = connection

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        self._wire.asked[statement] += 1
        rows: Rows = await self._connection.fetch(statement, params, urgency)
        reply = self._wire.replies.get(statement)
        return rows if reply is None else await reply(rows)

    async def close(self) -> None:
        await self._connection.close()


@asynccontextmanager
async def wired_queue(database: Database, *hooks: workq.Hook) -> AsyncGenerator[tuple[Wire, workq.Queue]]:
    """A migrated queue behind a wire."""
    async with database.open() as db:
        wire = Wire(db)
        queue = workq.Queue(cast(Dialect, wire), on_event=hooks)
        await queue.migrate()
        yield wire, queue


class HeldReply:
    """A reply with rows that waits until the test lets it go."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, rows: Rows) -> Rows:
        if rows:
            self.sent.set()
            await self.go.wait()
        return rows


class DroppedReply:
    """The first reply with rows is lost with its connection."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self, rows: Rows) -> Rows:
        if rows and not self.times:
            self.times += 1
            raise Interrupted("the connection broke") from ConnectionResetError("by the test")
        return rows


@asynccontextmanager
async def session(database: Database) -> AsyncGenerator[Caller]:
    """An application's connection for many transactions, each begun by `execute("begin")`. It waits for its turn."""
    async with database.caller() as app:
        await app.rollback()
        if isinstance(app, SQLiteCaller):
            await app.execute("pragma busy_timeout = 600000")
        yield app


def told(events: Events, id: int | None = None) -> list[str]:
    """The kinds of the events (of one task), "enqueued" first: a run may begin before its INSERT is answered."""
    kinds = [event.kind for event in events if id is None or event.id == id]
    return sorted(kinds, key=lambda kind: kind != "enqueued")
