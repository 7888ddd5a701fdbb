"""Tasks that keep coming while the database does not, and what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import workq
from support import SOON, Database, Events
from workq.dialect import Dialect


class Flow:
    """A producer that never tires, and executors that run what it makes."""

    def __init__(self) -> None:
        self.events = Events()
        self.queues: list[workq.Queue] = []
        self.executors: list[workq.Executor] = []
        self.enqueued: set[int] = set()
        self.failures: list[Exception] = []
        self.started: list[tuple[float, int]] = []
        """When, and which."""
        self._came = asyncio.Event()
        self._enough = asyncio.Event()

    async def produce(self) -> None:
        """Enqueue a task every few milliseconds; what the database refuses is noted, and the next one comes."""
        number = 0
        while not self._enough.is_set():
            try:
                id = await self.queues[0].enqueue(None, "work", number)
                assert id is not None
                self.enqueued.add(id)
            except Exception as error:  # whatever it is, it is looked at by the test
                self.failures.append(error)
            number += 1
            await asyncio.sleep(0.005)

    async def work(self, task: workq.Task[object]) -> None:
        """The handler."""
        self.started.append((time.monotonic(), task.id))
        self._came.set()
        await asyncio.sleep(0.02)

    async def runs(self, since: float, timeout: float = SOON) -> float:
        """Wait until a task was started that had not been at `since`; how long after is returned."""
        async with asyncio.timeout(timeout):
            while not self.started or self.started[-1][0] <= since:
                self._came.clear()
                await self._came.wait()
        return next(at for at, _ in self.started if at > since) - since

    async def end(self) -> None:
        """Produce no more, and wait until all is done."""
        self._enough.set()
        await self.queues[0].wait(timeout=2 * SOON)

    async def healthy(self) -> bool:
        """Every executor has just claimed with success."""
        every = [executor.health() for executor in self.executors]
        return all(one.ok and one.reachable and one.claimed_ago is not None and one.claimed_ago < 1 for one in every)

    def completed(self) -> list[int]:
        """The ids of all accepted results."""
        return [event.id for event in self.events if event.kind == "completed"]


@asynccontextmanager
async def flow(
    database: Database,
    *urls: str,
    opened: Callable[[str], AbstractAsyncContextManager[Dialect]] | None = None,
    **options: Any,
) -> AsyncGenerator[Flow]:
    """Two executors (or one for each URL), each with connections of its own, and a producer beside the first.

    opened: how a URL is opened, if not simply by `workq.connect`.
    """
    flow = Flow()
    settings: dict[str, Any] = {"poll_interval": 0.2, "lease": 10, "stop_timeout": 2} | options
    handler = workq.handler("work")(flow.work)
    async with AsyncExitStack() as stack:
        for url in urls or (database.url, database.url):
            db = await stack.enter_async_context(opened(url) if opened else workq.connect(url, schema=database.schema))
            queue = workq.Queue(db, on_event=[flow.events])
            await queue.migrate()
            flow.queues.append(queue)
            executor = workq.Executor(queue, [handler], workers=4, **settings)
            await stack.enter_async_context(executor)
            flow.executors.append(executor)
        async with asyncio.TaskGroup() as group:
            group.create_task(flow.produce())
            try:
                yield flow
            finally:
                flow._enough.set()  # pyright: ignore[reportPrivateUsage]
