"""clean stop, inside a cancelled anyio scope: there every plain await fails, as in a stream whose client has left."""

from __future__ import annotations

import asyncio

import anyio

import workq
from support import Database, Events, Runs


async def test_leaving_an_executor_in_a_cancelled_scope_stops_it_in_order(database: Database) -> None:
    events, runs = Events(), Runs()

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        executor = workq.Executor(queue, [work], poll_interval=0.1, stop_timeout=5)
        with anyio.CancelScope() as scope:
            async with executor:
                await queue.enqueue(None, work, 1)
                await runs.until(lambda: bool(runs.running))
                asyncio.get_running_loop().call_later(0.05, runs.go.set)
                scope.cancel()
        assert not executor.health().ok
        assert events.kinds() == ["enqueued", "started", "completed"]
        assert await queue.find() == []


async def test_leaving_connect_in_a_cancelled_scope_stores_what_was_to_be_stored_soon(database: Database) -> None:
    with anyio.CancelScope() as scope:
        async with database.open() as db:
            queue = workq.Queue(db)
            await queue.migrate()
            queue.enqueue_soon("later", {"a": 1})
            scope.cancel()
    assert await database.rows("select name from {table}") == [("later",)]
