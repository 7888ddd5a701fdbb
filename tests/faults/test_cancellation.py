"""Whoever waits for workq may be cancelled at any moment: no connection, lock, thread or task is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest

import workq
import workq_asyncpg
from support import SOON, Database, PostgresDatabase, Runs, SQLiteDatabase, eventually
from workq.dialect import Connection, Params, Rows, Statement, Urgency

Make = Callable[[], Coroutine[Any, Any, object]]


@workq.handler("work")
async def work(task: workq.Task[object]) -> None:
    await asyncio.sleep(0.002)


@workq.handler("tick")
async def tick(task: workq.Task) -> None: ...


async def cancelled_after(turns: int, make: Make) -> bool:
    """Cancel it after so many turns of the loop. Returns False if it had ended before."""
    task = asyncio.ensure_future(make())
    for _ in range(turns):
        await asyncio.sleep(0)
        if task.done():
            break
    caught = task.cancel()
    await asyncio.wait([task], timeout=SOON)
    assert task.done()
    if not task.cancelled():
        task.result()
    return caught


async def cancelled_everywhere(make: Make) -> None:
    """Cancel it once after every number of turns, until it ends before that."""
    turns = 0
    while await cancelled_after(turns, make):
        turns += max(1, turns // 20)


async def cancelled_at_random(randomness: random.Random, make: Make) -> None:
    """Cancel it soon, sometimes at once."""
    task = asyncio.ensure_future(make())
    if randomness.random() < 0.5:
        for _ in range(randomness.randrange(12)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(randomness.random() * 0.003)
    task.cancel()
    with suppress(asyncio.CancelledError, TimeoutError):
        await task


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


@asynccontextmanager
async def nothing_left(timeout: float = SOON) -> AsyncGenerator[None]:
    """No task of asyncio's and no thread is left of what happens in the block."""
    tasks, threads = others(), threading.active_count()
    yield

    async def gone() -> bool:
        return others() <= tasks and threading.active_count() <= threads

    await eventually(gone, timeout)


@asynccontextmanager
async def pool_of(database: PostgresDatabase, size: int) -> AsyncGenerator[asyncpg.Pool[Any]]:
    """An application's pool, all of which must have come back at the end."""
    settings = {"application_name": database.schema or ""}
    async with asyncpg.create_pool(database.url, min_size=0, max_size=size, server_settings=settings) as pool:
        yield pool

        async def is_whole() -> bool:
            return pool.get_idle_size() == pool.get_size()

        await eventually(is_whole)
        async with asyncio.timeout(SOON):  # every place can be had at once
            taken = [await pool.acquire() for _ in range(size)]
            for conn in taken:
                await pool.release(conn)
        sessions = "from pg_stat_activity where application_name = current_setting('application_name')"
        locks = f"select count(*) from pg_locks where pid in (select pid {sessions} and pid <> pg_backend_pid())"
        async with pool.acquire() as conn:

            async def holds_nothing() -> bool:  # a session whose client is gone may still be ending its statement
                open = await conn.fetchval(f"select count(*) {sessions} and state like 'idle in transaction%'")
                return not open and not await conn.fetchval(locks)

            await eventually(holds_nothing)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [4_000, pytest.param(40_000, marks=pytest.mark.slow)])
