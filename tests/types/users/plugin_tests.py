from collections.abc import AsyncGenerator

import pytest_asyncio

import workq
import workq.testing


@workq.handler("a")
async def a(task: workq.Task[int]) -> workq.Result:
    if task.attempt < 3:
        raise workq.Retry("not yet", after=0)
    return workq.Done()


@pytest_asyncio.fixture
async def queue() -> AsyncGenerator[workq.Queue]:
    async with workq.testing.queue() as queue, workq.Executor(queue, [a], stop_timeout=1):
        yield queue


async def test_a(queue: workq.Queue) -> None:
    await queue.enqueue(None, a, 3)
    await queue.wait(a, timeout=5)
