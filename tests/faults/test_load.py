"""What others met under load or after an outage: storms, locks, dead rows, one NOTIFY for each row."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import pytest

import workq
import workq_aiosqlite
from faults.proxy import proxy_to
from plans.explain import wanted
from support import (
    SOON,
    Database,
    Events,
    PostgresDatabase,
    Runs,
    SQLiteDatabase,
    eventually,
    hooked,
    wired_queue,
)
from workq._backoff import growing
from workq._store import Lane

QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 5}


async def test_a_transaction_that_has_read_something_old_fails_at_once_and_an_immediate_one_waits(
    sqlite: SQLiteDatabase,
) -> None:
    """F29: the caller's transaction. busy_timeout does not help the first; the README says which one to take."""
    async with sqlite.open() as db, aiosqlite.connect(sqlite.path, isolation_level=None, timeout=5) as conn:
        queue = workq.Queue(db)
        await queue.migrate()
        await conn.execute("begin")
        await conn.execute_fetchall("select count(*) from workq")
        await queue.enqueue(None, "work", 1)
        began = time.monotonic()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await queue.enqueue(conn, "work", 2)
        assert time.monotonic() - began < 2
        await conn.rollback()

        await conn.execute("begin immediate")
        await conn.execute_fetchall("select count(*) from workq")
        other = asyncio.create_task(queue.enqueue(None, "work", 3))
        await asyncio.sleep(0.05)
        assert await queue.enqueue(conn, "work", 4) is not None
        await conn.commit()
        assert await other is not None
        assert len(await queue.find()) == 3
    assert "begin immediate" in (Path(__file__).parents[2] / "README.md").read_text().lower()


