"""back again: the database goes away in every way it can, and when it returns, work goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import workq
import workq_asyncpg
from faults.flow import flow
from faults.nodes import foreign_writer, nodes_on
from support import SOON, Database, PostgresDatabase, Runs, SQLiteDatabase, eventually
from workq.dialect import Connection, Interrupted, Params, Rows, Statement, Urgency
from workq.testing._server import Server

BACK_AGAIN = 5.0

ENDS: dict[str, Callable[[Server], None]] = {
    "stopped": Server.stop,
    "stopped at once": lambda server: server.stop("immediate"),
    "killed": Server.kill,
}


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What workq logged at WARNING or above."""
    records = [record for record in caplog.records if record.name == "workq"]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def others() -> list[asyncio.Task[object]]:
    """What is left in the loop."""
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def application_pool(database: PostgresDatabase) -> AbstractAsyncContextManager[asyncpg.Pool[Any]]:
    """A pool as small as may be, which asyncpg does not fill up by itself."""
    return asyncpg.create_pool(database.url, min_size=0, max_size=6)


@asynccontextmanager
async def frozen(server: Server) -> AsyncGenerator[None]:
    """The server answers nothing, and closes nothing."""
    await asyncio.to_thread(server.freeze)
    try:
        yield
    finally:
        await asyncio.to_thread(server.thaw)


@pytest.mark.parametrize("end", ENDS)
async def test_work_resumes_by_itself_when_the_server_returns(
    mortal: PostgresDatabase, server: Server, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """F18: within 5 s; no loss, no result accepted twice. One warning for each loop, not a flood.

    The claims of the last 0.6 s before a crash may be lost, and such a task starts again.
    """
    async with flow(mortal) as tasks:
        await tasks.runs(since=0)
        caplog.clear()
        crash = time.monotonic()
        await asyncio.to_thread(ENDS[end], server)
        await asyncio.sleep(2)
        await asyncio.to_thread(server.start)
        back = time.monotonic()
        assert await tasks.runs(since=back, timeout=2 * BACK_AGAIN) < BACK_AGAIN
        await tasks.end()
        await eventually(tasks.healthy)
        assert await mortal.rows("select id from {table}") == []
    completed = Counter(tasks.completed())
    assert tasks.enqueued - set(completed) == set()
    may_repeat = set[int]() if end == "stopped" else {id for at, id in tasks.started if crash - 0.6 < at < back}
    assert {id for id, times in completed.items() if times > 1} <= may_repeat
    assert Counter(complaints(caplog)).most_common(1)[0][1] <= len(tasks.executors)
    assert len(complaints(caplog)) <= 3 * len(tasks.executors)


class Broken:
    """A connection that breaks once, when it is asked for suspects."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._whole = True

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        if self._whole and params.get("suspects"):
            self._whole = False
            raise Interrupted("the connection broke")
        return await self._connection.fetch(statement, params, urgency)

    async def close(self) -> None:
        await self._connection.close()


async def test_a_claim_that_breaks_after_another_was_answered_loses_nothing_of_that(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F05: what the first one took runs; its lease is not waited for."""
    runs = Runs()
    runs.go.set()

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with database.open() as db:
        whole = db.connection

        def broken(purpose: str, *, first: bool = False) -> Broken:
            return Broken(whole(purpose, first=first))

        monkeypatch.setattr(db, "connection", broken)
        queue = workq.Queue(db)
        await queue.migrate()
        await queue.enqueue(None, work, 1)
        async with workq.Executor(queue, [work], poll_interval=0.1, lease=300):
            await runs.until(lambda: runs.started[1] == 1)
            await queue.wait(timeout=SOON)


@pytest.mark.parametrize("error", [AttributeError, asyncpg.InternalClientError, asyncpg.ConnectionDoesNotExistError])
async def test_whatever_the_driver_raises_from_a_broken_connection_says_nothing_about_the_statement(
    postgres: PostgresDatabase, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """F18: or else a finish that meets it would be taken for one that the database refuses, and fail its task."""

    async def fetch(self: asyncpg.Connection[Any], *args: object) -> None:
        self.terminate()
        raise error("at a bad moment")

    async with postgres.open() as db:
        conn = db.connection("test")
        await conn.fetch(db.sql.now, {}, Urgency(timeout=SOON))
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "fetch", fetch)
            with pytest.raises(Interrupted):
                await conn.fetch(db.sql.now, {}, Urgency(timeout=SOON))
        assert len(await conn.fetch(db.sql.now, {}, Urgency(timeout=SOON))) == 1
        await conn.close()


@asynccontextmanager
async def at_work(
    database: PostgresDatabase, running: int, **settings: Any
) -> AsyncGenerator[tuple[workq.Executor, Runs, list[asyncio.Task[object]]]]:
    """An executor with so many handlers that run, and what was in the loop before it."""
    runs = Runs()

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with application_pool(database) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=database.schema))
        await queue.migrate()
        before = others()
        executor = workq.Executor(queue, [work], **settings)
        await executor.start()
        if running:
            await queue.enqueue_many(None, [workq.NewTask("work", number) for number in range(running)])
            await runs.until(lambda: len(runs.running) == running)
        yield executor, runs, before


