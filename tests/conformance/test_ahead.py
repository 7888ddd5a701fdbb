"""Claiming ahead: quick handlers get more than the free places, and nobody suffers from it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import workq
from support import SOON, Database, Events, Runs, eventually, hooked

RARELY: dict[str, Any] = {"workers": 4, "poll_interval": 20, "lease": 30}


@workq.handler("quick")
async def quick(task: workq.Task) -> None:
    """Ends at once, so that an executor learns to claim ahead."""


async def many(queue: workq.Queue, target: workq.Target, number: int) -> list[int]:
    """Store so many."""
    ids = await queue.enqueue_many(None, [workq.NewTask(target) for _ in range(number)])
    return [id for id in ids if id is not None]


async def held_by(queue: workq.Queue) -> int:
    """How many rows have a live lease."""
    return len(await queue.find(state="running", limit=1000))


async def test_quick_tasks_are_claimed_ahead_and_all_run_once(database: Database) -> None:
    """no loss, fence."""
    events = Events()
    async with hooked(database, events) as queue:
        ids = await many(queue, quick, 3000)
        async with workq.Executor(queue, [quick], workers=2):
            await queue.wait(timeout=SOON)
    assert Counter(event.id for event in events if event.kind == "started") == Counter(ids)
    assert Counter(event.id for event in events if event.kind == "completed") == Counter(ids)


async def test_one_worker_starts_tasks_by_priority_and_time_however_many_it_has_claimed(database: Database) -> None:
    """A single node's order, with tasks that come while others wait for a place."""
    order: list[int] = []
    async with hooked(database) as queue:

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None:
            order.append(task.payload)

        numbers = [number * 7 % 600 for number in range(600)]
        tasks = [workq.NewTask(note, number, priority=number % 5) for number in numbers]
        await queue.enqueue_many(None, tasks)
        async with workq.Executor(queue, [note], workers=1):
            await queue.wait(timeout=SOON)
    assert order == sorted(numbers, key=lambda number: (number % 5, numbers.index(number)))


async def test_what_waits_behind_slow_handlers_is_handed_back_to_whoever_is_free(database: Database) -> None:
    """The other node polls rarely: it hears of it."""
    async with hooked(database) as queue, database.open() as db:
        other, runs, elsewhere = workq.Queue(db), Runs(), Runs()

        def handlers(of: Runs) -> list[workq.Handler[Any, Any]]:
            @workq.handler("slow")
            async def slow(task: workq.Task) -> None:
                await of.hold(task.id)

            return [quick, slow]

        async with workq.Executor(queue, handlers(runs), **RARELY):
            # Slow ones of less urgency come while quick ones are still claimed ahead.
            await queue.enqueue_many(
                None,
                [workq.NewTask("quick") for _ in range(4000)] + [workq.NewTask("slow", priority=1) for _ in range(8)],
            )
            async with workq.Executor(other, handlers(elsewhere), **RARELY):

                async def shared() -> bool:
                    return len(runs.running) == len(elsewhere.running) == 4

                await eventually(shared)
                runs.go.set()
                elsewhere.go.set()
                await queue.wait(timeout=SOON)
    assert Counter(runs.started + elsewhere.started).most_common(1)[0][1] == 1


async def test_stop_hands_back_what_was_claimed_ahead(database: Database) -> None:
    """clean stop."""
    events = Events()
    async with hooked(database, events) as queue:
        ids = await many(queue, quick, 5000)
        executor = workq.Executor(queue, [quick], workers=1)
        await executor.start()
        await events.until("completed", 500)
        await executor.stop()
        left = await queue.find(limit=10_000)
    assert {row.id for row in left} | {event.id for event in events if event.kind == "completed"} == set(ids)
    assert {(row.state, row.attempt, row.lost) for row in left} <= {("waiting", 0, 0)}


async def test_while_a_recovered_task_runs_nothing_is_claimed_ahead(database: Database) -> None:
    """It may kill this process, too, and must not take others along."""
    async with hooked(database) as queue:
        runs = Runs()

        @workq.handler("suspicious")
        async def suspicious(task: workq.Task) -> None:
            await runs.hold("suspicious")

        id = await queue.enqueue(None, suspicious)
        assert id is not None
        await database.rows(f"update {{table}} set lost = 1 where id = {id}")
        await many(queue, quick, 1000)
        async with workq.Executor(queue, [quick, suspicious], workers=2):
            await runs.until(lambda: bool(runs.running))
            most = 0

            async def done() -> bool:
                nonlocal most
                most = max(most, await held_by(queue))
                return await queue.find(target=quick, limit=1) == []

            await eventually(done, timeout=2 * SOON)
            assert most < 50  # two that run, and those whose end is being written
            runs.go.set()


async def test_tasks_that_take_as_long_as_others_wait_start_without_a_poll(database: Database) -> None:
    """A place becomes free just when what waits for it is handed back."""
    async with hooked(database) as queue:

        @workq.handler("nap")
        async def nap(task: workq.Task[float]) -> None:
            await asyncio.sleep(task.payload)

        async with workq.Executor(queue, [quick, nap], workers=1, poll_interval=20):
            for seconds in (0.1195, 0.12, 0.1205):
                tasks = [workq.NewTask(quick) for _ in range(1500)]
                naps = [workq.NewTask(nap, seconds, priority=1) for _ in range(3)]
                began = time.monotonic()
                await queue.enqueue_many(None, [*tasks, *naps])
                await queue.wait(timeout=SOON)
                assert time.monotonic() - began < SOON / 2
