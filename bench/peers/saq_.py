"""saq with its PostgreSQL broker, on psycopg 3 with its C speed-ups.

* `concurrency` is the number of places; a pool with a connection for each of them, up to 20. The pool is given, because
  the one that saq makes checks a connection with a round trip whenever it is taken.
* `ttl=-1`: an ended job is one DELETE instead of an UPDATE, and the table stays small. `timeout=0`: no timers.
* It has no bulk call, so all jobs are enqueued one by one, each with a NOTIFY of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import measure

saq = measure.module("saq")
brokers = measure.module("saq.queue.postgres")
pools = measure.module("psycopg_pool")
ran = measure.Runs()


async def noop(context: object, *, text: str) -> None:
    ran()


@asynccontextmanager
async def contender(url: str, places: int) -> AsyncGenerator[measure.Contender]:
    most = min(places, 20) + 4
    pool: Any = pools.AsyncConnectionPool(url, min_size=1, max_size=most, open=False)
    queue: Any = brokers.PostgresQueue(pool, min_size=1, max_size=most, manage_pool_lifecycle=True)
    await queue.connect()

    @asynccontextmanager
    async def worker() -> AsyncGenerator[None]:
        worker: Any = saq.Worker(queue, [noop], concurrency=places)
        worker.SIGNALS = []
        running = asyncio.create_task(worker.start())
        yield
        await worker.stop()
        await running

    async def recorded() -> bool:
        async with queue.pool.connection() as conn:
            cursor = await conn.execute("select not exists (select from saq_jobs)")
            (over,) = await cursor.fetchone()
        return over

    yield measure.Contender(
        enqueue=lambda: queue.enqueue("noop", text=measure.TEXT, ttl=-1, timeout=0),
        enqueue_many=None,
        worker=worker,
        recorded=recorded,
    )
    await queue.disconnect()


if __name__ == "__main__":
    measure.main("saq", contender, ran)