async def test_stop_returns_in_time_from_a_frozen_server(mortal: PostgresDatabase, server: Server) -> None:
    """F36: clean stop. stop(2) returns within 3 s, and leaves nothing in the loop."""
    async with at_work(mortal, 4, lease=1.5, poll_interval=0.2) as (executor, runs, before), frozen(server):
        await asyncio.sleep(1)
        began = time.monotonic()
        await executor.stop(2)
        assert time.monotonic() - began < 3
        assert runs.running == set()
        await asyncio.sleep(0)
        assert [task for task in others() if task not in before] == []


@pytest.mark.parametrize("running", [0, 4])
async def test_stop_without_patience_returns_in_time_from_a_frozen_server_and_leaves_nothing(
    mortal: PostgresDatabase, server: Server, caplog: pytest.LogCaptureFixture, running: int
) -> None:
    """F36: by itself, not because it was given up."""
    async with at_work(mortal, running, poll_interval=0.1) as (executor, _, before), frozen(server):
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await executor.stop(0)
        assert time.monotonic() - began < 1
        await asyncio.sleep(0.1)
        assert [task for task in others() if task not in before] == []
    assert [line for line in complaints(caplog) if "abandoned" in line] == []


async def test_beats_go_on_where_a_connection_takes_longer_than_a_beat_has(mortal: PostgresDatabase) -> None:
    """F10: the statement's time begins when it can be sent."""
    runs = Runs()

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async def slowly(*args: Any, **options: Any) -> asyncpg.Connection[Any]:
        await asyncio.sleep(0.6)
        return await asyncpg.connect(*args, **options)

    async with asyncpg.create_pool(mortal.url, min_size=0, max_size=6, connect=slowly) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema))
        await queue.migrate()
        async with workq.Executor(queue, [work], lease=1.2, poll_interval=0.1) as executor:
            await queue.enqueue(None, work, 1)
            await runs.until(lambda: bool(runs.running))
            for _ in range(2):
                beats = {executor.health().beat_at}
                await mortal.rows(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where pid <> pg_backend_pid() and datname = current_database() "
                    "and backend_type = 'client backend'"
                )

                async def beaten(beats: set[datetime | None] = beats) -> bool:
                    beats.add(executor.health().beat_at)
                    return len(beats) > 4

                await eventually(beaten)
            runs.go.set()
            await queue.wait(timeout=SOON)


async def test_a_server_that_takes_no_writes_says_so_and_nothing_is_unknown(mortal: PostgresDatabase) -> None:
    """F22: it has answered, so nothing was stored; and it is there."""
    readonly = {"default_transaction_read_only": "on"}
    async with application_pool(mortal) as pool:
        await workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema)).migrate()
    async with asyncpg.create_pool(mortal.url, min_size=0, max_size=6, server_settings=readonly) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema))
        for enqueue in (queue.enqueue(None, "work", 1), queue.enqueue_many(None, [workq.NewTask("work", 1)])):
            with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
                await enqueue
    assert await mortal.rows("select id from {table}") == []


async def test_work_resumes_by_itself_when_a_frozen_server_goes_on(mortal: PostgresDatabase, server: Server) -> None:
    """F18, F21: nothing answered, and nothing was closed either."""
    async with flow(mortal, lease=1.5) as tasks:
        await tasks.runs(since=0)
        async with frozen(server):
            await asyncio.sleep(4)
        back = time.monotonic()
        assert await tasks.runs(since=back, timeout=2 * BACK_AGAIN) < BACK_AGAIN
        await tasks.end()
        assert await mortal.rows("select id from {table}") == []


