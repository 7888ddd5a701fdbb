"""PostgreSQL cancels statements: by a timeout of the server's, by an operator. That says nothing about the tasks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import asyncpg
import pytest

from crash.names import name_of
from faults.flow import Flow, flow
from records import record
from support import PostgresDatabase, eventually
from workq.dialect import Unreachable, Urgency
from workq.testing._server import Server

BACK_AGAIN = 5.0
IMMUNE = {"statement_timeout": "0"}

CANCEL = """
select pg_cancel_backend(pid) from pg_stat_activity
 where state = 'active' and pid <> pg_backend_pid() and datname = current_database()
"""


async def judged(story: str, database: PostgresDatabase, tasks: Flow, resumed: float, began: float) -> None:
    completed = Counter(tasks.completed())
    violations = {
        "no loss": len(tasks.enqueued - set(completed)),
        "fence": sum(completed.values()) - len(completed),
        "back again": int(resumed > BACK_AGAIN),
    }
    record(
        "crash",
        await name_of(database),
        story,
        tasks=len(tasks.enqueued),
        took=time.monotonic() - began,
        violations=violations,
        times={"back again": [resumed]},
    )
    assert [event for event in tasks.events if event.kind == "failed"] == []
    assert violations == dict.fromkeys(violations, 0)
    assert {type(error) for error in tasks.failures} <= {asyncpg.QueryCanceledError}


async def test_statements_that_the_server_has_no_time_for_fail_no_task(
    mortal: PostgresDatabase, server: Server
) -> None:
    """F18, isolation: statement_timeout is so short for two seconds that next to nothing comes through."""
    began = time.monotonic()
    conn = await asyncpg.connect(server.url, server_settings=IMMUNE)
    try:
        async with flow(mortal, lease=300) as tasks:
            await tasks.runs(since=0)
            await conn.execute("alter system set statement_timeout = '1ms'")
            await conn.execute("select pg_reload_conf()")
            await asyncio.sleep(2)
            await conn.execute("alter system reset statement_timeout")
            await conn.execute("select pg_reload_conf()")
            resumed = await tasks.runs(since=time.monotonic(), timeout=4 * BACK_AGAIN)
            await tasks.end()
            await eventually(tasks.healthy)
            await judged("statement_timeout of 1 ms for two seconds", mortal, tasks, resumed, began)
    finally:
        await conn.execute("alter system reset all")
        await conn.execute("select pg_reload_conf()")
        await conn.close()


async def test_statements_that_an_operator_cancels_fail_no_task(mortal: PostgresDatabase, server: Server) -> None:
    """F18, isolation: hundreds of times, whatever is running."""
    began, hit = time.monotonic(), 0
    conn = await asyncpg.connect(server.url)
    try:
        async with flow(mortal, lease=300) as tasks:
            await tasks.runs(since=0)
            until = time.monotonic() + 10
            while len(tasks.failures) < 3 and time.monotonic() < until:
                hit += len(await conn.fetch(CANCEL))
            resumed = await tasks.runs(since=time.monotonic(), timeout=4 * BACK_AGAIN)
            await tasks.end()
            await eventually(tasks.healthy)
            await judged("statements are cancelled", mortal, tasks, resumed, began)
    finally:
        await conn.close()
    assert hit > 0


@pytest.mark.parametrize("error", [asyncpg.DiskFullError, asyncpg.OutOfMemoryError, asyncpg.PostgresIOError])
async def test_what_ails_the_server_is_not_held_against_the_statement(
    postgres: PostgresDatabase, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """F18: or else a finish that meets it would be taken for one that the database refuses, and fail its task."""

    async def fetch(self: asyncpg.Connection, *args: object) -> None:
        raise error("for a while")

    async with postgres.open() as db:
        conn = db.connection("test")
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "fetch", fetch)
            with pytest.raises(Unreachable):
                await conn.fetch(db.sql.now, {}, Urgency(timeout=1))
        assert len(await conn.fetch(db.sql.now, {}, Urgency(timeout=10))) == 1
        await conn.close()
