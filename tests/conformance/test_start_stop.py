"""clean stop, and a start that works or leaves nothing: executors, `run`, `serve`, and the end of the process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import asyncpg
import pytest

import workq
import workq_asyncpg
from support import (
    SOON,
    Database,
    Events,
    HeldReply,
    PostgresDatabase,
    Runs,
    SQLiteDatabase,
    Wire,
    eventually,
    hooked,
    told,
    wired_queue,
)
from workq.dialect import Dialect

LONG: dict[str, Any] = {"lease": 300, "poll_interval": 0.05, "stop_timeout": 5}
SHORT: dict[str, Any] = {"lease": 0.6, "poll_interval": 0.05, "stop_timeout": 5}
HOURLY = workq.every(hours=1)


@workq.handler("note")
async def note(task: workq.Task[int]) -> None: ...


@workq.handler("tick")
async def tick(task: workq.Task) -> None: ...


def holding(runs: Runs, name: str = "held") -> workq.Handler[int, Any]:
    @workq.handler(name)
    async def hold(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    return hold


async def enqueued(queue: workq.Queue, name: str, payload: object = 1) -> int:
    id = await queue.enqueue(None, name, payload)
    assert id is not None
    return id


async def row_of(queue: workq.Queue, id: int) -> workq.TaskRow:
    row = await queue.get(id)
    assert row is not None
    return row


async def fact(holds: Callable[[], bool], timeout: float = SOON) -> None:
    async def look() -> bool:
        return holds()

    await eventually(look, timeout)


class Before:
    """What was in the process before; whatever is there later and was not, somebody has left behind."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())

    def left(self) -> list[str]:
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        threads = set(threading.enumerate()) - self._threads
        return [repr(task) for task in tasks if not task.done()] + [repr(thread) for thread in threads]

    async def nothing_left(self) -> None:
        try:
            await fact(lambda: not self.left(), timeout=2)
        except TimeoutError:
            raise AssertionError(self.left()) from None


def took(since: float) -> float:
    return time.monotonic() - since


def version_table(database: Database) -> str:
    return f'{database.table[:-1]}_version"'


async def test_start_fails_where_there_is_no_table_and_names_the_remedy(database: Database) -> None:
    before = Before()
    async with database.open() as db:
        executor = workq.Executor(workq.Queue(db), [note], **LONG)
        with pytest.raises(workq.SchemaError, match="migrate"):
            await executor.start()
        assert not executor.health().ok
    await before.nothing_left()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("update {version} set version = 0, works_from = null", "has version 0.*migrate"),
        ("update {version} set version = 99, works_from = null", "has version 99.*newer workq"),
        ("update {version} set version = 99, works_from = 98", "has version 99.*newer workq"),
        ("delete from {version}", "no version.*migrate"),
    ],
    ids=["too old", "too new", "too new for this one", "half made"],
)
async def test_start_fails_on_a_table_of_another_version_and_names_the_remedy(
    change: str, says: str, database: Database
) -> None:
    """F54: a newer, incompatible schema makes start() refuse."""
    async with hooked(database) as queue:
        await database.rows(change.replace("{version}", version_table(database)))
        before = Before()
        with pytest.raises(workq.SchemaError, match=says):
            await workq.Executor(queue, [note], **LONG).start()
        await before.nothing_left()


async def test_start_works_on_a_newer_table_that_allows_this_version(database: Database) -> None:
    """F54: code N-1 works on N's schema, for a deploy that rolls."""
    async with hooked(database) as queue:
        ((now,),) = await database.rows(f"select version from {version_table(database)}")
        await database.rows(f"update {version_table(database)} set version = 99, works_from = {now}")
        async with workq.Executor(queue, [note], **LONG):
            await queue.enqueue(None, note, 1)
            await queue.wait(timeout=SOON)


async def test_start_fails_if_the_pool_is_too_small_and_names_the_size(postgres: PostgresDatabase) -> None:
    async with postgres.open(pool_size=8) as db:
        first, second = workq.Queue(db), workq.Queue(db)
        await first.migrate()
        running = workq.Executor(first, [note], **LONG)
        await running.start()
        before = Before()
        with pytest.raises(RuntimeError, match=r"needs 10 connections.*it has 8.*max_size=15"):
            await workq.Executor(second, [note], **LONG).start()
        await before.nothing_left()
        # One that fits does: it shares the first one's queue. And those that failed are not counted any longer.
        async with workq.Executor(first, [note], queue_name="two", **LONG):
            await first.enqueue(None, note, 1)
            await first.wait(timeout=SOON)
        await running.stop()
        async with workq.Executor(second, [note], **LONG):
            await second.enqueue(None, note, 1)
            await second.wait(timeout=SOON)


