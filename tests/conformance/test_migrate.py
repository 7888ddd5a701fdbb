"""The schema: made by whoever comes first, all or nothing, wherever it is to lie, with no more rights than needed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import pytest
import pytest_asyncio

import workq
import workq_asyncpg
from everything import do_everything, pool_for, role_on, tick, transactions_of, work
from support import SOON, Database, PostgresDatabase, SQLiteDatabase
from workq import _migrate
from workq.dialect import Dialect

ODD = 'Odd "table" of öurs'


async def version_rows(database: Database, table: str = "workq") -> list[tuple[Any, ...]]:
    """All of the version table."""
    qualified = database.table.replace('"workq"', '"' + table.replace('"', '""') + '_version"')
    return await database.rows(f"select * from {qualified}")


def break_step(db: Dialect, *steps: tuple[str, ...]) -> None:
    """Give the code other migrations."""
    vars(db)["_sql"] = replace(db.sql, migrations=steps)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_sixteen_migrations_at_once_make_one_schema(database: Database, rounds: int) -> None:
    """F50: no errors, and every one of them leaves a table that works."""

    async def migrate(table: str) -> None:
        async with database.open(table=table) as db:
            queue = workq.Queue(db)
            await queue.migrate()
            assert await queue.enqueue(None, "work", 1) is not None

    for number in range(rounds):
        table = f"w{number}"
        await asyncio.gather(*(migrate(table) for _ in range(16)))
        assert len(await version_rows(database, table)) == 1
        qualified = database.table.replace("workq", table)
        assert await database.rows(f"select count(*) from {qualified}") == [(16,)]


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_migrations_at_once_also_agree_on_a_schema_that_is_missing(
    postgres: PostgresDatabase, rounds: int
) -> None:
    """F50: CREATE SCHEMA IF NOT EXISTS is not safe against itself either."""

    async def migrate() -> None:
        async with postgres.open(pool_size=2) as db:
            await workq.Queue(db).migrate()

    for _ in range(rounds):
        await asyncio.gather(*(migrate() for _ in range(16)))
        assert len(await version_rows(postgres)) == 1
        await postgres.rows(f'drop schema "{postgres.schema}" cascade')


async def test_a_migration_that_was_forgotten_is_named_where_it_is_missed(database: Database) -> None:
    async with database.open() as db:
        queue = workq.Queue(db)
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: queue.enqueue(None, "work", 1),
            lambda: queue.enqueue_many(None, [workq.NewTask("work", 1)]),
            queue.find,
            queue.wait,
            lambda: queue.retry_all(None),
        ]
        for attempt in attempts:
            with pytest.raises(Exception, match="workq") as caught:
                await attempt()
            assert "queue.migrate()" in str(caught.value.__notes__)
    async with database.open() as db, database.caller() as app:
        with pytest.raises(Exception, match="workq") as caught:
            await workq.Queue(db).enqueue(app.tx, "work", 1)
        assert "queue.migrate()" in str(caught.value.__notes__)


async def test_a_second_migration_changes_nothing(database: Database) -> None:
    """F51: every node may call it at every start."""
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        id = await queue.enqueue(None, "work", 1)
        before = await version_rows(database)
        await queue.migrate()
        await workq.Queue(db).migrate()
        assert await version_rows(database) == before
        assert [row.id for row in await queue.find()] == [id]


async def test_a_first_step_that_fails_leaves_nothing_and_can_be_run_again(database: Database) -> None:
    """F51: all of it is one transaction."""
    async with database.open() as db:
        queue = workq.Queue(db)
        whole = db.sql.migrations
        break_step(db, (*whole[0], "create table broken ("))
        with pytest.raises((sqlite3.OperationalError, asyncpg.PostgresSyntaxError)):
            await queue.migrate()
        with pytest.raises(workq.SchemaError, match="there is no table"):
            await workq.Executor(queue, [work]).start()
        break_step(db, *whole)
        await queue.migrate()
        async with workq.Executor(queue, [work]):
            await queue.enqueue(None, work, 1)
            await queue.wait(timeout=SOON)


async def test_a_later_step_that_fails_leaves_the_version_before_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F51, F54: tasks and version stay; then the step succeeds, and code that is too old says so."""
    async with database.open() as db, database.open() as old:
        queue, old_queue = workq.Queue(db), workq.Queue(old)
        await queue.migrate()
        id = await queue.enqueue(None, work, 1)
        before = await version_rows(database)
        first = db.sql.migrations[0]
        step = f"alter table {db.sql.names.table} add column more integer"
        monkeypatch.setitem(_migrate.WORKS_FROM, 2, None)
        break_step(db, first, (step, "create table broken ("))
        with pytest.raises((sqlite3.OperationalError, asyncpg.PostgresSyntaxError)):
            await queue.migrate()
        assert await version_rows(database) == before
        assert [row.id for row in await old_queue.find()] == [id]

        break_step(db, first, (step,))
        with pytest.raises(workq.SchemaError, match="migrate"):
            await workq.Executor(queue, [work]).start()
        await queue.migrate()
        async with workq.Executor(queue, [work]):
            await queue.wait(timeout=SOON)
        with pytest.raises(workq.SchemaError, match="newer"):
            await workq.Executor(old_queue, [work]).start()
        with pytest.raises(workq.SchemaError, match="newer"):
            await old_queue.migrate()


