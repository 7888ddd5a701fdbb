"""What the application's role may do on PostgreSQL: no more than the README grants, and that is enough."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

import workq
import workq_asyncpg
from everything import do_everything, never_sent, pool_for, role_on, statements_sent, transactions_of
from support import SOON, PostgresDatabase, Runs, eventually

README = Path(__file__).parents[2] / "README.md"

MIGRATES = {"schema_exists", "write_version"}


def grants(schema: str, role: str) -> list[str]:
    """The README's, for this schema and role."""
    found = [text for text in re.findall(r"^```sql\n(.*?)^```$", README.read_text(), re.M | re.S) if "grant" in text]
    assert len(found) == 1
    text = re.sub("--.*", "", found[0]).replace("public", f'"{schema}"')
    return [re.sub(r"to app$", f"to {role}", line.strip()) for line in text.split(";") if line.strip()]


@pytest_asyncio.fixture
async def role(postgres: PostgresDatabase) -> AsyncGenerator[str]:
    """One that may do what the README grants, on a table that another one made."""
    async with postgres.open() as db:
        await workq.Queue(db).migrate()
    async with role_on(postgres) as name:
        for grant in grants(str(postgres.schema), name):
            await postgres.rows(grant)
        yield name


async def test_a_role_that_may_only_read_and_write_rows_can_do_everything_but_migrate(
    postgres: PostgresDatabase, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SELECT, INSERT, UPDATE and DELETE on the table, SELECT on its version; really every statement was sent."""
    async with pool_for(postgres, role) as pool:
        db = workq_asyncpg.Postgres(pool, schema=postgres.schema)
        with statements_sent(monkeypatch) as texts:
            await do_everything(workq.Queue(db), transactions_of(pool))
        assert never_sent(db.sql, texts) == MIGRATES
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await workq.Queue(db).migrate()


async def test_such_a_role_hears_the_rings_of_other_processes(postgres: PostgresDatabase, role: str) -> None:
    """LISTEN and NOTIFY need no right; nothing here polls."""
    runs = Runs()
    runs.go.set()

    @workq.handler("note")
    async def note(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with pool_for(postgres, role) as pool, pool_for(postgres, role) as other:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        elsewhere = workq.Queue(workq_asyncpg.Postgres(other, schema=postgres.schema))
        async with workq.Executor(queue, [note], poll_interval=600):

            async def listens() -> bool:
                query = "select 1 from pg_stat_activity where usename = $1 and query like 'LISTEN%'"
                return await other.fetchval(query, role) is not None

            await eventually(listens)
            await elsewhere.enqueue(None, note, "alone")
            await runs.until(lambda: runs.started["alone"] == 1)
            async with transactions_of(other)() as tx:
                await elsewhere.enqueue(tx, note, "in a transaction")
            await runs.until(lambda: runs.started["in a transaction"] == 1)
            await queue.wait(timeout=SOON)


@pytest.mark.parametrize("right", ["select", "insert", "update", "delete"])
async def test_none_of_these_rights_is_too_much(postgres: PostgresDatabase, role: str, right: str) -> None:
    await postgres.rows(f"revoke {right} on {postgres.table} from {role}")
    async with pool_for(postgres, role) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))

        @workq.handler("note")
        async def note(task: workq.Task[str]) -> None: ...

        async def use() -> None:
            async with workq.Executor(queue, [note], poll_interval=0.05, stop_timeout=0):
                await queue.enqueue(None, note, "x")
                await queue.wait(timeout=0.5)

        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await use()


async def test_an_empty_search_path_is_enough_for_every_statement(
    postgres: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F52: in a schema of its own, from the migration to the last delete."""
    async with pool_for(postgres, "postgres", search_path="") as pool:
        db = workq_asyncpg.Postgres(pool, schema=postgres.schema)
        assert await pool.fetchval("show search_path") in ("", '""')
        with statements_sent(monkeypatch) as texts:
            await workq.Queue(db).migrate()
            await do_everything(workq.Queue(db), transactions_of(pool))
        assert never_sent(db.sql, texts) == set()
