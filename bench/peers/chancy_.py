"""chancy, on psycopg 3 with its C speed-ups.

* The asyncio executor (the default one starts processes), `concurrency` is the number of places.
* `eager_polling`: it asks for more as soon as a job has ended, not after the polling interval.
* No plugins: the default ones keep metrics, workflows and a leader, and are called around each job.
* `send_outgoing_interval` 0.05 instead of 1 second: ended jobs are written down in batches that often.
* It has no bulk statement: `push_many` commits once for each thousand, and inserts one by one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import measure

chancy = measure.module("chancy")
workers = measure.module("chancy.worker")
ran = measure.Runs()


async def noop(*, text: str) -> None:
    ran()


@asynccontextmanager
async def contender(url: str, places: int) -> AsyncGenerator[measure.Contender]:
    app: Any = chancy.Chancy(
        url, no_default_plugins=True, max_connection_pool_size=min(places, 20) + 3, log=logging.getLogger("chancy")
    )
    job: Any = chancy.Job.from_func(noop, kwargs={"text": measure.TEXT})
    async with app:
        await app.migrate()
        await app.declare(
            chancy.Queue("default", concurrency=places, executor=chancy.Chancy.Executor.Async, eager_polling=True)
        )

        @asynccontextmanager
        async def worker() -> AsyncGenerator[None]:
            worker: Any = workers.Worker(app, register_signal_handlers=False)
            worker.send_outgoing_interval = 0.05
            async with worker:
                yield

        async def enqueue_many(tasks: int) -> None:
            async for _ in app.push_many([job] * tasks):
                pass

        async def recorded() -> bool:
            async with app.pool.connection() as conn:
                cursor = await conn.execute("select not exists (select from chancy_jobs where state <> 'succeeded')")
                (over,) = await cursor.fetchone()
            return over

        yield measure.Contender(
            enqueue=lambda: app.push(job), enqueue_many=enqueue_many, worker=worker, recorded=recorded
        )


if __name__ == "__main__":
    measure.main("chancy", contender, ran)
