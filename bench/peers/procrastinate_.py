"""procrastinate, on psycopg 3 with its C speed-ups.

* `concurrency` is the number of places; a pool with a connection for each of them, up to 20.
* `delete_jobs="always"`: a finished job is one DELETE and the table stays small.
* It has no batches: each job is fetched and finished by a statement of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import measure

procrastinate = measure.module("procrastinate")
ran = measure.Runs()


@asynccontextmanager
async def contender(url: str, places: int) -> AsyncGenerator[measure.Contender]:
    connector: Any = procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=min(places, 20) + 2)
    app: Any = procrastinate.App(connector=connector)

    @app.task(name="noop")
    async def noop(text: str) -> None:
        ran()

    task: Any = noop
    async with app.open_async():
        await app.schema_manager.apply_schema_async()

        @asynccontextmanager
        async def worker() -> AsyncGenerator[None]:
            running = asyncio.create_task(
                app.run_worker_async(concurrency=places, delete_jobs="always", install_signal_handlers=False)
            )
            yield
            running.cancel()
            await asyncio.wait([running])

        async def recorded() -> bool:
            row = await connector.execute_query_one_async("select exists (select from procrastinate_jobs) as left")
            return not row["left"]

        async def enqueue_many(tasks: int) -> None:
            await task.batch_defer_async(*[{"text": measure.TEXT}] * tasks)

        yield measure.Contender(
            enqueue=lambda: task.defer_async(text=measure.TEXT),
            enqueue_many=enqueue_many,
            worker=worker,
            recorded=recorded,
        )


if __name__ == "__main__":
    measure.main("procrastinate", contender, ran)
