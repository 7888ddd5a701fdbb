"""What asyncpg alone reaches on workq's table: no decoding, no events, no heartbeat, no retry.

Every loop holds a connection of its own and prepared statements: taking a connection from a pool and giving it back
costs a round trip more. Everything commits durably, as it does by default, W's claim included.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

from common import empty_queue
from measure import TABLE, Measure, pages, rate
from protocol import Claimed, drain

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[Any]

PAYLOAD = '{"number":1}'
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# The smallest commit that waits for the disk: it writes to the log and to no table.
COMMIT = "select pg_logical_emit_message(true, 'bench', '')"

INSERT = f"""
insert into {TABLE} (queue, name, payload, headers, priority, run_at)
values ($1, $2, $3::text::json, null, 0, statement_timestamp())
returning id
"""

INSERT_MANY = f"""
insert into {TABLE} (queue, name, payload, headers, priority, run_at)
select $1, $2, i.payload::json, null, 0, statement_timestamp()
  from unnest($3::text[]) as i(payload)
returning id
"""

DELETE_MANY = f"delete from {TABLE} where id = any($1::bigint[])"

# W's, with its cursor. Name and priority are constants, so that our index serves the order; W has an index of its own.
CLAIM = f"""
update {TABLE}
   set locked_by = 1, locked_until = statement_timestamp() + interval '30 s', version = version + 1
 where id = any(array(
   select id from {TABLE}
    where queue = $1 and name = $2 and priority = 0 and failed_at is null
      and run_at <= statement_timestamp() and (run_at, id) > ($3, $4)
      and (locked_until is null or locked_until < statement_timestamp())
    order by run_at, id
    limit $5
    for update skip locked))
returning id, version, run_at, payload::text
"""

DELETE = f"delete from {TABLE} where id = $1 and version = $2 returning id"


@asynccontextmanager
async def connections(url: str, p: int) -> AsyncGenerator[Sequence[Connection]]:
    """p of them."""
    opened = [await asyncpg.connect(url) for _ in range(p)]
    try:
        yield opened
    finally:
        for conn in opened:
            await conn.close()


async def empty(url: str) -> None:
    """Make the table if it is missing, and take everything out of it, dead rows included."""
    async with empty_queue(url, table=TABLE), connections(url, 1) as (conn,):
        await conn.execute(f"truncate {TABLE}")


async def repeated(url: str, p: int, n: int, sql: str, *args: object) -> float:
    """One statement again and again, in a transaction of its own each time."""
    async with connections(url, p) as conns:
        ready = [await conn.prepare(sql) for conn in conns]
        return await rate(p, n, lambda which: ready[which].fetchval(*args))


async def round_trips(url: str, p: int, n: int) -> float:
    """Statements that do nothing."""
    return await repeated(url, p, n, "select 1")


async def commits(url: str, p: int, n: int) -> float:
    """Commits that wait for the disk."""
    return await repeated(url, p, n, COMMIT)


async def insert(url: str, p: int, n: int) -> float:
    """One INSERT per task, each committed by itself: the limit of `enqueue(None)`."""
    await empty(url)
    return await repeated(url, p, n, INSERT, "", "noop", PAYLOAD)


async def committed(url: str, p: int, n: int, write: Callable[[Connection], Awaitable[object]]) -> float:
    """The caller's pattern: begin, `write`, commit, on p connections."""

    async def once(conn: Connection) -> None:
        async with conn.transaction():
            await write(conn)

    async with connections(url, p) as conns:
        return await rate(p, n, lambda which: once(conns[which]))


async def insert_in_tx(url: str, p: int, n: int) -> float:
    """One INSERT in a transaction of the caller's: the limit of `enqueue(tx)`."""
    await empty(url)
    return await committed(url, p, n, lambda conn: conn.fetchval(INSERT, "", "noop", PAYLOAD))


async def fill(conn: Connection, n: int) -> list[int]:
    """Insert n rows in thousands. Returns their ids."""
    ready = await conn.prepare(INSERT_MANY)
    return [row[0] for page in pages(n) for row in await ready.fetch("", "noop", [PAYLOAD] * page)]


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
        ready = await conn.prepare(DELETE_MANY)
        batches = iter([[next(ids) for _ in range(page)] for page in pages(n)])
        return n / len(pages(n)) * await rate(1, len(pages(n)), lambda _: ready.fetch(next(batches)))


async def per_task(url: str, p: int, n: int) -> float:
    """W's protocol: claim up to the free places, every worker deletes its own task."""
    await empty(url)
    async with connections(url, p + 1) as (claimer, *workers):
        await fill(claimer, n)
        ready = await claimer.prepare(CLAIM)
        deletes = [await worker.prepare(DELETE) for worker in workers]
        after: tuple[datetime, int] = (EPOCH, 0)

        async def claim(free: int) -> Sequence[Claimed]:
            nonlocal after
            rows = await ready.fetch("", "noop", *after, free)
            after = max((row[2], row[0]) for row in rows) if len(rows) == free else (EPOCH, 0)
            return [(row[0], row[1]) for row in rows]

        return await drain(p, n, claim, lambda which, task: deletes[which].fetchval(*task))


async def left(url: str) -> int:
    """How many rows are in the table."""
    async with connections(url, 1) as (conn,):
        return await conn.fetchval(f"select count(*) from {TABLE}")


SINGLE: dict[str, Measure] = {
    "round trips": round_trips,
    "durable commits": commits,
    "INSERT": insert,
    "INSERT in a transaction": insert_in_tx,
    "per-task protocol": per_task,
}
MULTI: dict[str, Measure] = {"multi-row INSERT": insert_many, "multi-row DELETE": delete_many}