async def test_code_may_be_older_than_a_schema_that_says_so(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F54: expand first. The old code starts, works, and its migrate() changes nothing."""
    async with database.open() as db, database.open() as old:
        queue, old_queue = workq.Queue(db), workq.Queue(old)
        monkeypatch.setitem(_migrate.WORKS_FROM, 2, 1)
        step = f"alter table {db.sql.names.table} add column more integer"
        break_step(db, db.sql.migrations[0], (step,))
        await queue.migrate()
        before = await version_rows(database)
        await old_queue.migrate()
        assert await version_rows(database) == before
        async with workq.Executor(old_queue, [work]):
            await old_queue.enqueue(None, work, 1)
            await old_queue.wait(timeout=SOON)


async def test_a_table_may_have_any_name(database: Database) -> None:
    """F52, F53: also one that needs quotes, and everything of it works."""
    async with database.open(table=ODD) as db:
        queue = workq.Queue(db)
        await queue.migrate()

        @asynccontextmanager
        async def transaction() -> AsyncGenerator[workq.Transaction]:
            async with database.caller() as app:
                yield app.tx
                await app.commit()

        await do_everything(queue, transaction)
        assert len(await version_rows(database, ODD)) == 1


async def test_two_tables_in_one_database_know_nothing_of_each_other(database: Database) -> None:
    async with database.open(table="one") as db, database.open(table="two") as other:
        one, two = workq.Queue(db), workq.Queue(other)
        await one.migrate()
        await two.migrate()
        schedules = [workq.Schedule(tick, workq.every(hours=1))]
        async with workq.Executor(one, [work, tick], schedules=schedules, poll_interval=0.05):
            held = await two.enqueue(None, work, 1, key="same")
            assert await one.enqueue(None, work, 1, key="same") is not None
            await one.wait(timeout=SOON)
        assert [row.id for row in await two.find()] == [held]
        async with workq.Executor(two, [work, tick], schedules=schedules):
            await two.wait(timeout=SOON)
        assert [row.name for row in await two.find()] == ["tick"]


CATALOG = """
select 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod) || a.attnotnull || a.attidentity::text
       || coalesce(pg_get_expr(d.adbin, d.adrelid), '')
  from pg_attribute a join pg_class c on c.oid = a.attrelid
  left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
 where c.relnamespace = to_regnamespace('{schema}') and c.relkind = 'r' and a.attnum > 0
union all
select 'index', tablename, indexname, indexdef from pg_indexes where schemaname = '{schema}'
union all
select 'constraint', c.relname, k.conname, pg_get_constraintdef(k.oid)
  from pg_constraint k join pg_class c on c.oid = k.conrelid where c.relnamespace = to_regnamespace('{schema}')
union all
select 'table', relname, relkind::text, array_to_string(reloptions, ',') || relpersistence::text
  from pg_class where relnamespace = to_regnamespace('{schema}') and relkind in ('r', 'S')
