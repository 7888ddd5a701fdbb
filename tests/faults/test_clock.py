"""Time: one clock decides, whatever the others say, and whatever it does itself."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import workq
from support import SOON, Database, Events, PostgresDatabase, Runs, SQLiteDatabase, eventually
from workq._clock import Clock

MINUTES = 60.0


class Skewed(Clock):
    """A wall clock that is wrong, and may become wrong by another amount at any time."""

    def __init__(self, seconds: float = 0) -> None:
        self.ahead = timedelta(seconds=seconds)

    def now(self) -> datetime:
        return super().now() + self.ahead

    def jump(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)


def give(queue: workq.Queue, clock: Clock) -> workq.Queue:
    """Have a queue, and the executors that are made on it afterwards, take another clock for the machine's."""
    queue.hub.clock = queue.hub.store.clock = clock
    return queue


async def test_nodes_whose_clocks_are_wrong_start_nothing_early_and_steal_nothing(postgres: PostgresDatabase) -> None:
    """F46: plus and minus ten minutes, on PostgreSQL."""
    started: list[tuple[str, float]] = []
    events = Events()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        started.append((task.payload, time.time()))
        # Live tasks for several leases, so that there is something to steal.
        await asyncio.sleep(2.5 if task.payload.startswith("long") else 0)

    async with AsyncExitStack() as stack:
        queues: list[workq.Queue] = []
        for minutes in (-10, 0, 10):
            db = await stack.enter_async_context(postgres.open())
            queues.append(give(workq.Queue(db, on_event=[events]), Skewed(minutes * MINUTES)))
        await queues[0].migrate()
        for queue in queues:
            executor = workq.Executor(queue, [work], workers=4, lease=0.6, poll_interval=0.05)
            await stack.enter_async_context(executor)
        for number, queue in enumerate(queues):
            await queue.enqueue_many(None, [workq.NewTask(work, f"long {number} {n}") for n in range(3)])
            await queue.enqueue_many(None, [workq.NewTask(work, f"late {number} {n}", delay=1.5) for n in range(3)])
            at = datetime.fromtimestamp(time.time(), UTC) + timedelta(seconds=1.5)
            await queue.enqueue_many(None, [workq.NewTask(work, f"at {number} {n}", run_at=at) for n in range(3)])
        enqueued = time.time()
        due = {row.payload: row.run_at.timestamp() for row in await queues[0].find()}
        await events.until("completed", 27)
    assert len(due) == 27
    assert max(due.values()) < enqueued + 2
    assert sorted(payload for payload, _ in started) == sorted(due)
    assert [payload for payload, at in started if at < due[payload]] == []
    assert events.count("lost") == 0


async def test_schedules_go_by_the_databases_clock(postgres: PostgresDatabase) -> None:
    """F46: the first run and the next, on a node that is ten minutes ahead."""
    events = Events()

    @workq.handler("tick")
    async def tick(task: workq.Task) -> None: ...

    async with postgres.open() as db:
        queue = give(workq.Queue(db, on_event=[events]), Skewed(10 * MINUTES))
        await queue.migrate()
        before = time.time()
        schedule = workq.Schedule(tick, workq.every(hours=1))
        async with workq.Executor(queue, [tick], schedules=[schedule], poll_interval=0.05):
            (row,) = await queue.find()
            assert before <= row.run_at.timestamp() - 3600 <= time.time()
            await postgres.age(row.id, 3600)
            await events.until("completed")
            (row,) = await queue.find()
            assert before <= row.run_at.timestamp() - 3600 <= time.time()


async def test_a_clock_that_jumps_makes_nobody_steal_live_tasks(sqlite: SQLiteDatabase) -> None:
    """F47: two nodes of one machine, whose wall clock steps ahead by an hour, and back by two."""
    clock, runs, events = Skewed(), Runs(), Events()

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with AsyncExitStack() as stack:
        queues: list[workq.Queue] = []
        for _ in range(2):
            db = await stack.enter_async_context(sqlite.open())
            queues.append(give(workq.Queue(db, on_event=[events]), clock))
        await queues[0].migrate()
        await queues[0].enqueue_many(None, [workq.NewTask(work, n) for n in range(8)])
        options: dict[str, Any] = {"lease": 0.9, "poll_interval": 0.1}
        await stack.enter_async_context(workq.Executor(queues[0], [work], workers=8, **options))
        await runs.until(lambda: len(runs.running) == 8)
        await stack.enter_async_context(workq.Executor(queues[1], [work], workers=8, **options))
        for jump in (3600, -7200, 3600):
            clock.jump(jump)
            await asyncio.sleep(1.2)
        runs.go.set()
        await events.until("completed", 8)
    assert runs.started == dict.fromkeys(range(8), 1)
    assert events.count("lost") == 0