async def test_start_on_a_dead_server_says_so_and_leaves_nothing_behind(
    mortal: PostgresDatabase, server: Server
) -> None:
    @workq.handler("work")
    async def work(task: workq.Task[object]) -> None: ...

    async with application_pool(mortal) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema))
        await queue.migrate()
        await asyncio.to_thread(server.stop)
        before = others()
        for _ in range(3):  # a place in the pool that a failed start kept would make the third one fail otherwise
            executor = workq.Executor(queue, [work])
            with pytest.raises(ConnectionRefusedError):
                await executor.start()
            await asyncio.sleep(0)
            assert [task for task in others() if task not in before] == []
            assert not executor.health().ok
        assert pool.get_size() == pool.get_idle_size()
        await asyncio.to_thread(server.start)
        async with workq.Executor(queue, [work]):
            await queue.enqueue(None, "work", 1)
            await queue.wait(timeout=SOON)


async def test_a_start_that_waits_for_a_frozen_server_can_be_cancelled(
    mortal: PostgresDatabase, server: Server
) -> None:
    """F36: within seconds, and nothing is left behind."""

    @workq.handler("work")
    async def work(task: workq.Task[object]) -> None: ...

    async with application_pool(mortal) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema))
        await queue.migrate()
        before = others()
        async with frozen(server):
            starting = asyncio.create_task(workq.Executor(queue, [work]).start())
            await asyncio.sleep(0.2)
            began = time.monotonic()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert time.monotonic() - began < 3
            await asyncio.sleep(0)
            assert [task for task in others() if task not in before] == []


@pytest.mark.slow
async def test_a_start_that_waits_for_a_frozen_server_gives_up_and_says_why(
    mortal: PostgresDatabase, server: Server
) -> None:
    """F21: after the statement's own deadline."""

    @workq.handler("work")
    async def work(task: workq.Task[object]) -> None: ...

    async with application_pool(mortal) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema))
        await queue.migrate()
        before = others()
        async with frozen(server):
            with pytest.raises(TimeoutError):
                await workq.Executor(queue, [work]).start()
            await asyncio.sleep(0)
            assert [task for task in others() if task not in before] == []


async def test_a_foreign_writer_that_holds_the_file_for_three_seconds_brings_no_error_to_the_surface(
    sqlite: SQLiteDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """F28: everybody waits for his turn."""
    async with flow(sqlite, sqlite.url, lease=30) as tasks:
        await tasks.runs(since=0)
        with foreign_writer(sqlite.path, seconds=3) as writer:
            assert await asyncio.to_thread(writer.wait) == 0
        assert await tasks.runs(since=time.monotonic()) < 1
        await tasks.end()
    assert tasks.failures == []
    assert Counter(tasks.completed()) == dict.fromkeys(tasks.enqueued, 1)
    assert complaints(caplog) == []


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_a_transaction_longer_than_the_lease_makes_nobody_steal_live_tasks(
    sqlite: SQLiteDatabase, tmp_path: Path, rounds: int
) -> None:
    """F10: one holder. 8 live tasks of one process, another that looks for work, and a third that blocks both."""
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        for _ in range(rounds):
            folder = tmp_path / "round"
            folder.mkdir(exist_ok=True)
            with nodes_on(sqlite, folder) as nodes:
                holder = await nodes.start(workers=8, lease=0.9, poll=0.1, takes=4.5)
                ids = await queue.enqueue_many(None, [workq.NewTask("work", n) for n in range(8)])
                await nodes.journal.until("start", 8, holder.pid)
                other = await nodes.start(workers=8, lease=0.9, poll=0.1, takes=4.5)
                with foreign_writer(sqlite.path, seconds=2.5) as writer:
                    assert await asyncio.to_thread(writer.wait) == 0
                await nodes.journal.until("end", 8, holder.pid)
                await nodes.journal.until("completed", 8)
                assert nodes.journal.lines("start", other.pid) == []
                assert nodes.journal.times("completed") == dict.fromkeys(ids, 1)
                nodes.journal.path.unlink()


async def test_a_process_killed_in_its_transaction_leaves_the_file_to_the_others(sqlite: SQLiteDatabase) -> None:
    """F28: the lock of a dead process is no lock."""
    async with flow(sqlite, sqlite.url) as tasks:
        await tasks.runs(since=0)
        with foreign_writer(sqlite.path, seconds=600) as writer:
            await asyncio.sleep(0.1)
            writer.kill()
        assert await tasks.runs(since=time.monotonic()) < BACK_AGAIN
        await tasks.end()
    assert tasks.failures == []