order by 1, 2, 3
"""


async def test_the_sql_for_postgresql_run_by_hand_equals_migrate(postgres: PostgresDatabase) -> None:
    """The catalog says the same, and migrate() has nothing left to do. F60: nothing of it is UNLOGGED."""
    schema = str(postgres.schema)
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        migrated = await postgres.rows(CATALOG.replace("{schema}", schema))
        assert len(migrated) > 20
        assert {row[3][-1] for row in migrated if row[0] == "table" and row[1] == "workq"} == {"p"}
        await postgres.rows(f'drop schema "{schema}" cascade')

        conn = await asyncpg.connect(postgres.url)
        await conn.execute(queue.schema_sql())
        await conn.close()
        assert await postgres.rows(CATALOG.replace("{schema}", schema)) == migrated
        before = await version_rows(postgres)
        async with workq.Executor(queue, [work]):
            await queue.enqueue(None, work, 1)
            await queue.wait(timeout=SOON)
        await queue.migrate()
        assert await version_rows(postgres) == before


async def test_the_sql_for_sqlite_run_by_hand_equals_migrate(sqlite: SQLiteDatabase, tmp_path: Path) -> None:
    catalog = "select type, name, tbl_name, sql from sqlite_master order by 1, 2"
    async with sqlite.open() as db:
        await workq.Queue(db).migrate()
    by_hand = SQLiteDatabase(tmp_path / "by-hand.db")
    async with by_hand.open() as db:
        queue = workq.Queue(db)
        async with aiosqlite.connect(by_hand.path) as conn:
            await conn.executescript(queue.schema_sql())
        assert await by_hand.rows(catalog) == await sqlite.rows(catalog)
        before = await version_rows(by_hand)
        async with workq.Executor(queue, [work]):
            await queue.enqueue(None, work, 1)
            await queue.wait(timeout=SOON)
        await queue.migrate()
        assert await version_rows(by_hand) == before


@pytest_asyncio.fixture
async def role(postgres: PostgresDatabase) -> AsyncGenerator[str]:
    """A role of its own, that may do nothing yet."""
    async with role_on(postgres) as name:
        yield name


async def test_a_role_that_may_not_make_schemas_can_migrate_in_one_that_exists(
    postgres: PostgresDatabase, role: str
) -> None:
    """F50: CREATE SCHEMA IF NOT EXISTS would ask for the right to make one."""
    await postgres.rows(f'create schema "{postgres.schema}"')
    await postgres.rows(f'grant usage, create on schema "{postgres.schema}" to {role}')
    async with pool_for(postgres, role) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()
        await queue.migrate()
        await do_everything(queue, transactions_of(pool))


async def test_a_role_without_rights_is_told_what_is_missing(postgres: PostgresDatabase, role: str) -> None:
    async with pool_for(postgres, role) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await queue.migrate()
        with pytest.raises(workq.SchemaError, match="schema_sql"):
            await workq.Executor(queue, [work]).start()
        assert pool.get_idle_size() == pool.get_size()


@pytest.mark.parametrize("search_path", ["", "pg_catalog", "nowhere"])
async def test_everything_works_whatever_the_search_path_is(postgres: PostgresDatabase, search_path: str) -> None:
    """F52: every object in every statement is qualified."""
    async with pool_for(postgres, "postgres", search_path=search_path) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()
        await do_everything(queue, transactions_of(pool))


async def test_a_table_of_the_same_name_earlier_in_the_search_path_is_never_touched(
    postgres: PostgresDatabase,
) -> None:
    """F52: the application has a table workq of its own."""
    theirs = f"{postgres.schema}_theirs"
    await postgres.rows(f'create schema "{theirs}"')
    try:
        await postgres.rows(f'create table "{theirs}".workq (mine text)')
        await postgres.rows(f'create table "{theirs}".workq_version (mine text)')
        async with pool_for(postgres, "postgres", search_path=theirs) as pool:
            queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
            await queue.migrate()
            await do_everything(queue, transactions_of(pool))
        assert await postgres.rows(f'select * from "{theirs}".workq') == []
    finally:
        await postgres.rows(f'drop schema "{theirs}" cascade')
