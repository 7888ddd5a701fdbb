"""F59, clean stop: nothing is left of many lives and many tasks: tasks, threads, descriptors, connections, memory."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import workq
from support import SOON, Database, PostgresDatabase, eventually, hooked

LINUX = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")
pytestmark = LINUX

MANY = pytest.mark.slow, pytest.mark.timeout(1800)
QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 5}


class Left(NamedTuple):
    """What this process has."""

    tasks: int
    threads: int
    descriptors: int
    connections: int
    """On PostgreSQL, to anything; those of this test's pools and others'."""

    def more_than(self, before: Left, pool: int) -> dict[str, int]:
        """What there is now and was not. A pool may have come to its size meanwhile."""
        most = before._replace(descriptors=before.descriptors + pool, connections=before.connections + pool)
        return {name: now - then for name, now, then in zip(self._fields, self, most, strict=True) if now > then}


async def counted(database: Database) -> Left:
    """Look round. (The look itself is over when it counts.)"""
    connections = 0
    if isinstance(database, PostgresDatabase):
        query = (
            "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
        )
        ((connections,),) = await database.rows(query)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    return Left(len(asyncio.all_tasks()), threading.active_count(), descriptors, connections)


async def nothing_more(database: Database, before: Left, *, pool: int = 0) -> None:
    """Wait until there is no more than before: a server takes a moment to end a session."""
    found: dict[str, int] = {}

    async def looks() -> bool:
        nonlocal found
        found = (await counted(database)).more_than(before, pool)
        return not found

    try:
        await eventually(looks, timeout=5)
    except TimeoutError:
        raise AssertionError(found) from None


def resident() -> int:
    """Kilobytes of memory in use."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


@workq.handler("work")
async def work(task: workq.Task[int]) -> None: ...


@workq.handler("blocks")
def blocks(task: workq.Task[int]) -> None: ...


@workq.handler("fails", retry=workq.linear(retries=1, delay=0))
async def fails(task: workq.Task[int]) -> None:
    if task.attempt == 1:
        raise ValueError


@workq.handler("tick")
async def tick(task: workq.Task) -> None: ...


@pytest.mark.parametrize("rounds", [40, pytest.param(500, marks=MANY)])
async def test_nothing_is_left_of_many_starts_and_stops(database: Database, rounds: int) -> None:
    """F31, F59: with work in between, on a database that stays open."""
    schedules = [workq.Schedule(tick, workq.every(hours=1))]
    async with hooked(database) as queue:

        async def life(number: int) -> None:
            async with workq.Executor(queue, [work, blocks, fails, tick], schedules=schedules, **QUICK):
                for name in ("work", "blocks", "fails"):
                    await queue.enqueue(None, name, number)
                await queue.wait(timeout=SOON)

        for number in range(5):
            await life(number)  # PostgreSQL's pool grows to what it needs
        await asyncio.sleep(0.5)  # the queue's own connection rests
        before = await counted(database)
        for number in range(rounds):
            await life(number)
        await nothing_more(database, before, pool=4)


@pytest.mark.parametrize("rounds", [15, pytest.param(500, marks=MANY)])
async def test_nothing_is_left_of_many_databases_opened_and_closed(database: Database, rounds: int) -> None:
    """F31, F59: each with a queue and an executor of its own."""

    async def life() -> None:
        async with database.open() as db:
            queue = workq.Queue(db)
            await queue.migrate()
            async with workq.Executor(queue, [work], **QUICK):
                await queue.enqueue(None, work, 1)
                await queue.wait(timeout=SOON)

    await life()
    await asyncio.sleep(0.2)
    before = await counted(database)
    for _ in range(rounds):
        await life()
    await nothing_more(database, before)


@pytest.mark.parametrize("rounds", [15, pytest.param(500, marks=MANY)])
async def test_nothing_is_left_of_starts_that_failed(database: Database, rounds: int) -> None:
    """There is no table; or stop() comes before the start has ended."""
    async with database.open() as db:
        queue = workq.Queue(db)

        async def fail() -> None:
            with pytest.raises(workq.SchemaError):
                await workq.Executor(queue, [work], **QUICK).start()

        async def interrupt() -> None:
            starting = asyncio.create_task(workq.Executor(queue, [work], **QUICK).start())
            await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])

        await fail()
        await interrupt()
        await asyncio.sleep(0.3)
        before = await counted(database)
        for _ in range(rounds):
            await fail()
            await interrupt()
        await nothing_more(database, before, pool=4)


async def run_many(queue: workq.Queue, number: int) -> None:
    """In batches, so that the table stays small; all kinds of ends."""
    for first in range(0, number, 1_000):
        kinds: list[Callable[[int], workq.NewTask]] = [
            lambda n: workq.NewTask(work, n),
            lambda n: workq.NewTask(blocks, n),
            lambda n: workq.NewTask(work, n, key=str(n)),
        ]
        size = min(1_000, number - first)
        tasks = [kinds[n % 3](first + n) if n % 50 else workq.NewTask(fails, n) for n in range(size)]
        await queue.enqueue_many(None, tasks)
        await asyncio.gather(*(queue.enqueue(None, work, n) for n in range(20)))
        await queue.wait(timeout=6 * SOON)


@pytest.mark.parametrize("number", [5_000, pytest.param(100_000, marks=MANY)])
async def test_nothing_grows_with_the_number_of_tasks(database: Database, number: int) -> None:
    """F59: 1,000,000 tasks are measured by bench/memory.py, in a process of their own."""
    async with hooked(database) as queue, workq.Executor(queue, [work, blocks, fails], **QUICK):
        await run_many(queue, max(2_000, number // 3))  # memory settles
        await asyncio.sleep(0.5)
        before, kilobytes = await counted(database), resident()
        await run_many(queue, number)
        await nothing_more(database, before, pool=4)
        assert resident() < 1.1 * kilobytes + 2_000
        assert await queue.find() == []
