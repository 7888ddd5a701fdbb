"""no trace: what is done in a transaction exists if and only if that commits, savepoints included."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, cast

import aiosqlite
import asyncpg
import pytest

import workq
import workq_asyncpg
from support import SOON, Database, Events, PostgresDatabase, SQLiteDatabase
from workq import NewTask

NOTE = workq.Spec("note", str)
EVERYTHING: dict[str, Any] = {"n": [1, 2.5, -0.0, 2**63, None, True], "text": '\u00e9\u8868"\\\n', "empty": {}}

Change = Callable[[workq.Queue, workq.Transaction, list[int]], Awaitable[Any]]
"""Something done to the tasks with these ids: two wait, two have failed, all have keys."""

CHANGES: dict[str, Change] = {
    "enqueue": lambda queue, tx, ids: queue.enqueue(tx, NOTE, "new"),
    "enqueue with a key": lambda queue, tx, ids: queue.enqueue(tx, NOTE, "new", key="new"),
    "enqueue_many": lambda queue, tx, ids: queue.enqueue_many(
        tx, [NewTask(NOTE, str(n), delay=n) for n in range(20)] + [NewTask(NOTE, "new", key="new")]
    ),
    "retry": lambda queue, tx, ids: queue.retry(tx, ids[2], payload="changed"),
    "retry_all": lambda queue, tx, ids: queue.retry_all(tx),
    "reschedule": lambda queue, tx, ids: queue.reschedule(tx, ids[0], run_at=datetime(2031, 1, 1, tzinfo=UTC)),
    "disable": lambda queue, tx, ids: queue.disable(tx, ids[0]),
    "delete": lambda queue, tx, ids: queue.delete(tx, ids[1]),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))


async def some_tasks(queue: workq.Queue) -> list[int]:
    """Four tasks with keys, of which the last two have failed."""
    ids = [id or 0 for id in await queue.enqueue_many(None, [NewTask(NOTE, str(n), key=str(n)) for n in range(4)])]
    for id in ids[2:]:
        assert await queue.disable(None, id)
    return ids


async def traces(database: Database) -> list[tuple[Any, ...]]:
    """Everything in the table that an operation could change."""
    return await database.rows(
        "select id, version, key, payload, run_at, failed_at, error, locked_by from {table} order by id"
    )


async def test_an_enqueue_that_rolls_back_leaves_no_trace(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        id = await queue.enqueue(app.tx, NOTE, "never")
        assert id is not None
        await app.rollback()
    assert await queue.find() == []


async def test_an_enqueue_is_seen_by_nobody_before_the_commit(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        id = await queue.enqueue(app.tx, NOTE, "soon")
        assert id is not None
        assert await queue.get(id) is None
        seen = await queue.get(id, tx=app.tx)
        assert seen is not None
        assert seen.state == "waiting"
        await app.commit()
        row = await queue.get(id)
        assert row is not None
        assert row.payload == "soon"


async def test_a_savepoint_that_rolls_back_leaves_no_trace(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        kept = await queue.enqueue(app.tx, NOTE, "kept")
        await app.execute("savepoint s")
        await queue.enqueue(app.tx, NOTE, "undone")
        await app.execute("rollback to savepoint s")
        await app.commit()
    assert [row.id for row in await queue.find()] == [kept]


@every_change
async def test_whatever_is_rolled_back_leaves_no_trace(database: Database, queue: workq.Queue, change: Change) -> None:
    ids = await some_tasks(queue)
    before = await traces(database)
    async with database.caller() as app:
        assert await change(queue, app.tx, ids)
        await app.rollback()
    assert await traces(database) == before


@every_change
async def test_whatever_a_savepoint_rolls_back_leaves_no_trace(
    database: Database, queue: workq.Queue, change: Change
) -> None:
    ids = await some_tasks(queue)
    before = await traces(database)
    async with database.caller() as app:
        await app.execute("savepoint outer_one")
        await app.execute("savepoint inner_one")
        assert await change(queue, app.tx, ids)
        await app.execute("release savepoint inner_one")
        await app.execute("rollback to savepoint outer_one")
        await app.commit()
    assert await traces(database) == before


@every_change
async def test_whatever_is_done_is_seen_by_nobody_before_the_commit(
    database: Database, queue: workq.Queue, change: Change
) -> None:
    ids = await some_tasks(queue)
    before = await traces(database)
    async with database.caller() as app:
        await app.execute("savepoint one")
        assert await change(queue, app.tx, ids)
        await app.execute("release savepoint one")
        assert await traces(database) == before
        await app.commit()
    assert await traces(database) != before


@every_change
async def test_a_connection_that_is_closed_before_the_commit_leaves_no_trace(
    database: Database, queue: workq.Queue, change: Change
) -> None:
    ids = await some_tasks(queue)
    before = await traces(database)
    async with database.caller() as app:
        assert await change(queue, app.tx, ids)
    assert await traces(database) == before


async def test_events_inside_a_transaction_say_so(database: Database) -> None:
    """W: enqueued and retried fire before the commit, and the transaction can still be rolled back."""
    events = Events()
    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        ids = await some_tasks(queue)
        events.clear()
        async with database.caller() as app:
            for change in CHANGES.values():
                await change(queue, app.tx, ids)
            await app.rollback()
        # retry set free the first of the two failed ones, so retry_all found one.
        assert events.kinds() == ["enqueued"] * (1 + 1 + 20) + ["retried"] * 2
        assert all(event.in_tx for event in events)


async def test_what_a_handler_enqueues_beside_its_own_writes_commits_with_them(database: Database) -> None:
    """The transaction is the application's: both of its writes are there, or neither."""
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await database.rows("create table users (name text)")
        try:
            for commits in (False, True):
                async with database.caller() as app:
                    await app.execute("insert into users values ('ann')")
                    await queue.enqueue(app.tx, NOTE, "welcome")
                    await (app.commit() if commits else app.rollback())
                users = await database.rows("select count(*) from users")
                assert users == [(int(commits),)]
                assert len(await queue.find()) == int(commits)
        finally:
            await database.rows("drop table users")