async def test_a_clock_that_steps_back_does_not_run_again_what_was_run(sqlite: SQLiteDatabase) -> None:
    """F47: the minute that was handled is not handled twice."""
    clock, events = Skewed(), Events()

    @workq.handler("tick")
    async def tick(task: workq.Task) -> None: ...

    async with sqlite.open() as db:
        queue = give(workq.Queue(db, on_event=[events]), clock)
        await queue.migrate()
        schedule = workq.Schedule(tick, workq.every(minutes=1))
        async with workq.Executor(queue, [tick], schedules=[schedule], poll_interval=0.05, lease=0.9):
            clock.jump(61)
            await events.until("completed")
            (row,) = await queue.find()
            clock.jump(-90)
            await asyncio.sleep(0.5)
            clock.jump(148)
            await asyncio.sleep(0.5)
            assert events.kinds() == ["started", "completed"]
            assert await queue.find() == [row]
            clock.jump(3)
            await events.until("completed", 2)


async def test_a_pause_of_any_length_is_followed_by_one_catch_up_run(database: Database) -> None:
    """F47: ten hours late is one run, and the next comes an hour after it."""
    events = Events()

    @workq.handler("tick")
    async def tick(task: workq.Task) -> None: ...

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        schedule = workq.Schedule(tick, workq.every(hours=1))
        async with workq.Executor(queue, [tick], schedules=[schedule]):
            (row,) = await queue.find()
        await database.age(row.id, 11 * 3600)
        before = time.time()
        async with workq.Executor(queue, [tick], schedules=[schedule], poll_interval=0.05):
            await events.until("completed")
            await queue.wait(timeout=SOON)
            (row,) = await queue.find()
        assert before <= row.run_at.timestamp() - 3600 <= time.time()
        assert events.kinds() == ["started", "completed"]


async def test_timeouts_and_delays_do_not_feel_a_jump(sqlite: SQLiteDatabase) -> None:
    """F47: durations are measured by the monotonic clock."""
    clock, runs, events = Skewed(), Runs(), Events()

    @workq.handler("work", timeout=30)
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with sqlite.open() as db:
        queue = give(workq.Queue(db, on_event=[events]), clock)
        await queue.migrate()
        async with workq.Executor(queue, [work]):
            await queue.enqueue(None, work, 1)
            await runs.until(lambda: runs.running == {1})
            clock.jump(3600)
            await asyncio.sleep(0.1)
            assert runs.running == {1}
            runs.go.set()
            completed = await events.until("completed")
    assert completed.duration is not None
    assert completed.duration < SOON


async def test_instants_are_stored_as_integers(sqlite: SQLiteDatabase) -> None:
    """F34: microseconds since 1970 in every column and every state, so that order is order."""

    @workq.handler("fails")
    async def fails(task: workq.Task[object]) -> None:
        raise ValueError

    @workq.handler("repeats", retry=workq.linear(retries=3, delay=600))
    async def repeats(task: workq.Task[object]) -> None:
        raise ValueError

    runs = Runs()

    @workq.handler("runs")
    async def running(task: workq.Task[object]) -> None:
        await runs.hold(1)

    handlers = [fails, repeats, running]
    columns = ("run_at", "created_at", "locked_until", "failed_at", "finished_at")
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        before = time.time()
        async with workq.Executor(queue, handlers, poll_interval=0.05, stop_timeout=0):
            await queue.enqueue(None, "waits", 1, run_at=datetime(2040, 1, 1, tzinfo=UTC))
            for handler in handlers:
                await queue.enqueue(None, handler, 1)

            async def ended() -> bool:
                return len(await sqlite.rows("select 1 from {table} where error is not null")) == 2

            await eventually(ended)
            await runs.until(lambda: 1 in runs.running)
            kinds = await sqlite.rows(f"select {', '.join(f'typeof({column})' for column in columns)} from {{table}}")
            rows = await sqlite.rows(f"select {', '.join(columns)} from {{table}} where name <> 'waits'")
            (waiting,) = await sqlite.rows("select run_at from {table} where name = 'waits'")
    assert [set(kind) - {"null"} for kind in zip(*kinds, strict=True)] == [{"integer"}] * len(columns)
    instants = [value / 1e6 for row in rows for value in row if value is not None]
    assert before - 1 < min(instants)
    assert max(instants) < time.time() + 601
    assert waiting == (int(datetime(2040, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000,)
