"""workq, on either database.

Default settings, but for the pool: `enqueue(None, ...)` takes a connection for as long as its INSERT needs, and more
than 20 of them only get in each other's way on two cores.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import measure
import workq

ran = measure.Runs()


@workq.handler("noop")
async def noop(task: workq.Task[dict[str, str]]) -> None:
    ran()


@asynccontextmanager
async def contender(url: str, places: int) -> AsyncGenerator[measure.Contender]:
    async with workq.connect(url, pool_size=20) as db:
        queue = workq.Queue(db)
        await queue.migrate()

        async def enqueue_many(tasks: int) -> None:
            await queue.enqueue_many(None, [workq.NewTask(noop, {"text": measure.TEXT}) for _ in range(tasks)])

        async def recorded() -> bool:
            return not await queue.find(limit=1)

        yield measure.Contender(
            enqueue=lambda: queue.enqueue(None, noop, {"text": measure.TEXT}),
            enqueue_many=enqueue_many,
            worker=lambda: workq.Executor(queue, [noop], workers=places),
            recorded=recorded,
        )


if __name__ == "__main__":
    measure.main("workq", contender, ran)