async def test_cancelled_calls_leave_nothing_behind(database: Database, rounds: int) -> None:
    """F23: operations on the queue's own connection, from eight places at once."""
    randomness = random.Random(1)
    async with nothing_left(), database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        ids = [id for id in await queue.enqueue_many(None, [workq.NewTask("work", n) for n in range(8)]) if id]
        calls: list[Callable[[int], Coroutine[Any, Any, object]]] = [
            lambda id: queue.enqueue(None, "work", id),
            lambda id: queue.enqueue(None, "work", id, key=f"key-{id}"),
            lambda id: queue.enqueue_many(None, [workq.NewTask("work", n) for n in range(3)]),
            lambda id: queue.disable(None, id),
            lambda id: queue.retry(None, id),
            lambda id: queue.get(id),
            lambda id: queue.find(state="failed"),
            lambda id: queue.wait("work", timeout=0.002),
        ]

        async def some() -> None:
            for _ in range(rounds // 8):
                call, id = randomness.choice(calls), randomness.choice(ids)
                await cancelled_at_random(randomness, lambda call=call, id=id: call(id))

        async with nothing_left(timeout=SOON + rounds / 200):  # statements whose callers are gone still run
            await asyncio.gather(*(some() for _ in range(8)))
        async with asyncio.timeout(SOON):
            assert await queue.get(ids[0]) is not None
            assert await queue.enqueue(None, "work", "after") is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_cancelled_calls_give_connections_back_clean(postgres: PostgresDatabase, rounds: int) -> None:
    """F23: the pool is back to its size, 0 idle-in-transaction sessions, 0 locks, and no trace of cancelled ones."""
    randomness = random.Random(2)
    async with pool_of(postgres, size=4) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()

        async def in_a_transaction(commit: bool) -> None:
            async with pool.acquire() as conn, conn.transaction():
                await queue.enqueue(conn, "work", 1)
                await queue.enqueue(conn, "work", 2, key="k")
                await queue.get(1, tx=conn)
                if not commit:
                    raise TimeoutError

        async def outside() -> None:
            await queue.enqueue(None, "work", 3)

        async def some() -> None:
            for _ in range(rounds // 8):
                make: Make = randomness.choice([lambda: in_a_transaction(False), outside])
                await cancelled_at_random(randomness, make)

        async with nothing_left(timeout=SOON + rounds / 200):
            await asyncio.gather(*(some() for _ in range(8)))
        assert await postgres.rows("select id from {table} where payload::text <> '3'") == []
        async with asyncio.timeout(SOON):
            await in_a_transaction(commit=True)
        assert await postgres.rows("select payload::text from {table} where payload::text <> '3' order by id") == [
            ("1",),
            ("2",),
        ]


async def test_an_application_that_closes_its_pool_after_using_a_queue_is_not_held_up(
    postgres: PostgresDatabase,
) -> None:
    """F31: a connection for None goes back by itself."""
    pool = await asyncpg.create_pool(postgres.url, min_size=0, max_size=2)
    queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
    await queue.migrate()
    for _ in range(3):
        await queue.enqueue(None, "work", 1)
    async with asyncio.timeout(2):
        await pool.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [60, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_executors_that_are_cancelled_at_any_moment_leave_nothing_behind(database: Database, rounds: int) -> None:
    """F23, F05: one cancellation, or two; every place is free again, and no row stays locked."""
    randomness = random.Random(3)
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()

        async def none_is_locked() -> bool:
            return await database.rows("select id from {table} where locked_until is not null") == []

        async with nothing_left():
            for _ in range(rounds):
                await queue.enqueue_many(None, [workq.NewTask("work", n) for n in range(20)])
                running = asyncio.create_task(workq.Executor(queue, [work], workers=4, poll_interval=0.05).run())
                await asyncio.sleep(randomness.random() * 0.03)
                for _ in range(randomness.randrange(1, 3)):
                    running.cancel()
                    await asyncio.sleep(randomness.random() * 0.005)
                with pytest.raises(asyncio.CancelledError):
                    await running
                await eventually(none_is_locked)
        db.reserve(20)()
        async with workq.Executor(queue, [work]):
            await queue.wait(timeout=SOON)


async def test_a_start_that_is_cancelled_anywhere_leaves_nothing_behind(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F24, F05: at every turn of the loop between its begin and its end; no row stays locked."""
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await queue.enqueue_many(None, [workq.NewTask("work", n) for n in range(1_000)])

        async def start_and_stop() -> None:
            executor = workq.Executor(
                queue, [work, tick], workers=2, schedules=[workq.Schedule(tick, workq.every(hours=1))]
            )
            try:
                await executor.start()
            finally:
                await executor.stop(0)

        async with nothing_left():
            await cancelled_everywhere(start_and_stop)
        db.reserve(20)()
        assert await database.rows("select id from {table} where locked_until is not null") == []
        assert len(await database.rows("select id from {table} where scheduled")) == 1
    gc.collect()  # an error that nobody looked at is reported when it is thrown away
    reports = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    # asyncpg itself leaves one when it is cancelled while it connects.
    assert [report for report in reports if "unexpected connection_lost() call" not in report] == []


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
async def test_a_connection_that_is_cancelled_while_it_is_acquired_is_not_lost(
    postgres: PostgresDatabase, warm: bool
) -> None:
    """F24: at every turn of the loop, from a pool that has one and from a pool that must open one."""
    async with pool_of(postgres, size=2) as pool:
        db = workq_asyncpg.Postgres(pool, schema=postgres.schema)

        async def use() -> None:
            if not warm:
                await pool.expire_connections()
            conn = db.connection("test")
            try:
                await conn.fetch(db.sql.now, {}, Urgency(timeout=SOON))
            finally:
                await conn.close()

        async with nothing_left():
            await cancelled_everywhere(use)
        assert pool.get_idle_size() == pool.get_size()


async def test_a_connection_that_arrives_in_the_turn_of_the_cancellation_is_not_lost(
    postgres: PostgresDatabase,
) -> None:
    """F24: the race between an acquire that is done and the cancellation of who waited for it."""
    async with pool_of(postgres, size=1) as pool:
        db = workq_asyncpg.Postgres(pool, schema=postgres.schema)
        for turns in range(40):
            taken = await pool.acquire()
            conn = db.connection("test")
            waiting = asyncio.ensure_future(conn.fetch(db.sql.now, {}, Urgency(timeout=SOON)))
            for _ in range(3):
                await asyncio.sleep(0)
            giving = asyncio.ensure_future(pool.release(taken))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting, giving], timeout=SOON)
            await conn.close()
            assert pool.get_idle_size() == pool.get_size()


class Watched:
    """A connection that is slow when it is told to be, and counts how many use it at once."""

    def __init__(self, connection: Connection, slow: Mapping[str, float]) -> None:
        self._connection = connection
        self._slow = slow
        self._users = 0
        self.most = 0

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        self._users += 1
        self.most = max(self.most, self._users)
        try:
            await asyncio.sleep(self._slow.get(statement.text, 0))
            return await self._connection.fetch(statement, params, urgency)
        finally:
            self._users -= 1

    async def close(self) -> None:
        await self._connection.close()


async def test_each_connection_is_used_by_one_task_at_a_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F23: also when a slow database makes the claims ask for a beat while a beat is still under way."""
    runs, slow, watched = Runs(), dict[str, float](), list[Watched]()

    @workq.handler("held")
    async def held(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with database.open() as db:
        plain = db.connection

        def connection(purpose: str, *, first: bool = False) -> Watched:
            watched.append(Watched(plain(purpose, first=first), slow))
            return watched[-1]

        monkeypatch.setattr(db, "connection", connection)
        queue = workq.Queue(db)
        await queue.migrate()
        await queue.enqueue(None, held, 1)
        async with workq.Executor(queue, [held], lease=0.6, poll_interval=0.05, stop_timeout=0):
            await runs.until(lambda: runs.running == {1})
            slow |= {db.sql.claim.text: 0.8, db.sql.extend.text: 1.5}
            await asyncio.sleep(2)
            slow.clear()
            await asyncio.sleep(0.5)
    assert len(watched) >= 3
    assert [connection.most for connection in watched if connection.most > 1] == []


def is_free(sqlite: SQLiteDatabase) -> bool:
    """May another process write?"""
    conn = sqlite3.connect(sqlite.path, isolation_level=None, timeout=0)
    try:
        conn.execute("begin immediate")
        conn.execute("rollback")
    except sqlite3.OperationalError:
        return False
    finally:
        conn.close()
    return True


async def test_a_cancelled_statement_leaves_the_writer_free(sqlite: SQLiteDatabase) -> None:
    """F30: at every turn of the loop; the statement goes on in its thread, and ends there."""
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        item = ("", "work", "1", None, 0, queue.hub.clock.now(), None)
        numbers = itertools.count()

        async def write() -> None:
            next(numbers)
            await db.connection("test").fetch(
                db.sql.insert, {"items": [item], "now": queue.hub.clock.now()}, Urgency(SOON)
            )

        async def free() -> bool:
            return is_free(sqlite)

        turns = 0
        while await cancelled_after(turns, write):
            turns += 1
            await eventually(free)
        assert await queue.enqueue(None, "work", "after") is not None
        assert len(await queue.find(limit=1000)) <= next(numbers) + 1
        assert turns > 3


async def test_a_cancelled_enqueue_is_undone_with_the_callers_transaction(sqlite: SQLiteDatabase) -> None:
    """F30: what its thread still does comes before the rollback."""
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        for turns in range(30):
            async with sqlite.caller() as app:
                await cancelled_after(turns, lambda app=app: queue.enqueue(app.tx, "work", 1))
                await app.rollback()
            assert await queue.find() == []
            assert is_free(sqlite)


@pytest.mark.parametrize("what", ["open", "migrate"])
async def test_opening_and_migrating_can_be_cancelled_anywhere(sqlite: SQLiteDatabase, what: str) -> None:
    """F30, F31: no thread is left, no writer is blocked, and the next attempt succeeds."""

    async def open_and_close() -> None:
        async with sqlite.open():
            pass

    async with nothing_left():
        if what == "open":
            await cancelled_everywhere(open_and_close)
        else:
            async with sqlite.open() as db:
                await cancelled_everywhere(workq.Queue(db).migrate)
        assert is_free(sqlite)
        async with sqlite.open() as db:
            queue = workq.Queue(db)
            await queue.migrate()
            assert await queue.enqueue(None, "work", 1) is not None


async def test_closing_can_be_cancelled_anywhere(sqlite: SQLiteDatabase) -> None:
    """F31: the file is closed and no thread is left, whenever the cancellation came."""
    async with sqlite.open() as db:
        await workq.Queue(db).migrate()
    for turns in range(1, 10):
        async with nothing_left():
            opened = sqlite.open()
            await opened.__aenter__()
            await cancelled_after(turns, lambda opened=opened: opened.__aexit__(None, None, None))
        assert is_free(sqlite)


async def test_a_cancelled_executor_cancels_its_handlers_and_gives_their_tasks_back(database: Database) -> None:
    """F05: a second cancellation does not wait, and the tasks are free at once."""
    runs = Runs()

    @workq.handler("held")
    async def held(task: workq.Task[object]) -> None:
        await runs.hold(task.payload)

    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await queue.enqueue_many(None, [workq.NewTask("held", n) for n in range(4)])
        async with nothing_left():
            running = asyncio.create_task(workq.Executor(queue, [held], poll_interval=0.05).run())
            await runs.until(lambda: len(runs.running) == 4)
            running.cancel()
            await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert runs.running == set()
        assert [row.state for row in await queue.find()] == ["waiting"] * 4
