"""Behind pgbouncer in transaction mode (F20): every statement of a client may run in another session of the server.

The setting is that of the README: `connect(url, listen=False)`; for a pool of one's own also `statement_cache_size=0`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncpg
import pytest

import workq
import workq_asyncpg
from crash.bouncer import Bouncer, bouncing, find_pgbouncer
from crash.names import name_of
from faults.flow import flow
from records import record
from support import SOON, Events, PostgresDatabase, eventually
from workq.dialect import Dialect
from workq.testing._server import Server

BACK_AGAIN = 5.0
SESSIONS = 3
"""Of the server, for all clients: far fewer than these have connections."""


@pytest.fixture
def bouncer(server: Server) -> Generator[Bouncer]:
    program = find_pgbouncer()
    if program is None:
        pytest.skip("there is no pgbouncer here (Debian: apt-get install pgbouncer)")
    with bouncing(program, server.url, size=SESSIONS) as bouncer:
        yield bouncer


def restart(bouncer: Bouncer) -> None:
    """As a package upgrade does it."""
    bouncer.stop()
    bouncer.start()


def crash(bouncer: Bouncer) -> None:
    bouncer.kill()
    bouncer.start()


def pause(bouncer: Bouncer) -> None:
    """It is gone for two seconds."""
    bouncer.stop()
    time.sleep(2)
    bouncer.start()


WAYS: dict[str, Callable[[Bouncer], None]] = {"restarted": restart, "killed": crash, "gone for 2 s": pause}


@pytest.mark.parametrize(
    "rounds", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["3", "60"]
)
async def test_pgbouncer_restarted_in_mid_run_loses_nothing_and_work_resumes(
    mortal: PostgresDatabase, bouncer: Bouncer, rounds: int
) -> None:
    """F20: no loss, back again (5 s)."""
    began, resumed = time.monotonic(), list[float]()
    ways = [*WAYS.values()]

    def opened(url: str) -> AbstractAsyncContextManager[Dialect]:
        return workq.connect(url, schema=mortal.schema, listen=False)

    async with flow(mortal, bouncer.url, bouncer.url, opened=opened, lease=300) as tasks:
        await tasks.runs(since=0)
        for number in range(rounds):
            await asyncio.to_thread(ways[number % len(ways)], bouncer)
            back = time.monotonic()
            resumed.append(await tasks.runs(since=back, timeout=2 * BACK_AGAIN))
            await tasks.runs(since=time.monotonic())
        await tasks.end()
        await eventually(tasks.healthy)
        left = await mortal.rows("select id from {table}")
    completed = Counter(tasks.completed())
    lost = tasks.enqueued - set(completed)
    twice = [id for id, times in completed.items() if times > 1]
    record(
        "crash",
        f"{await name_of(mortal)}, pgbouncer",
        "pgbouncer restarted under load",
        tasks=len(tasks.enqueued),
        took=time.monotonic() - began,
        runs=rounds,
        violations={
            "no loss": len(lost),
            "fence": len(twice),
            "back again": sum(seconds > BACK_AGAIN for seconds in resumed),
        },
        times={"back again": resumed},
    )
    assert left == []
    assert lost == set()
    assert twice == []
    assert max(resumed) < BACK_AGAIN


async def test_everything_that_writes_works_where_no_session_lasts(mortal: PostgresDatabase, bouncer: Bouncer) -> None:
    """F20: with a pool of one's own: transactions with enqueue and complete, keys, repair, a schedule; at once."""
    began, events = time.monotonic(), Events()
    ledger = f'"{mortal.schema}"."ledger"'
    async with asyncpg.create_pool(bouncer.url, min_size=0, max_size=30, statement_cache_size=0) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema, listen=False), on_event=[events])
        await queue.migrate()
        await mortal.rows(f"create table {ledger} (task bigint)")

        @workq.handler("pay", retry=workq.linear(retries=2, delay=0))
        async def pay(task: workq.Task[int]) -> None:
            async with pool.acquire() as conn, conn.transaction():
                await conn.execute(f"insert into {ledger} values ($1)", task.id)
                if task.payload % 10 == 0 and task.attempt == 1:
                    raise ValueError("at first it fails")
                await task.complete(conn)

        @workq.handler("breaks")
        async def breaks(task: workq.Task[bool]) -> None:
            if task.payload:
                raise ValueError("until somebody repairs it")

        @workq.handler("tick")
        async def tick(task: workq.Task) -> None: ...

        async def order(number: int) -> int | None:
            async with pool.acquire() as conn, conn.transaction():
                return await queue.enqueue(conn, pay, number, key=f"k{number % 150}")

        # Few runs at once, or the handlers' own transactions would use up what pgbouncer has.
        schedules = [workq.Schedule(tick, workq.every(seconds=0.2))]
        options: dict[str, Any] = {"workers": 4, "poll_interval": 0.1, "schedules": schedules}
        async with workq.Executor(queue, [pay, breaks, tick], **options):
            ids = [id for id in await asyncio.gather(*map(order, range(200))) if id is not None]
            broken = await queue.enqueue(None, breaks, True)
            assert broken is not None
            await queue.wait(pay, breaks, timeout=3 * SOON)
            assert await queue.retry(None, broken, payload=False)
            await queue.wait(pay, breaks, timeout=SOON)
            await events.until("completed", len(ids) + 3)
        paid = await mortal.rows(f"select task from {ledger}")
        left = {row.name for row in await queue.find()}
    record(
        "crash",
        f"{await name_of(mortal)}, pgbouncer",
        "pgbouncer gives each transaction another session",
        tasks=len(ids) + 1,
        took=time.monotonic() - began,
        violations={"no loss": len({*ids} - {id for (id,) in paid}), "fence": len(paid) - len({*paid})},
    )
    assert Counter(id for (id,) in paid) == dict.fromkeys(ids, 1)
    assert len(ids) >= 150
    assert left == {"tick"}
    assert len({event.id for event in events if event.name == "tick" and event.kind == "completed"}) == 1


async def test_a_pool_with_prepared_statements_shows_why_the_setting_is_needed(
    mortal: PostgresDatabase, bouncer: Bouncer
) -> None:
    """F20: pgbouncer 1.18 knows no prepared statements; whoever forgets the setting hears of it at once."""
    async with asyncpg.create_pool(bouncer.url, min_size=0, max_size=6) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=mortal.schema, listen=False))

        async def many_at_once() -> None:
            for _ in range(20):
                await asyncio.gather(*(queue.migrate() for _ in range(4)), *(queue.find() for _ in range(4)))

        with pytest.raises(asyncpg.PostgresError, match="prepared statement"):
            await many_at_once()
