"""The worker process: `python -m signup.worker`."""
import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

import workq

from . import tasks


class Smtp:
    async def send(self, to: str, text: str) -> None:
        print(to, text)


@asynccontextmanager
async def executors() -> AsyncGenerator[list[workq.Executor]]:
    url = os.environ["DATABASE_URL"]
    engine = create_async_engine(url)
    sessions = async_sessionmaker(engine)
    try:
        async with workq.connect(url) as db:
            queue = workq.Queue(db, on_event=[print])
            maintenance = tasks.maintenance_handlers(sessions)
            yield [
                workq.Executor(queue, tasks.mail_handlers(Smtp()), workers=4),
                workq.Executor(queue, tasks.order_handlers(queue, sessions), workers=32),
                workq.Executor(queue, maintenance, workers=1, schedules=[]),
            ]
    finally:
        await engine.dispose()


async def main() -> None:
    async with executors() as running:
        await workq.serve(*running)


if __name__ == "__main__":
    asyncio.run(main())
