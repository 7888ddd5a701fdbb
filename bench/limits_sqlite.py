"""What aiosqlite alone reaches on workq's table, with workq's settings: WAL, `synchronous=NORMAL`.

All p loops share one connection, which was the faster way for every figure: 16 loops on it commit 14,000 to 15,000
INSERTs a second, on a connection each 10,000; and 8,000 transactions, against 5,500 (each connection has to read again
what another one wrote, and those that meet sleep in SQLite's busy handler).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiosqlite

from common import empty_queue
from measure import TABLE, Measure, pages, rate
from protocol import Claimed, drain

PAYLOAD = '{"number":1}'
LEASE = 30_000_000
"""In microseconds, as are all instants here."""

COMMIT = "insert into bench_commits (one) values (1) on conflict (one) do update set number = number + 1"

INSERT = f"""
insert into {TABLE} (queue, name, payload, headers, priority, run_at, created_at)
values (?1, ?2, ?3, null, 0, ?4, ?4)
returning id
"""

INSERT_MANY = f"""
insert into {TABLE} (queue, name, payload, headers, priority, run_at, created_at)
select ?1, ?2, i.value, null, 0, ?4, ?4
  from json_each(?3) i
returning id
"""

DELETE_MANY = f"delete from {TABLE} where id in (select i.value from json_each(?1) i)"

# W's, with its cursor. Name and priority are constants, so that our index serves the order; W has an index of its own.
CLAIM = f"""
update {TABLE}
   set locked_by = 1, locked_until = ?3 + {LEASE}, version = version + 1
 where id in (
   select id from {TABLE}
    where queue = ?1 and name = ?2 and priority = 0 and failed_at is null
      and run_at <= ?3 and (run_at, id) > (?4, ?5)
      and (locked_until is null or locked_until < ?3)
    order by run_at, id
    limit ?6)
returning id, version, run_at, payload
"""

DELETE = f"delete from {TABLE} where id = ?1 and version = ?2 returning id"


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


@asynccontextmanager
async def connections(
    url: str, p: int, *, synchronous: Literal["normal", "full"] = "normal"
) -> AsyncGenerator[Sequence[aiosqlite.Connection]]:
    """p of them."""
    path = url.removeprefix("sqlite:///")
    opened = [await aiosqlite.connect(path, isolation_level=None) for _ in range(p)]
    try:
        for conn in opened:
            for setting in ("journal_mode = wal", f"synchronous = {synchronous}", f"journal_size_limit = {64 << 20}"):
                await conn.execute_fetchall(f"pragma {setting}")
        yield opened
    finally:
        for conn in opened:
            await conn.close()


async def empty(url: str) -> None:
    """Make the table if it is missing, and take everything out of it, the write-ahead log included."""
    async with empty_queue(url, table=TABLE), connections(url, 1) as (conn,):
        await conn.execute_fetchall(f"delete from {TABLE}")
        await conn.execute_fetchall("vacuum")
        await conn.execute_fetchall("pragma wal_checkpoint(truncate)")


async def one(conn: aiosqlite.Connection, sql: str, *args: object) -> Any:
    """Run a statement, in a single hop to the connection's thread and back. Returns its first row, or None."""
    return next(iter(await conn.execute_fetchall(sql, args)), None)


async def round_trips(url: str, p: int, n: int) -> float:
    """Statements that do nothing: hops to the connection's thread and back."""
    async with connections(url, 1) as (conn,):
        return await rate(p, n, lambda _: one(conn, "select 1"))


async def commits(url: str, p: int, n: int) -> float:
    """Commits that wait for the disk, as they would with `synchronous=FULL`."""
    async with connections(url, 1, synchronous="full") as (conn,):
        await one(conn, "create table if not exists bench_commits (one integer primary key, number integer default 1)")
        return await rate(p, n, lambda _: one(conn, COMMIT))


async def insert(url: str, p: int, n: int) -> float:
    """One INSERT per task, each committed by itself: the limit of `enqueue(None)`."""
    await empty(url)
    async with connections(url, 1) as (conn,):
        return await rate(p, n, lambda _: one(conn, INSERT, "", "noop", PAYLOAD, now()))


async def committed(url: str, p: int, n: int, write: Callable[[aiosqlite.Connection], Awaitable[object]]) -> float:
    """The caller's pattern: begin, `write`, commit, of p loops that take turns on one connection."""
    turn = asyncio.Lock()

    async def once(conn: aiosqlite.Connection) -> None:
        async with turn:
            await conn.execute_fetchall("begin immediate")
            await write(conn)
            await conn.execute_fetchall("commit")

    async with connections(url, 1) as (conn,):
        return await rate(p, n, lambda _: once(conn))


async def insert_in_tx(url: str, p: int, n: int) -> float:
    """One INSERT in a transaction of the caller's: the limit of `enqueue(tx)`."""
    await empty(url)
    return await committed(url, p, n, lambda conn: one(conn, INSERT, "", "noop", PAYLOAD, now()))


async def fill(conn: aiosqlite.Connection, n: int) -> list[int]:
    """Insert n rows in thousands. Returns their ids."""
    ids: list[int] = []
    for page in pages(n):
        texts = json.dumps([PAYLOAD] * page)
        ids += [row[0] for row in await conn.execute_fetchall(INSERT_MANY, ("", "noop", texts, now()))]
    return ids


async def insert_many(url: str, p: int, n: int) -> float:
    """Rows of multi-row INSERTs: the limit of `enqueue_many`."""
    await empty(url)
    async with connections(url, 1) as (conn,):
        return n * await rate(1, 1, lambda _: fill(conn, n))


async def delete_many(url: str, p: int, n: int) -> float:
    """Rows of multi-row DELETEs: the limit of finishing."""
    await empty(url)
    async with connections(url, 1) as (conn,):
        ids = iter(await fill(conn, n))
        batches = iter([json.dumps([next(ids) for _ in range(page)]) for page in pages(n)])
        return n / len(pages(n)) * await rate(1, len(pages(n)), lambda _: one(conn, DELETE_MANY, next(batches)))


async def per_task(url: str, p: int, n: int) -> float:
    """W's protocol: claim up to the free places, every worker deletes its own task."""
    await empty(url)
    async with connections(url, 1) as (conn,):
        await fill(conn, n)
        after = (0, 0)

        async def claim(free: int) -> Sequence[Claimed]:
            nonlocal after
            rows = list(await conn.execute_fetchall(CLAIM, ("", "noop", now(), *after, free)))
            after = max((row[2], row[0]) for row in rows) if len(rows) == free else (0, 0)
            return [(row[0], row[1]) for row in rows]

        return await drain(p, n, claim, lambda _, task: one(conn, DELETE, *task))


async def left(url: str) -> int:
    """How many rows are in the table."""
    async with connections(url, 1) as (conn,):
        return (await one(conn, f"select count(*) from {TABLE}"))[0]


SINGLE: dict[str, Measure] = {
    "round trips": round_trips,
    "durable commits": commits,
    "INSERT": insert,
    "INSERT in a transaction": insert_in_tx,
    "per-task protocol": per_task,
}
MULTI: dict[str, Measure] = {"multi-row INSERT": insert_many, "multi-row DELETE": delete_many}
