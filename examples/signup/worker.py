"""The worker process: python -m signup.worker. SIGINT or SIGTERM ends it, when the running handlers have ended."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

import workq

from . import tasks


class Smtp:
    """Stands in for a mail server."""

    async def send(self, to: str, text: str) -> None:
        print(f"{to}: {text}", flush=True)


@asynccontextmanager
async def executors(database_url: str) -> AsyncGenerator[list[workq.Executor]]:
    engine = create_async_engine(database_url)
    sessions = async_sessionmaker(engine)
    cleanup = tasks.cleanup_handler(sessions)
    hourly = workq.Schedule(cleanup, workq.every(hours=1))
    try:
        async with workq.connect(database_url) as db:
            queue = workq.Queue(db)
            yield [
                workq.Executor(queue, tasks.mail_handlers(Smtp()), workers=4),
                workq.Executor(queue, tasks.order_handlers(sessions), workers=8),
                workq.Executor(queue, [cleanup, tasks.resize], workers=1, schedules=[hourly]),
            ]
    finally:
        await engine.dispose()


async def main() -> None:
    async with executors(os.environ["DATABASE_URL"]) as running:
        await workq.serve(*running)


if __name__ == "__main__":
    asyncio.run(main())