# asyncpg


async def run_all(queue: workq.Queue, name: str) -> list[Any]:
    """The payloads that a handler gets, in the order of the ids."""
    got: dict[int, Any] = {}

    @workq.handler(name)
    async def note(task: workq.Task[Any]) -> None:
        got[task.id] = task.payload

    async with workq.Executor(queue, [note], poll_interval=0.1):
        await queue.wait(note, timeout=SOON)
    return [got[id] for id in sorted(got)]


@every_change
async def test_a_connection_from_a_pool_is_a_transaction(postgres: PostgresDatabase, change: Change) -> None:
    """asyncpg's proxy, with its own transaction blocks: left by an error, nested, and committed."""
    async with asyncpg.create_pool(postgres.url, min_size=1, max_size=4) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()
        ids = await some_tasks(queue)
        before = await traces(postgres)

        async def fails() -> None:
            async with pool.acquire() as conn, conn.transaction():
                assert await change(queue, conn, ids)
                raise LookupError

        with pytest.raises(LookupError):
            await fails()
        assert await traces(postgres) == before

        async def fails_inside(conn: Any) -> None:
            async with conn.transaction():
                assert await change(queue, conn, ids)
                raise LookupError

        async with pool.acquire() as conn, conn.transaction():
            with pytest.raises(LookupError):
                await fails_inside(conn)
        assert await traces(postgres) == before

        async with pool.acquire() as conn, conn.transaction():
            async with conn.transaction():
                assert await change(queue, conn, ids)
            assert conn.is_in_transaction()
        assert await traces(postgres) != before


@every_change
async def test_a_transaction_may_be_begun_in_any_way(postgres: PostgresDatabase, change: Change) -> None:
    """asyncpg: by `begin` as by its transaction blocks, at any isolation level, and workq does not end it."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        ids = await some_tasks(queue)
        before = await traces(postgres)
        conn = cast("asyncpg.Connection[Any]", await asyncpg.connect(postgres.url))
        try:
            for begin in ("begin", "begin isolation level serializable"):
                await conn.execute(begin)
                assert await change(queue, conn, ids)
                assert conn.is_in_transaction()
                await conn.execute("rollback")
                assert await traces(postgres) == before
            for isolation in ("read_committed", "repeatable_read", "serializable"):
                block = conn.transaction(isolation=isolation)  # type: ignore[arg-type]
                await block.start()
                assert await change(queue, conn, ids)
                assert conn.is_in_transaction()
                await block.rollback()
                assert await traces(postgres) == before
        finally:
            await conn.close()


async def test_json_codecs_of_the_application_change_no_payload(postgres: PostgresDatabase) -> None:
    """same value: on pools that decode json and jsonb by themselves, as tx and for the queue's own connections."""

    async def prepare(conn: Any) -> None:
        for kind in ("json", "jsonb"):
            await conn.set_type_codec(kind, schema="pg_catalog", encoder=json.dumps, decoder=json.loads)

    async with asyncpg.create_pool(postgres.url, min_size=1, max_size=12, init=prepare) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()
        payloads: list[Any] = [EVERYTHING, "text", '{"a": 1}', None, [[]], "\0"]
        ids: list[int] = []
        async with pool.acquire() as conn, conn.transaction():
            assert await conn.fetchval("select '[1]'::json") == [1]
            for payload in payloads:
                ids.append(await queue.enqueue(conn, "note", payload, headers={"h": "1"}) or 0)
            found = await queue.find(tx=conn)
            assert [repr(row.payload) for row in found] == [repr(payload) for payload in payloads]
        ids += [await queue.enqueue(None, "note", payload, headers={"h": "1"}) or 0 for payload in payloads]
        await queue.disable(None, ids[0])
        async with pool.acquire() as conn, conn.transaction():
            assert await queue.retry(conn, ids[0], payload=EVERYTHING)
        rows = await queue.find()
        assert [repr(row.payload) for row in rows] == [repr(payload) for payload in payloads * 2]
        assert [row.headers for row in rows] == [{"h": "1"}] * 12
        assert [repr(got) for got in await run_all(queue, "note")] == [repr(payload) for payload in payloads * 2]