@pytest.mark.parametrize("why", ["no table", "schedule", "pool"])
async def test_a_failed_start_gives_every_connection_back(why: str, postgres: PostgresDatabase) -> None:
    """F31: also in the application's own pool."""
    async with asyncpg.create_pool(postgres.url, min_size=0, max_size=4 if why == "pool" else 8) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        if why != "no table":
            await queue.migrate()

        def broken(last: Any) -> Any:
            raise LookupError("no calendar")

        schedules = [workq.Schedule(tick, broken)] if why == "schedule" else []
        before = Before()
        for _ in range(3):
            with pytest.raises((workq.SchemaError, LookupError, RuntimeError)):
                await workq.Executor(queue, [tick], schedules=schedules, **LONG).start()
        await fact(lambda: pool.get_idle_size() == pool.get_size())
        await before.nothing_left()


async def test_a_start_that_a_schedule_makes_fail_leaves_nothing(database: Database) -> None:
    """F31."""
    async with hooked(database) as queue:
        before = Before()
        broken = workq.Schedule(tick, lambda last: cast(Any, None))
        with pytest.raises(ValueError, match="None"):
            await workq.Executor(queue, [tick], schedules=[broken], **LONG).start()
        assert await queue.find() == []
        await before.nothing_left()


async def test_an_executor_has_one_life(queue: workq.Queue) -> None:
    executor = workq.Executor(queue, [note], **LONG)
    await executor.start()
    with pytest.raises(RuntimeError, match="one life"):
        await executor.start()
    await queue.enqueue(None, note, 1)
    await queue.wait(timeout=SOON)
    await executor.stop()
    with pytest.raises(RuntimeError, match="one life"):
        await executor.start()
    assert "ended" in repr(executor)


