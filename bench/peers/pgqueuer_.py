"""pgqueuer, on asyncpg, with the settings of its page on performance tuning.

* `batch_size` is the number of jobs that it takes, runs and writes off at once, so it is the number of places.
  `max_concurrent_tasks` would only add a count of rows to each dequeue.
* A connection of its own for the worker, a pool for the producers.
* Durability "balanced": the jobs stay durable, the log of what ran is not. Autovacuum as `pgq autovac` sets it.
* No aggregation of the log meanwhile.

With `--wide` before the other arguments it takes 1,000 at a time, and runs as many at once, whatever the places.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg

import measure

os.environ["PGQUEUER_DURABILITY"] = "balanced"
applications, drivers, queries = (measure.module(f"pgqueuer.{name}") for name in ("applications", "db", "queries"))
PAYLOAD = b'{"text": "%s"}' % measure.TEXT.encode()
WIDE = "--wide" in sys.argv
ran = measure.Runs()


@asynccontextmanager
async def contender(url: str, places: int) -> AsyncGenerator[measure.Contender]:
    async with asyncpg.create_pool(url, min_size=1, max_size=min(places, 20)) as pool:
        producer: Any = queries.Queries(drivers.AsyncpgPoolDriver(pool))
        await producer.install()
        await producer.optimize_autovacuum()

        @asynccontextmanager
        async def worker() -> AsyncGenerator[None]:
            conn = await asyncpg.connect(url)
            manager: Any = applications.PgQueuer(drivers.AsyncpgDriver(conn))

            @manager.entrypoint("noop")
            async def noop(job: object) -> None:  # pyright: ignore[reportUnusedFunction]
                ran()

            running = asyncio.create_task(
                manager.run(batch_size=1000 if WIDE else places, log_aggregation_interval=timedelta(0))
            )
            yield
            manager.shutdown.set()
            await running
            await conn.close()

        async def recorded() -> bool:
            return bool(await pool.fetchval("select not exists (select from pgqueuer)"))

        async def enqueue_many(tasks: int) -> None:
            await producer.enqueue(["noop"] * tasks, [PAYLOAD] * tasks, [0] * tasks)

        yield measure.Contender(
            enqueue=lambda: producer.enqueue("noop", PAYLOAD),
            enqueue_many=enqueue_many,
            worker=worker,
            recorded=recorded,
        )


if __name__ == "__main__":
    if WIDE:
        sys.argv.remove("--wide")
    measure.main("pgqueuer", contender, ran)