class Record(asyncpg.Record):
    """Columns as attributes, as many applications have it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@every_change
async def test_a_record_class_of_the_application_does_no_harm(postgres: PostgresDatabase, change: Change) -> None:
    async with asyncpg.create_pool(postgres.url, min_size=1, max_size=12, record_class=Record) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()
        ids = await some_tasks(queue)
        async with pool.acquire() as conn, conn.transaction():
            assert await change(queue, conn, ids)
            (first,) = await conn.fetch("select 1 as one")
            assert first.one == 1
            assert await queue.find(tx=conn) != []
        assert await run_all(queue, "note") != []


# aiosqlite


@every_change
@pytest.mark.parametrize("level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
async def test_a_transaction_that_python_begins_by_itself_is_one(
    sqlite: SQLiteDatabase, change: Change, level: str
) -> None:
    """aiosqlite as it comes: no BEGIN anywhere, and what is not committed leaves no trace."""
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        ids = await some_tasks(queue)
        before = await traces(sqlite)
        options: dict[str, Any] = {"isolation_level": level} if level else {}
        async with aiosqlite.connect(sqlite.path, **options) as conn:
            assert await change(queue, conn, ids)
            assert conn.in_transaction
            await conn.rollback()
            assert await traces(sqlite) == before

            await conn.execute("create table if not exists users (name text)")
            await conn.execute("insert into users values ('ann')")
            assert await change(queue, conn, ids)
            await conn.rollback()
            assert await traces(sqlite) == before

            assert await change(queue, conn, ids)
        assert await traces(sqlite) == before

        async with aiosqlite.connect(sqlite.path, **options) as conn:
            assert await change(queue, conn, ids)
            await conn.commit()
        assert await traces(sqlite) != before


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def as_nothing(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> None:
    return None


def as_error(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> None:
    raise AssertionError("the application's row factory was asked")


@every_change
@pytest.mark.parametrize("factory", [sqlite3.Row, as_dict, as_nothing, as_error], ids=lambda made: made.__name__)
async def test_a_row_factory_of_the_application_does_no_harm(
    sqlite: SQLiteDatabase, change: Change, factory: Any
) -> None:
    """aiosqlite: what it makes of rows is its own affair, and stays as it was."""
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        ids = await some_tasks(queue)
        async with aiosqlite.connect(sqlite.path) as plain, aiosqlite.connect(sqlite.path) as conn:
            conn.row_factory = factory
            expected = await change(queue, plain, ids)
            shown = await queue.find(tx=plain)
            await plain.rollback()
            assert await change(queue, conn, ids) == expected
            found = await queue.find(tx=conn)
            assert [(row.id, row.key, row.payload, row.state) for row in found] == [
                (row.id, row.key, row.payload, row.state) for row in shown
            ]
            assert await queue.get(ids[3], tx=conn) == next(row for row in found if row.id == ids[3])
            assert conn.row_factory is factory
            await conn.commit()


@every_change
async def test_a_text_factory_of_the_application_does_no_harm(sqlite: SQLiteDatabase, change: Change) -> None:
    """aiosqlite: connections that read text as bytes."""
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        ids = await some_tasks(queue)
        async with aiosqlite.connect(sqlite.path) as plain, aiosqlite.connect(sqlite.path) as conn:
            conn.text_factory = bytes
            expected = await change(queue, plain, ids)
            await plain.rollback()
            assert await change(queue, conn, ids) == expected
            assert {row.name for row in await queue.find(tx=conn)} == {"note"}
            await conn.commit()