def nothing_unretrieved(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio complains, at the next collection, of an error that nobody has looked at."""
    gc.collect()
    assert [record.getMessage() for record in caplog.records if "never retrieved" in record.getMessage()] == []


async def test_a_start_that_is_cancelled_leaves_nothing(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """F24."""
    async with database.open() as db:
        await workq.Queue(db).migrate()
        wire = Wire(db)
        held = wire.replies[wire.sql.read_version] = HeldReply()
        queue = workq.Queue(cast(Dialect, wire))
        before = Before()
        starting = asyncio.create_task(workq.Executor(queue, [note], **LONG).start())
        await held.sent.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await before.nothing_left()
    await before.nothing_left()
    nothing_unretrieved(caplog)


async def test_a_start_that_is_stopped_meanwhile_does_not_return_as_if_it_had_worked(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with database.open() as db:
        await workq.Queue(db).migrate()
        wire = Wire(db)
        held = wire.replies[wire.sql.read_version] = HeldReply()
        before = Before()
        executor = workq.Executor(workq.Queue(cast(Dialect, wire)), [note], **LONG)
        gc.collect()
        caplog.clear()
        starting = asyncio.create_task(executor.start())
        await held.sent.wait()
        began = time.monotonic()
        await executor.stop(1)
        assert took(began) < 2
        await asyncio.wait([starting])
        assert not starting.cancelled(), "nobody cancelled the one who called start()"
        assert isinstance(starting.exception(), RuntimeError)
        await before.nothing_left()
    nothing_unretrieved(caplog)


async def test_stop_before_start_and_stop_after_stop_do_nothing(queue: workq.Queue) -> None:
    executor = workq.Executor(queue, [note], **LONG)
    await executor.stop()
    executor = workq.Executor(queue, [note], **LONG)
    await executor.start()
    await executor.stop()
    await executor.stop(0)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
async def test_stop_refuses_what_is_no_time(timeout: float, queue: workq.Queue) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await workq.Executor(queue, [note], **LONG).stop(timeout)


async def test_stop_waits_for_running_tasks_and_claims_no_more(queue: workq.Queue) -> None:
    runs = Runs()
    executor = workq.Executor(queue, [holding(runs)], workers=2, **LONG)
    await executor.start()
    await queue.enqueue_many(None, [workq.NewTask("held", number) for number in range(10)])
    await runs.until(lambda: len(runs.running) == 2)
    stopping = asyncio.create_task(executor.stop(SOON))
    await asyncio.sleep(0)
    runs.go.set()
    await stopping
    assert len(runs.started) == 2
    rows = await queue.find()
    assert len(rows) == 8
    assert {(row.state, row.attempt) for row in rows} == {("waiting", 0)}


async def test_beats_go_on_while_stop_waits(database: Database) -> None:
    """clean stop, one holder: another node must not take over what is only finishing."""
    async with database.open() as db:
        events = Events()
        queue, other = workq.Queue(db, on_event=[events]), workq.Queue(db)
        await queue.migrate()
        runs, theirs = Runs(), Runs()
        executor = workq.Executor(queue, [holding(runs)], **SHORT)
        async with workq.Executor(other, [holding(theirs)], queue_name="idle", **SHORT):
            await executor.start()
            id = await enqueued(queue, "held")
            await runs.until(lambda: bool(runs.running))
            stopping = asyncio.create_task(executor.stop(SOON))
            async with workq.Executor(other, [holding(theirs)], **SHORT):
                first = (await row_of(queue, id)).locked_until
                assert first is not None

                async def three_leases_later() -> bool:
                    until = (await row_of(queue, id)).locked_until
                    return until is not None and (until - first).total_seconds() > 3 * 0.6

                await eventually(three_leases_later)
                assert not stopping.done()
                runs.go.set()
                await stopping
        assert told(events) == ["enqueued", "started", "completed"]
        assert theirs.started == Counter()


async def test_a_second_stop_may_be_less_patient(queue: workq.Queue) -> None:
    runs = Runs()
    executor = workq.Executor(queue, [holding(runs)], **LONG)
    await executor.start()
    id = await enqueued(queue, "held")
    await runs.until(lambda: bool(runs.running))
    patient = asyncio.create_task(executor.stop(3600))
    await asyncio.sleep(0)
    began = time.monotonic()
    await executor.stop(0)
    await patient
    assert took(began) < 1
    assert (await row_of(queue, id)).state == "waiting"


async def test_a_second_stop_is_no_more_patient(queue: workq.Queue) -> None:
    runs = Runs()
    executor = workq.Executor(queue, [holding(runs)], **LONG)
    await executor.start()
    await enqueued(queue, "held")
    await runs.until(lambda: bool(runs.running))
    began = time.monotonic()
    impatient = asyncio.create_task(executor.stop(0.2))
    await asyncio.sleep(0)
    await executor.stop(3600)
    await impatient
    assert took(began) < 1.2


async def test_start_and_stop_may_be_called_from_different_tasks(database: Database) -> None:
    before = Before()
    async with hooked(database) as queue:
        executor = workq.Executor(queue, [note], **LONG)
        await asyncio.create_task(executor.start())
        await queue.enqueue(None, note, 1)
        await queue.wait(timeout=SOON)
        await asyncio.create_task(executor.stop())
        executor = workq.Executor(queue, [note], **LONG)
        await asyncio.create_task(executor.__aenter__())
        await queue.enqueue(None, note, 1)
        await queue.wait(timeout=SOON)
        await asyncio.create_task(executor.__aexit__(None, None, None))
    await before.nothing_left()


async def test_stop_may_be_called_by_a_handler(queue: workq.Queue) -> None:
    """A task that ends its own process: it is not waited for by itself."""
    stopped: list[float] = []

    @workq.handler("last")
    async def last(task: workq.Task[int]) -> None:
        began = time.monotonic()
        await executor.stop(0.2)
        stopped.append(took(began))

    executor = workq.Executor(queue, [last], **LONG)
    await executor.start()
    await enqueued(queue, "last")
    await fact(lambda: "ended" in repr(executor))


async def test_stop_hands_back_what_does_not_end_in_time_and_others_may_have_it_at_once(database: Database) -> None:
    """F36: a handler sleeps for an hour."""
    before = Before()
    async with database.open() as db:
        events = Events()
        queue, other = workq.Queue(db, on_event=[events]), workq.Queue(db)
        await queue.migrate()
        cancelled: list[int] = []

        @workq.handler("held")
        async def sleeps(task: workq.Task[int]) -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(task.payload)
                raise

        executor = workq.Executor(queue, [sleeps], **LONG)
        await executor.start()
        ids = [await enqueued(queue, "held", number) for number in range(5)]
        await events.until("started", 5)
        began = time.monotonic()
        await executor.stop(1)
        assert 1 <= took(began) < 2
        assert sorted(cancelled) == list(range(5))
        for id in ids:
            row = await row_of(queue, id)
            assert (row.state, row.attempt, row.lost, row.locked_until, row.error) == ("waiting", 0, 0, None, None)
        assert events.count("released") == 5
        theirs = Runs()
        theirs.go.set()
        async with workq.Executor(other, [holding(theirs)], **LONG):
            await other.wait(timeout=SOON)
        assert theirs.started == Counter(range(5))
    await before.nothing_left()


async def test_a_handler_that_cleans_up_for_a_moment_is_handed_back_when_it_has_ended(database: Database) -> None:
    """clean stop: it is not started elsewhere while it still cleans up."""
    events, cleaned = Events(), list[str]()
    async with hooked(database, events) as queue:

        @workq.handler("held")
        async def tidy(task: workq.Task[int]) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.15)
                cleaned.append((await row_of(queue, task.id)).state)

        executor = workq.Executor(queue, [tidy], **LONG)
        await executor.start()
        id = await enqueued(queue, "held")
        await events.until("started")
        await executor.stop(0)
        assert cleaned == ["running"]
        assert (await row_of(queue, id)).state == "waiting"
        assert told(events) == ["enqueued", "started", "released"]


async def test_stop_leaves_behind_a_handler_that_swallows_its_cancellation_and_names_it(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F36: it returns in time all the same; the task keeps its lease, so nobody runs it beside the one that is left."""
    free, left = asyncio.Event(), asyncio.Event()
    async with database.open() as db:
        events = Events()
        queue, other = workq.Queue(db, on_event=[events]), workq.Queue(db)
        await queue.migrate()

        @workq.handler("held")
        async def stubborn(task: workq.Task[int]) -> None:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue
            left.set()

        executor = workq.Executor(queue, [stubborn, note], **LONG)
        await executor.start()
        id = await enqueued(queue, "held")
        await events.until("started")
        try:
            began = time.monotonic()
            await executor.stop(1)
            assert took(began) < 2
            (line,) = [record for record in caplog.records if "did not end" in record.getMessage()]
            assert f"task {id} 'held'" in line.getMessage()
            assert vars(line)["workq_task_id"] == id
            before = await row_of(queue, id)
            assert (before.state, before.attempt) == ("running", 0)
            theirs = Runs()
            async with workq.Executor(other, [holding(theirs), note], **LONG):
                await enqueued(other, "note")
                await other.wait("note", timeout=SOON)
                assert theirs.started == Counter()
                # Its late end changes nothing, and once its lease is over others may have the task.
                free.set()
                await left.wait()
                assert await row_of(queue, id) == before
                theirs.go.set()
                await database.age(id, 301)
                await other.wait(timeout=SOON)
            assert theirs.started == Counter([1])
        finally:
            free.set()
    assert told(events)[:2] == ["enqueued", "started"]
    assert {"completed", "released", "failed"} & {event.kind for event in events if event.id == id} == set()


async def test_stop_leaves_behind_a_plain_def_that_is_still_in_its_thread_and_names_it(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F36."""
    running, free, left = threading.Event(), threading.Event(), threading.Event()
    async with hooked(database) as queue:

        @workq.handler("held")
        def blocks(task: workq.Task[int]) -> None:
            running.set()
            free.wait(SOON)
            left.set()

        executor = workq.Executor(queue, [blocks], **LONG)
        await executor.start()
        id = await enqueued(queue, "held")
        await fact(running.is_set)
        try:
            began = time.monotonic()
            await executor.stop(1)
            assert 1 <= took(began) < 2
            assert not left.is_set()
            (line,) = [record for record in caplog.records if "did not end" in record.getMessage()]
            assert f"task {id} 'held'" in line.getMessage()
            before = await row_of(queue, id)
            assert before.state == "running"
            free.set()
            await fact(left.is_set)
            assert await row_of(queue, id) == before
        finally:
            free.set()


async def test_stop_waits_for_a_plain_def_that_ends_in_time(database: Database) -> None:
    """clean stop: and then its end is written like any other."""
    events = Events()
    running, free = threading.Event(), threading.Event()
    async with hooked(database, events) as queue:

        @workq.handler("held")
        def blocks(task: workq.Task[int]) -> None:
            running.set()
            free.wait(SOON)

        executor = workq.Executor(queue, [blocks], **LONG)
        await executor.start()
        await enqueued(queue, "held")
        await fact(running.is_set)
        stopping = asyncio.create_task(executor.stop(SOON))
        await asyncio.sleep(0)
        free.set()
        await stopping
        assert await queue.find() == []
    assert told(events) == ["enqueued", "started", "completed"]


async def test_after_stop_no_thread_is_left(database: Database) -> None:
    """clean stop, F31: once its plain def has returned, neither is its thread."""
    async with hooked(database) as queue:
        before = Before()

        @workq.handler("plain")
        def plain(task: workq.Task[int]) -> None: ...

        async with workq.Executor(queue, [plain], **LONG):
            await queue.enqueue_many(None, [workq.NewTask(plain, number) for number in range(10)])
            await queue.wait(timeout=SOON)
        await before.nothing_left()


async def test_stop_returns_in_time_while_the_table_is_locked(postgres: PostgresDatabase) -> None:
    """F36: claims, beats and finishes hang; what they hold is given up, and no connection is left."""
    async with asyncpg.create_pool(postgres.url, min_size=0, max_size=8) as pool:
        before = Before()
        queue, runs = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema)), Runs()
        await queue.migrate()
        executor = workq.Executor(queue, [holding(runs)], **SHORT)
        await executor.start()
        id = await enqueued(queue, "held")
        await runs.until(lambda: bool(runs.running))
        async with postgres.caller() as app:
            await app.execute(f"lock table {postgres.table} in access exclusive mode")
            await fact_about(postgres, waiting_for_the_table)
            runs.go.set()
            await runs.until(lambda: not runs.running)
            began = time.monotonic()
            await executor.stop(0.5)
            assert took(began) < 1.5
            await fact(lambda: pool.get_idle_size() == pool.get_size(), timeout=3)
        await before.nothing_left()
        # The server may carry out what it was sent before: then the task is done, and only the reply was given up.
        row = await queue.get(id)
        assert row is None or row.attempt == 0


async def fact_about(postgres: PostgresDatabase, look: Callable[[PostgresDatabase], Awaitable[bool]]) -> None:
    await eventually(lambda: look(postgres))


async def waiting_for_the_table(postgres: PostgresDatabase) -> bool:
    rows = await postgres.rows("select 1 from pg_locks where not granted and relation = '{table}'::regclass")
    return bool(rows)


async def test_stop_returns_in_time_while_another_process_writes(sqlite: SQLiteDatabase) -> None:
    """F36."""
    before = Before()
    async with hooked(sqlite) as queue:
        runs = Runs()
        executor = workq.Executor(queue, [holding(runs)], **SHORT)
        await executor.start()
        id = await enqueued(queue, "held")
        await runs.until(lambda: bool(runs.running))
        async with sqlite.caller() as app:
            await app.execute("create table theirs (x)")
            runs.go.set()
            await runs.until(lambda: not runs.running)
            began = time.monotonic()
            await executor.stop(0.5)
            assert took(began) < 1.5
            await app.rollback()
        assert (await row_of(queue, id)).attempt == 0
    await before.nothing_left()


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_start_that_is_stopped_twice_ends(queue: workq.Queue, turns: int) -> None:
    """The second time while it cleans up after the first."""
    executor = workq.Executor(queue, [note], **LONG)
    starting = asyncio.create_task(executor.start())
    await asyncio.sleep(0.0005)
    first = asyncio.create_task(executor.stop(1))
    for _ in range(turns):
        await asyncio.sleep(0)
    await executor.stop(0)
    await first
    async with asyncio.timeout(SOON):
        with suppress(Exception):
            await starting
    await executor.stop(0)
    assert executor.health().phase == "stopped"


@pytest.mark.parametrize("statement", ["claim", "extend", "succeed"])
async def test_stop_in_the_middle_of_any_statement_ends_in_time_and_leaves_nothing(
    statement: str, database: Database
) -> None:
    """F23, F36: a loop that is cancelled in the middle of its statement ends all the same."""
    before = Before()
    events, runs, held = Events(), Runs(), HeldReply()
    async with wired_queue(database, events) as (wire, queue):
        executor = workq.Executor(queue, [holding(runs)], **SHORT)
        await executor.start()
        await enqueued(queue, "held")
        await runs.until(lambda: bool(runs.running))
        wire.replies[getattr(wire.sql, statement)] = held
        await enqueued(queue, "held", 2)
        if statement == "succeed":
            runs.go.set()
        await held.sent.wait()
        began = time.monotonic()
        await executor.stop(0.3)
        assert took(began) < 1.3
        held.go.set()
    await before.nothing_left()


async def test_stop_at_any_moment_leaves_no_connection(postgres: PostgresDatabase) -> None:
    """F23: beats, claims and finishes are cut off wherever they are, and every connection is back in the pool."""
    async with asyncpg.create_pool(postgres.url, min_size=0, max_size=8) as pool:
        before = Before()
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()

        @workq.handler("quick")
        async def quick(task: workq.Task[int]) -> None:
            await asyncio.sleep(task.payload % 5 / 1000)

        for number in range(25):
            await queue.enqueue_many(None, [workq.NewTask(quick, n) for n in range(100)])
            executor = workq.Executor(queue, [quick], workers=8, lease=0.1, poll_interval=0.005)
            await executor.start()
            await asyncio.sleep(number / 300)
            began = time.monotonic()
            await executor.stop(0)
            assert took(began) < 1
            await fact(lambda: pool.get_idle_size() == pool.get_size(), timeout=2)
        await before.nothing_left()
        async with workq.Executor(queue, [quick], **LONG):
            await queue.wait(timeout=SOON)
        assert await queue.find() == []


async def test_an_idle_executor_and_one_that_waits_in_stop_use_no_cpu(database: Database) -> None:
    """F38: each less than 2 % of a core."""
    async with hooked(database) as queue:
        runs = Runs()
        executor = workq.Executor(queue, [holding(runs)], stop_timeout=SOON)
        await executor.start()
        await enqueued(queue, "held")
        await runs.until(lambda: bool(runs.running))
        idle = await cpu_share(1.5)
        stopping = asyncio.create_task(executor.stop())
        waiting = await cpu_share(1.5)
        runs.go.set()
        await stopping
        assert idle < 0.02
        assert waiting < 0.02


async def cpu_share(seconds: float) -> float:
    """The part of a core that this process uses while the test does nothing."""
    await asyncio.sleep(0.1)
    used, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


async def test_run_ends_by_stop_and_returns(queue: workq.Queue) -> None:
    executor = workq.Executor(queue, [note], **LONG)
    running = asyncio.create_task(executor.run())
    await queue.enqueue(None, note, 1)
    await queue.wait(timeout=SOON)
    await executor.stop()
    await running


async def test_run_that_is_cancelled_waits_for_running_tasks(database: Database) -> None:
    before = Before()
    async with hooked(database) as queue:
        runs = Runs()
        running = asyncio.create_task(workq.Executor(queue, [holding(runs)], **LONG).run())
        await enqueued(queue, "held")
        await runs.until(lambda: bool(runs.running))
        running.cancel()
        await asyncio.sleep(0.05)
        assert not running.done()
        runs.go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await queue.find() == []
    await before.nothing_left()


async def test_run_that_is_cancelled_twice_waits_no_longer(database: Database) -> None:
    """A second cancellation is stop(0): the task is handed back."""
    before = Before()
    async with hooked(database) as queue:
        runs = Runs()
        running = asyncio.create_task(workq.Executor(queue, [holding(runs)], **LONG).run())
        id = await enqueued(queue, "held")
        await runs.until(lambda: bool(runs.running))
        running.cancel()
        await asyncio.sleep(0.05)
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert took(began) < 1
        row = await row_of(queue, id)
        assert (row.state, row.attempt) == ("waiting", 0)
    await before.nothing_left()


async def test_run_raises_what_start_raises(database: Database) -> None:
    async with database.open() as db:
        with pytest.raises(workq.SchemaError):
            await workq.Executor(workq.Queue(db), [note], **LONG).run()


async def test_run_works_in_a_task_group_with_the_application(queue: workq.Queue) -> None:
    ended: list[str] = []

    async def application(executor: workq.Executor) -> None:
        await queue.enqueue(None, note, 1)
        await queue.wait(timeout=SOON)
        await executor.stop()
        ended.append("application")

    executor = workq.Executor(queue, [note], **LONG)
    async with asyncio.TaskGroup() as group:
        group.create_task(executor.run())
        group.create_task(application(executor))
    assert ended == ["application"]


async def test_leaving_by_an_exception_stops_it_and_lets_the_exception_through(database: Database) -> None:
    """F31: what runs has its time to end."""
    before = Before()
    async with hooked(database) as queue:
        runs = Runs()

        async def fail() -> None:
            async with workq.Executor(queue, [holding(runs)], **LONG):
                await enqueued(queue, "held")
                await runs.until(lambda: bool(runs.running))
                asyncio.get_running_loop().call_later(0.1, runs.go.set)
                raise LookupError("the application's")

        with pytest.raises(LookupError, match="the application's"):
            await fail()
        assert await queue.find() == []
    await before.nothing_left()


async def test_leaving_connect_by_an_exception_leaves_nothing(database: Database) -> None:
    """F31."""

    async def fail() -> None:
        async with hooked(database) as queue, workq.Executor(queue, [note], **LONG):
            await queue.enqueue(None, note, 1)
            queue.enqueue_soon(note, 2)
            raise LookupError("the application's")

    before = Before()
    with pytest.raises(LookupError, match="the application's"):
        await fail()
    await before.nothing_left()


async def test_a_body_that_is_cancelled_is_left_in_order(database: Database) -> None:
    before = Before()
    async with hooked(database) as queue:
        runs = Runs()
        runs.go.set()

        async def dawdle() -> None:
            async with asyncio.timeout(None) as limit, workq.Executor(queue, [holding(runs)], **LONG):
                await enqueued(queue, "held")
                limit.reschedule(asyncio.get_running_loop().time() + 0.3)
                await asyncio.sleep(SOON)

        with pytest.raises(TimeoutError):
            await dawdle()
        assert runs.started == Counter([1])
        assert await queue.find() == []
    await before.nothing_left()


Handlers = dict[signal.Signals, Any]


def handlers() -> Handlers:
    """Who is told of a signal now. (While a loop runs, SIGINT is asyncio's own.)"""
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


async def test_an_executor_installs_no_signal_handlers(queue: workq.Queue) -> None:
    """F37."""
    before = handlers()
    async with workq.Executor(queue, [note], **LONG):
        assert handlers() == before
    running = asyncio.create_task((executor := workq.Executor(queue, [note], **LONG)).run())
    await queue.enqueue(None, note, 1)
    await queue.wait(timeout=SOON)
    assert handlers() == before
    await executor.stop()
    await running


async def test_serve_stops_all_when_one_has_ended(queue: workq.Queue) -> None:
    """F37: and the previous handlers are back."""
    before = handlers()
    executors = [workq.Executor(queue, [note], queue_name=name, **LONG) for name in ("one", "two")]
    serving = asyncio.create_task(workq.serve(*executors))
    for name in ("one", "two"):
        await queue.enqueue(None, note, 1, queue=name)
    await queue.wait(timeout=SOON)
    assert handlers() != before
    await executors[0].stop()
    await serving
    assert all("ended" in repr(executor) for executor in executors)
    assert handlers() == before


async def test_serve_that_is_cancelled_lets_running_tasks_end(queue: workq.Queue) -> None:
    before = handlers()
    runs = Runs()
    serving = asyncio.create_task(workq.serve(workq.Executor(queue, [holding(runs)], **LONG)))
    await enqueued(queue, "held")
    await runs.until(lambda: bool(runs.running))
    serving.cancel()
    await asyncio.sleep(0.05)
    assert not serving.done()
    runs.go.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert await queue.find() == []
    assert handlers() == before


async def test_serve_raises_what_one_start_raises_and_stops_the_others(queue: workq.Queue) -> None:
    set_before, before = handlers(), Before()
    good = workq.Executor(queue, [note], **LONG)
    broken = workq.Schedule(tick, lambda last: cast(Any, None))
    bad = workq.Executor(queue, [tick], schedules=[broken], queue_name="two", **LONG)
    with pytest.raises(ValueError, match="None"):
        await workq.serve(good, bad)
    assert handlers() == set_before
    await before.nothing_left()


async def test_serve_needs_something_to_serve() -> None:
    with pytest.raises(ValueError, match="at least one"):
        await workq.serve()


async def test_serve_outside_the_main_thread_leaves_signals_alone(database: Database) -> None:
    before = handlers()

    async def served() -> None:
        async with hooked(database) as queue:
            executor = workq.Executor(queue, [note], **LONG)
            serving = asyncio.create_task(workq.serve(executor))
            await queue.enqueue(None, note, 1)
            await queue.wait(timeout=SOON)
            assert handlers() == before
            await executor.stop()
            await serving

    await asyncio.to_thread(lambda: asyncio.run(served()))
    assert handlers() == before


PRELUDE = """
import asyncio, os, signal, sys, threading, time
import workq

URL, SCHEMA = sys.argv[1], sys.argv[2] or None

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: threads speak too
    sys.stdout.flush()

def connect():
    return workq.connect(URL, schema=SCHEMA, listen="WORKQ_TEST_POOLER" not in os.environ)

@workq.handler("slow")
async def slow(task):
    say("started", task.payload)
    try:
        await asyncio.sleep(task.payload)
    except asyncio.CancelledError:
        say("cancelled")
        raise
    say("finished")

@workq.handler("plain")
def plain(task):
    say("started", task.payload)
    time.sleep(task.payload)
    say("finished")

@workq.handler("tick")
async def tick(task: workq.Task): ...
"""


class Child:
    """A program of its own, whose lines a test can wait for."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, word: str) -> str:
        """Wait for a line that begins so."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SOON * 2):
            while True:
                line = (await self.process.stdout.readline()).decode()
                if not line:
                    raise AssertionError(f"it ended without saying {word!r}: {self.lines}, {await self.errors()}")
                self.lines.append(line.rstrip())
                if line.startswith(word):
                    return line

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def ended(self, within: float) -> None:
        """Wait for its end."""
        try:
            async with asyncio.timeout(within):
                await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"it did not end within {within} s: {self.lines}") from None


@asynccontextmanager
async def child(database: Database, script: str) -> AsyncGenerator[Child]:
    """Run a program; its warnings are errors, and it is killed if the test fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        PRELUDE + textwrap.dedent(script),
        database.url,
        database.schema or "",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


SERVE = """
def mine(number, frame):
    say("mine", number)

async def main():
    async with connect() as db:
        queue = workq.Queue(db)
        executors = [
            workq.Executor(queue, [slow, plain], queue_name=name, poll_interval=0.05, stop_timeout={stop_timeout})
            for name in ("", "two")
        ]
        before = {{number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}}
        say("serving")
        await workq.serve(*executors)
        say("served", all(signal.getsignal(number) == handler for number, handler in before.items()))

signal.signal(signal.SIGTERM, mine)
asyncio.run(main())
say("returned")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_the_first_signal_lets_running_tasks_end(
    number: signal.Signals, database: Database, queue: workq.Queue
) -> None:
    """F37: draining, also of several executors; the previous handlers are restored."""
    slow, plain = await enqueued(queue, "slow", 1), await queue.enqueue(None, "plain", 1, queue="two")
    async with child(database, SERVE.format(stop_timeout=30)) as program:
        await program.until("started")
        await program.until("started")
        program.process.send_signal(number)
        await program.until("served True")
        await program.until("returned")
        await program.ended(2)
        assert program.lines.count("finished") == 2
        assert "cancelled" not in program.lines
        assert program.process.returncode == 0
        assert await program.errors() == ""
    assert await queue.get(slow) is None
    assert plain is not None
    assert await queue.get(plain) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_the_second_signal_is_immediate(number: signal.Signals, database: Database, queue: workq.Queue) -> None:
    """F37: what runs is cancelled and handed back."""
    id = await enqueued(queue, "slow", 3600)
    async with child(database, SERVE.format(stop_timeout=60)) as program:
        await program.until("started")
        program.process.send_signal(number)
        await asyncio.sleep(0.4)
        assert "served True" not in program.lines
        began = time.monotonic()
        program.process.send_signal(number)
        await program.until("served True")
        assert took(began) < 2
        await program.until("returned")
        await program.ended(2)
        assert "cancelled" in program.lines
        assert program.process.returncode == 0
        assert await program.errors() == ""
    row = await row_of(queue, id)
    assert (row.state, row.attempt, row.lost) == ("waiting", 0, 0)


async def test_after_a_signal_the_stop_timeout_bounds_all_executors_together(
    database: Database, queue: workq.Queue
) -> None:
    """clean stop: they stop at once, not one after the other."""
    await enqueued(queue, "slow", 3600)
    await queue.enqueue(None, "slow", 3600, queue="two")
    async with child(database, SERVE.format(stop_timeout=1)) as program:
        await program.until("started")
        await program.until("started")
        began = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        await program.until("served True")
        assert took(began) < 2
        assert program.lines.count("cancelled") == 2
        await program.ended(2)


EXITS = {
    "in order": """
        async def main():
            async with connect() as db:
                queue = workq.Queue(db)
                async with workq.Executor(queue, [slow, plain], poll_interval=0.05):
                    await queue.enqueue(None, "slow", 0)
                    await queue.enqueue(None, "plain", 0)
                    await queue.wait(timeout=10)
        """,
    "an error of the application": """
        async def main():
            try:
                async with connect() as db:
                    queue = workq.Queue(db)
                    async with workq.Executor(queue, [slow, plain], poll_interval=0.05):
                        await queue.enqueue(None, "plain", 0)
                        await queue.wait(timeout=10)
                        raise LookupError("the application's")
            except LookupError:
                pass
        """,
    "a failed start": """
        async def main():
            async with connect() as db:
                queue = workq.Queue(db)
                try:
                    await workq.Executor(queue, [tick], schedules=[workq.Schedule(tick, lambda last: None)]).start()
                except ValueError as error:
                    say("refused", error)
        """,
    "a failed start that nobody catches": """
        async def start():
            async with connect() as db:
                schedules = [workq.Schedule(tick, lambda last: None)]
                await workq.Executor(workq.Queue(db), [tick], schedules=schedules).start()

        async def main():
            try:
                await start()
            except ValueError as error:
                say("refused", error)
        """,
    "only a producer": """
        async def main():
            async with connect() as db:
                queue = workq.Queue(db)
                await queue.enqueue(None, "elsewhere", 1)
                queue.enqueue_soon("elsewhere", 2)
        """,
    "a cancelled main": """
        async def main():
            try:
                async with asyncio.timeout(1), connect() as db:
                    async with workq.Executor(workq.Queue(db), [slow], poll_interval=0.05):
                        await asyncio.sleep(60)
            except TimeoutError:
                pass
        """,
}
FORGETFUL = {
    "a forgotten stop": """
        async def main():
            async with connect() as db:
                queue = workq.Queue(db)
                executor = workq.Executor(queue, [slow, plain], poll_interval=0.05)
                await executor.start()
                await queue.enqueue(None, "plain", 0)
                await queue.wait(timeout=10)
        """,
    "a forgotten close": """
        async def main():
            global opened, executor
            opened = connect()
            queue = workq.Queue(await opened.__aenter__())
            executor = workq.Executor(queue, [slow, plain], poll_interval=0.05)
            await executor.start()
            await queue.enqueue(None, "plain", 0)
            await queue.wait(timeout=10)
        """,
    "a failed start and a forgotten close": """
        async def main():
            global opened
            opened = connect()
            queue = workq.Queue(await opened.__aenter__())
            try:
                await workq.Executor(queue, [tick], schedules=[workq.Schedule(tick, lambda last: None)]).start()
            except ValueError as error:
                say("refused", error)
        """,
    "a plain def that is still running": """
        async def main():
            async with connect() as db:
                queue = workq.Queue(db)
                executor = workq.Executor(queue, [plain], poll_interval=0.05)
                await executor.start()
                await queue.enqueue(None, "plain", 60)
                while not executor.health().running:
                    await asyncio.sleep(0.01)
                await executor.stop(0)
        """,
}
RETURNED = """
asyncio.run(main())
say("returned")
until = time.monotonic() + 1
while threading.active_count() > 1 and time.monotonic() < until:
    time.sleep(0.01)
say("threads", *[thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])
"""


@pytest.mark.parametrize("how", EXITS)
async def test_a_process_ends_with_asyncio_run_and_without_a_thread_left(
    how: str, database: Database, queue: workq.Queue
) -> None:
    """F31: within 2 s, and without a word."""
    async with child(database, textwrap.dedent(EXITS[how]) + RETURNED) as program:
        await program.until("returned")
        assert await program.until("threads") == "threads\n"
        await program.ended(2)
        assert program.process.returncode == 0
        assert await program.errors() == ""
        assert ("refused" in " ".join(program.lines)) == ("start" in how)


@pytest.mark.parametrize("how", FORGETFUL)
async def test_a_process_ends_also_when_something_was_forgotten(
    how: str, database: Database, queue: workq.Queue
) -> None:
    """F31: within 2 s of asyncio.run's return."""
    async with child(database, textwrap.dedent(FORGETFUL[how]) + RETURNED) as program:
        await program.until("returned")
        await program.ended(2)