def test_workqs_own_transactions_on_sqlite_begin_as_writers() -> None:
    """F29: none of them reads first and writes then in a deferred one."""
    begins: list[str] = []
    for path in Path(str(workq_aiosqlite.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.lower().startswith("begin"):
                begins.append(text.lower())
    assert len(begins) >= 2
    assert set(begins) == {"begin immediate"}


def test_attempts_of_nodes_that_failed_together_drift_apart() -> None:
    """F27: each pause is drawn, longer ones follow, and none is longer than the limit."""
    one, other = ([pause for pause, _ in zip(growing(0.05, 2), range(12), strict=False)] for _ in range(2))
    assert one != other
    assert max(one + other) <= 2
    assert sum(one[6:]) > sum(one[:6])


async def test_an_outage_makes_no_storm_of_connections(postgres: PostgresDatabase) -> None:
    """F27: at most one attempt at a time for each place of the pool, and fewer and fewer."""
    async with proxy_to(postgres.url) as (proxy, url), workq.connect(url, schema=postgres.schema) as db:
        queue = workq.Queue(db)
        await queue.migrate()

        @workq.handler("work")
        async def work(task: workq.Task[int]) -> None: ...

        attempts: list[float] = []
        serve = proxy.serve
        most = 0

        async def counted(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
            nonlocal most
            attempts.append(time.monotonic())
            most = max(most, len(proxy.links) + 1)
            await serve(client, to_client)

        async with workq.Executor(queue, [work], **QUICK) as executor:
            await queue.enqueue(None, work, 1)
            await queue.wait(timeout=SOON)
            target, proxy._target = proxy._target, ("127.0.0.1", 1)  # pyright: ignore[reportPrivateUsage]
            proxy.serve = counted  # type: ignore[method-assign]
            proxy.cut()
            await asyncio.sleep(4)
            # Claims, heartbeats and the ear: pauses from 0.05 s on, each up to twice as long, 2 s at most.
            assert 2 <= len(attempts) <= 3 * 14, len(attempts)
            assert most <= 5
            assert sum(at > attempts[0] + 2 for at in attempts) <= sum(at <= attempts[0] + 2 for at in attempts)
            proxy._target = target  # pyright: ignore[reportPrivateUsage]

            async def healthy() -> bool:
                return executor.health().reachable is True and executor.health().ok

            await eventually(healthy)
            await queue.enqueue(None, work, 1)
            await queue.wait(timeout=SOON)


async def test_polls_of_nodes_that_started_together_drift_apart(database: Database) -> None:
    """F27: no two intervals are alike."""
    async with wired_queue(database) as (wire, queue):
        times: list[float] = []

        async def seen(rows: Any) -> Any:
            times.append(time.monotonic())
            return rows

        wire.replies[wire.sql.claim] = seen

        @workq.handler("work")
        async def work(task: workq.Task[int]) -> None: ...

        async with workq.Executor(queue, [work], poll_interval=0.2, stop_timeout=5):

            async def enough() -> bool:
                return len(times) > 16

            await eventually(enough)
        pauses = [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later - earlier > 0.1]
        assert len({round(pause, 3) for pause in pauses}) > len(pauses) // 2


async def test_transactions_that_enqueue_send_no_notify_and_rings_are_few(postgres: PostgresDatabase) -> None:
    """F58: NOTIFY takes a lock of the whole server at commit; nothing of it is in the caller's transaction."""
    async with wired_queue(postgres) as (wire, queue):
        assert wire.sql.ring is not None
        conn = await asyncpg.connect(postgres.url)
        sent: list[str] = []
        conn.add_query_logger(lambda query: sent.append(query.query))
        began = time.monotonic()
        for number in range(300):
            async with conn.transaction():
                await queue.enqueue(conn, "work", number)
                await queue.enqueue_many(conn, [workq.NewTask("work", number)] * 20)
        took = time.monotonic() - began
        await conn.close()
        assert len(sent) >= 600
        assert [text for text in sent if "notify" in text.lower()] == []
        await asyncio.sleep(0.1)
        rings = wire.asked[wire.sql.ring]
        assert 1 <= rings <= 300
        assert rings <= (took + 0.1) / 0.003 + 2  # one every 3 ms at most, whatever there is to tell


async def test_who_listens_to_nothing_rings_for_nobody(postgres: PostgresDatabase) -> None:
    """F58, F20: it can be turned off."""
    async with postgres.open(listen=False) as db:
        assert db.sql.ring is None


@pytest.mark.parametrize("dead", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_dead_rows_under_a_held_snapshot_do_not_slow_down_a_claim(postgres: PostgresDatabase, dead: int) -> None:
    """F55: with the cursor it touches at most five times the pages of a clean table; without, it walks over them."""
    async with postgres.open() as db:
        await workq.Queue(db).migrate()
    sql = db.sql
    conn, old = await asyncpg.connect(postgres.url), await asyncpg.connect(postgres.url)
    try:

        async def due(number: int, first: int) -> None:
            await conn.execute(
                f"insert into {sql.names.table} (queue, name, run_at, payload) "
                f"select '', 'work', now() - interval '1 day' + ({first} + n) * interval '1 us', '1' "
                f"from generate_series(1, {number}) n"
            )

        async def pages(cursor: list[Lane]) -> int:
            arguments = sql.claim.positional(wanted(["work"], cursor=cursor))
            await conn.execute("begin")
            text = await conn.fetchval(f"explain (analyze, buffers, format json) {sql.claim.text}", *arguments)
            await conn.execute("rollback")
            top = json.loads(text)[0]["Plan"]
            return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

        await due(500, 0)
        await conn.execute(f"vacuum analyze {sql.names.table}")
        clean = await pages([])
        await conn.execute(f"truncate {sql.names.table}")
        await due(dead, 0)
        await old.execute("begin isolation level repeatable read")
        await old.fetchval(f"select count(*) from {sql.names.table} where id < 10")
        row = await conn.fetchrow(f"select run_at, id from {sql.names.table} order by run_at desc limit 1")
        assert row is not None
        await conn.execute(f"delete from {sql.names.table}")
        await due(500, dead)
        await conn.execute(f"vacuum analyze {sql.names.table}")
        behind = await pages([Lane("work", 0, row["run_at"], row["id"])])
        without = await pages([])
        assert behind <= 5 * clean, (clean, behind, without)
        assert without > behind
    finally:
        await conn.close()
        await old.close()


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
async def test_claims_beats_finishes_retries_and_deletes_at_once_bring_no_deadlock_to_the_surface(
    database: Database, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    """F26: multi-row statements of everybody, over the same rows, in every order."""
    randomness = random.Random(26)

    @workq.handler("work", retry=workq.linear(retries=1, delay=0.01))
    async def work(task: workq.Task[int]) -> None:
        await asyncio.sleep(randomness.random() / 50)
        if task.payload % 3 == 0:
            raise ValueError

    async with hooked(database) as queue, database.open() as other_db:
        other = workq.Queue(other_db)
        options: dict[str, Any] = {"workers": 20, "lease": 0.9, "poll_interval": 0.02, "stop_timeout": 5}
        until = time.monotonic() + seconds
        changes: list[Any] = [other.delete, other.retry, other.reschedule, other.disable]

        async def produce() -> None:
            while time.monotonic() < until:
                tasks = [workq.NewTask(work, n, key=str(randomness.randrange(400))) for n in range(30)]
                await queue.enqueue_many(None, tasks)

        async def repair() -> None:
            while time.monotonic() < until:
                await other.retry_all(None, limit=50)
                rows = await other.find(limit=40)
                for row in randomness.sample(rows, min(len(rows), 8)):
                    with suppress(workq.KeyTaken):
                        await randomness.choice(changes)(None, row.id)

        async with workq.Executor(queue, [work], **options), workq.Executor(other, [work], **options):
            async with asyncio.TaskGroup() as group:
                for job in (produce, produce, repair, repair):
                    group.create_task(job())
            await queue.wait(timeout=3 * SOON)
    told = [record.getMessage() for record in caplog.records if record.name == "workq"]
    assert [line for line in told if "eadlock" in line or "locked" in line or "40P01" in line] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_thousand_tasks_that_run_for_ten_leases_under_load_are_never_taken_over(database: Database) -> None:
    """F10: two nodes, the other of which has a free place all the time."""
    runs, events, lease = Runs(), Events(), 4.0

    @workq.handler("long")
    async def long(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    @workq.handler("quick")
    async def quick(task: workq.Task[int]) -> None: ...

    async with hooked(database, events) as queue, database.open() as db:
        other = workq.Queue(db, on_event=[events])
        settings: dict[str, Any] = {"lease": lease, "claim_ahead": False} | QUICK
        async with workq.Executor(queue, [long, quick], workers=1_020, **settings):
            await queue.enqueue_many(None, [workq.NewTask(long, n) for n in range(1_000)])
            await runs.until(lambda: len(runs.running) == 1_000, timeout=3 * SOON)
            async with workq.Executor(other, [long, quick], workers=20, **settings):
                until = time.monotonic() + 10 * lease
                while time.monotonic() < until:
                    await other.enqueue_many(None, [workq.NewTask(quick, n) for n in range(200)])
                    await asyncio.sleep(0.05)
                runs.go.set()
                await queue.wait(timeout=6 * SOON)
        assert runs.started == Counter(range(1_000))
        assert events.count("lost") == 0
