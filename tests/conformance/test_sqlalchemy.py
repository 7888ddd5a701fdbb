"""SQLAlchemy's async sessions and connections as `tx`: no trace and no loss, whatever the driver does lazily."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelSession

import workq
from support import SOON, Database, Events, PostgresDatabase, SQLiteDatabase, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.1, "stop_timeout": 2}
NOTE = workq.Spec("note", str)
KEYED = workq.Spec("keyed", str, key=lambda payload: payload)


def url_of(database: Database) -> str:
    """As SQLAlchemy wants it."""
    return database.url.replace("postgresql:", "postgresql+asyncpg:").replace("sqlite:", "sqlite+aiosqlite:")


@asynccontextmanager
async def made(url: str, **options: Any) -> AsyncGenerator[AsyncEngine]:
    engine = create_async_engine(url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


@pytest_asyncio.fixture
async def engine(database: Database) -> AsyncGenerator[AsyncEngine]:
    async with made(url_of(database)) as engine:
        yield engine


@asynccontextmanager
async def a_session(engine: AsyncEngine) -> AsyncGenerator[Any]:
    async with AsyncSession(engine) as session:
        yield session


@asynccontextmanager
async def a_connection(engine: AsyncEngine) -> AsyncGenerator[Any]:
    async with engine.connect() as conn:
        yield conn


@asynccontextmanager
async def a_scoped_session(engine: AsyncEngine) -> AsyncGenerator[Any]:
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    try:
        yield scoped
    finally:
        await scoped.remove()


@asynccontextmanager
async def a_sqlmodel_session(engine: AsyncEngine) -> AsyncGenerator[Any]:
    async with SQLModelSession(engine) as session:
        yield session


@asynccontextmanager
async def a_session_on_a_connection(engine: AsyncEngine) -> AsyncGenerator[Any]:
    async with engine.connect() as conn, AsyncSession(conn) as session:
        yield session


Kind = Callable[[AsyncEngine], AbstractAsyncContextManager[Any]]
KINDS: dict[str, Kind] = {
    "AsyncSession": a_session,
    "AsyncConnection": a_connection,
    "async_scoped_session": a_scoped_session,
    "SQLModel": a_sqlmodel_session,
    "AsyncSession on AsyncConnection": a_session_on_a_connection,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


async def execute(tx: Any, sql: str) -> None:
    """A statement of the application's own."""
    conn: AsyncConnection = tx if isinstance(tx, AsyncConnection) else await tx.connection()
    await conn.exec_driver_sql(sql)


async def row_of(queue: workq.Queue, id: int | None) -> workq.TaskRow:
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    return row


@dataclass
class Shelf:
    """A waiting and a failed task, one with a key, to do things with."""

    queue: workq.Queue
    waiting: int = 0
    failed: int = 0
    later: datetime = field(default_factory=lambda: datetime.now(UTC) + timedelta(hours=1))

    async def fill(self) -> Shelf:
        self.waiting = await self.queue.enqueue(None, NOTE, "waiting") or 0
        self.failed = await self.queue.enqueue(None, KEYED, "failed") or 0
        assert await self.queue.disable(None, self.failed)
        return self

    async def look(self) -> list[workq.TaskRow]:
        return await self.queue.find()


OPERATIONS: dict[str, Callable[[Shelf, Any], Awaitable[object]]] = {
    "enqueue": lambda shelf, tx: shelf.queue.enqueue(tx, NOTE, "new"),
    "enqueue with a key": lambda shelf, tx: shelf.queue.enqueue(tx, KEYED, "new"),
    "enqueue_many": lambda shelf, tx: shelf.queue.enqueue_many(tx, [workq.NewTask(NOTE, "a"), workq.NewTask("b")]),
    "enqueue_many with a key": lambda shelf, tx: shelf.queue.enqueue_many(
        tx, [workq.NewTask(NOTE, "a"), workq.NewTask(KEYED, "b")]
    ),
    "retry": lambda shelf, tx: shelf.queue.retry(tx, shelf.failed, payload="fixed"),
    "retry_all": lambda shelf, tx: shelf.queue.retry_all(tx, target=KEYED),
    "reschedule": lambda shelf, tx: shelf.queue.reschedule(tx, shelf.waiting, run_at=shelf.later),
    "disable": lambda shelf, tx: shelf.queue.disable(tx, shelf.waiting),
    "delete": lambda shelf, tx: shelf.queue.delete(tx, shelf.waiting),
}


@every_kind
async def test_what_is_done_first_in_a_transaction_that_rolls_back_leaves_no_trace(
    kind: Kind, queue: workq.Queue, engine: AsyncEngine
) -> None:
    """no trace: SQLAlchemy begins the driver's transaction lazily, so the first statement must go through it."""
    shelf = await Shelf(queue).fill()
    before = await shelf.look()
    for name, operation in OPERATIONS.items():
        async with kind(engine) as tx:
            assert await operation(shelf, tx), name
            await tx.rollback()
        assert await shelf.look() == before, name
        async with kind(engine) as tx:
            assert await operation(shelf, tx), name
            # Left without a commit.
        assert await shelf.look() == before, name


@every_kind
@pytest.mark.parametrize("name", OPERATIONS)
async def test_what_is_done_first_in_a_transaction_that_commits_is_done(
    name: str, kind: Kind, queue: workq.Queue, engine: AsyncEngine
) -> None:
    """no loss: and seen by nobody before."""
    shelf = await Shelf(queue).fill()
    before = await shelf.look()
    async with kind(engine) as tx:
        assert await OPERATIONS[name](shelf, tx)
        assert await shelf.look() == before
        await tx.commit()
    after = await shelf.look()
    assert after != before
    assert len(after) - len(before) == {
        "enqueue": 1, "enqueue with a key": 1, "enqueue_many": 2, "enqueue_many with a key": 2, "delete": -1,
    }.get(name, 0)  # fmt: skip
    if name == "retry":
        row = await row_of(queue, shelf.failed)
        assert (row.state, row.payload) == ("waiting", "fixed")
    if name == "retry_all":
        assert (await row_of(queue, shelf.failed)).state == "waiting"
    if name == "reschedule":
        assert (await row_of(queue, shelf.waiting)).run_at == shelf.later
    if name == "disable":
        assert (await row_of(queue, shelf.waiting)).error == "disabled"


@every_kind
async def test_an_error_in_the_transaction_takes_the_task_along(
    kind: Kind, queue: workq.Queue, engine: AsyncEngine
) -> None:
    """no trace: the database's, and the application's."""

    async def break_a_statement() -> None:
        async with kind(engine) as tx:
            await queue.enqueue(tx, NOTE, "never")
            await execute(tx, "select broken from nowhere")

    async def break_off() -> None:
        async with kind(engine) as tx:
            await queue.enqueue(tx, NOTE, "never")
            raise LookupError

    with pytest.raises(exc.DBAPIError):
        await break_a_statement()
    with pytest.raises(LookupError):
        await break_off()
    assert await queue.find() == []


async def enqueue_and_break_off(queue: workq.Queue, block: AbstractAsyncContextManager[Any], tx: Any = None) -> None:
    """In a block that an error leaves."""
    async with block as begun:
        await queue.enqueue(tx or begun, NOTE, "undone")
        raise LookupError


@pytest.mark.parametrize("kind", ["engine", "sessions"])
async def test_a_begin_block_commits_or_leaves_no_trace(kind: str, queue: workq.Queue, engine: AsyncEngine) -> None:
    """no trace: `async with engine.begin()`, `async with sessions.begin()`."""
    sessions = async_sessionmaker(engine)

    def begin() -> AbstractAsyncContextManager[Any]:
        return engine.begin() if kind == "engine" else sessions.begin()

    with pytest.raises(LookupError):
        await enqueue_and_break_off(queue, begin())
    assert await queue.find() == []
    async with begin() as tx:
        id = await queue.enqueue(tx, NOTE, "kept")
    assert [row.id for row in await queue.find()] == [id]


@every_kind
async def test_commit_as_you_go(kind: Kind, queue: workq.Queue, engine: AsyncEngine) -> None:
    """no trace, no loss: each commit and each rollback ends one transaction of many on the same connection."""
    async with kind(engine) as tx:
        for number in range(20):
            await queue.enqueue(tx, NOTE, str(number))
            await (tx.rollback() if number % 3 == 0 else tx.commit())
        await queue.enqueue(tx, NOTE, "left open")
    assert [row.payload for row in await queue.find()] == [str(number) for number in range(20) if number % 3]


@every_kind
async def test_a_savepoint_that_rolls_back_leaves_no_trace(kind: Kind, queue: workq.Queue, engine: AsyncEngine) -> None:
    """no trace: begin_nested, with an end of each kind."""
    if engine.dialect.name == "sqlite":
        begins_itself(engine, "BEGIN")
    async with kind(engine) as tx:
        kept = [await queue.enqueue(tx, NOTE, "outside")]
        with pytest.raises(LookupError):
            await enqueue_and_break_off(queue, tx.begin_nested(), tx)
        async with tx.begin_nested() as savepoint:
            await queue.enqueue(tx, NOTE, "undone")
            await savepoint.rollback()
        async with tx.begin_nested():
            kept.append(await queue.enqueue(tx, NOTE, "inside"))
        kept.append(await queue.enqueue(tx, NOTE, "outside"))
        await tx.commit()
    assert [row.id for row in await queue.find()] == kept


@every_kind
async def test_get_and_find_see_what_their_transaction_did(kind: Kind, queue: workq.Queue, engine: AsyncEngine) -> None:
    headers = {"trace": "7"}
    at = datetime.now(UTC) + timedelta(hours=1)
    async with kind(engine) as tx:
        assert await queue.find(tx=tx) == []
        id = await queue.enqueue(tx, KEYED, "k", headers=headers, run_at=at, priority=-3, queue="q")
        assert id is not None
        row = await queue.get(id, tx=tx)
        assert row is not None
        assert (row.payload, row.key, row.headers, row.run_at) == ("k", "k", headers, at)
        assert (row.queue, row.priority, row.state) == ("q", -3, "waiting")
        assert row.created_at.tzinfo is UTC
        assert await queue.find(tx=tx, queue="q", key="k", state="waiting", target=KEYED) == [row]
        assert await queue.get(id) is None
        assert await queue.find() == []
        await tx.commit()
        assert await queue.get(id) == row


@every_kind
async def test_payloads_come_back_equal_through_sqlalchemy(kind: Kind, queue: workq.Queue, engine: AsyncEngine) -> None:
    """same value: nothing in them is taken for a parameter, nor encoded twice."""
    payloads: list[Any] = [
        "%s %(name)s %% :name ? $1 ' \" \\",
        {"a": [1, 2.5, None, True], "ä": "€𝄞", ":b": "%"},
        [],
        "",
        None,
        2**53 + 1,
        -0.0,
    ]
    async with kind(engine) as tx:
        one_by_one = [await queue.enqueue(tx, "any", payload) for payload in payloads]
        numbered = enumerate(payloads)
        many = await queue.enqueue_many(tx, [workq.NewTask("any", one, key=str(number)) for number, one in numbered])
        assert repr([row.payload for row in await queue.find(tx=tx)]) == repr(payloads * 2)
        await tx.commit()
    rows = await queue.find()
    assert [row.id for row in rows] == [*one_by_one, *many]
    assert repr([row.payload for row in rows]) == repr(payloads * 2)


@every_kind
async def test_many_are_one_statement_through_sqlalchemy(kind: Kind, queue: workq.Queue, engine: AsyncEngine) -> None:
    statements: list[str] = []

    def executed(conn: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", executed)
    async with kind(engine) as tx:
        ids = await queue.enqueue_many(tx, [workq.NewTask(NOTE, str(number)) for number in range(1000)])
        await tx.commit()
    assert len(statements) == 1
    rows = await queue.find(limit=2000)
    assert [(row.id, row.payload) for row in rows] == [(id, str(number)) for number, id in enumerate(ids)]


@every_kind
async def test_a_key_that_is_taken_leaves_the_session_usable(
    kind: Kind, queue: workq.Queue, engine: AsyncEngine
) -> None:
    """F15: for enqueue, enqueue_many and retry; what was done before and after commits."""
    parked = await queue.enqueue(None, KEYED, "k")
    assert parked is not None
    await queue.disable(None, parked)
    live = await queue.enqueue(None, KEYED, "k")
    async with kind(engine) as tx:
        before = await queue.enqueue(tx, NOTE, "before")
        with pytest.raises(workq.KeyTaken, match=f"task {parked} "):
            await queue.retry(tx, parked)
        assert await queue.enqueue(tx, KEYED, "k") is None
        assert await queue.enqueue_many(tx, [workq.NewTask(KEYED, "k")]) == [None]
        await execute(tx, "select 1")
        after = await queue.enqueue(tx, NOTE, "after")
        await tx.commit()
    assert [row.id for row in await queue.find()] == [parked, live, before, after]
    assert (await row_of(queue, parked)).error == "disabled"


@every_kind
async def test_a_retry_as_the_first_statement_that_finds_its_key_taken_leaves_the_session_usable(
    kind: Kind, queue: workq.Queue, engine: AsyncEngine
) -> None:
    """F15: its savepoint is inside a transaction then too."""
    parked = await queue.enqueue(None, KEYED, "k")
    assert parked is not None
    await queue.disable(None, parked)
    await queue.enqueue(None, KEYED, "k")
    async with kind(engine) as tx:
        with pytest.raises(workq.KeyTaken):
            await queue.retry(tx, parked)
        await queue.enqueue(tx, NOTE, "after")
        await tx.rollback()
        with pytest.raises(workq.KeyTaken):
            await queue.retry(tx, parked)
        kept = await queue.enqueue(tx, NOTE, "kept")
        await tx.commit()
    assert [row.id for row in await queue.find(target=NOTE)] == [kept]


@every_kind
async def test_complete_commits_with_the_handlers_writes_or_not_at_all(
    kind: Kind, database: Database, engine: AsyncEngine
) -> None:
    """no trace: complete as the first and as the last statement."""
    table, events = database.table.replace("workq", "ledger"), Events()

    @workq.handler("charge", retry=workq.linear(delay=60))
    async def charge(task: workq.Task[str]) -> None:
        write = f"insert into {table} values ('{task.payload}')"
        async with kind(engine) as tx:
            if "first" in task.payload:
                await task.complete(tx)
                await execute(tx, write)
            else:
                await execute(tx, write)
                await task.complete(tx)
            await (tx.commit() if "commit" in task.payload else tx.rollback())

    payloads = ["first, commit", "last, commit", "first, rollback", "last, rollback"]
    async with hooked(database, events) as queue:
        await database.rows(f"create table {table} (entry text)")
        await queue.enqueue_many(None, [workq.NewTask(charge, payload) for payload in payloads])
        async with workq.Executor(queue, [charge], workers=1, **QUICK):
            await events.until("completed", 2)
            await events.until("failed", 2)
        assert await database.rows(f"select entry from {table} order by entry") == [
            ("first, commit",),
            ("last, commit",),
        ]
        rows = await queue.find()
        assert [(row.payload, row.state, row.attempt) for row in rows] == [
            ("first, rollback", "waiting", 1),
            ("last, rollback", "waiting", 1),
        ]


@every_kind
async def test_a_ticker_moves_on_in_a_session(kind: Kind, database: Database, engine: AsyncEngine) -> None:
    events = Events()

    @workq.handler("sync")
    async def sync(task: workq.Task[dict[str, int]]) -> None:
        task.payload["at"] += 1
        async with kind(engine) as tx:
            await task.complete(tx)
            assert await queue.find(tx=tx, state="running") == []
            await tx.commit()

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, workq.every(hours=1), {"at": 0})
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            for number in (1, 2):
                (row,) = await queue.find()
                assert await queue.reschedule(None, row.id)
                await events.until("completed", number)
        (row,) = await queue.find()
        assert (row.payload, row.state) == ({"at": 2}, "waiting")
        assert row.run_at > datetime.now(UTC) + timedelta(minutes=30)


@every_kind
async def test_complete_of_a_deleted_task_is_refused_and_the_session_stays_usable(
    kind: Kind, database: Database, engine: AsyncEngine
) -> None:
    events, refused = Events(), list[BaseException]()

    @workq.handler("note")
    async def note(task: workq.Task[str]) -> None:
        await queue.delete(None, task.id)
        async with kind(engine) as tx:
            try:
                await task.complete(tx)
            except workq.LeaseLost as error:
                refused.append(error)
            await queue.enqueue(tx, "other")
            await tx.commit()

    async with hooked(database, events) as queue:
        async with workq.Executor(queue, [note], **QUICK):
            await queue.enqueue(None, note, "x")
            await events.until("lost")
        assert [row.name for row in await queue.find()] == ["other"]
    assert len(refused) == 1


@every_kind
async def test_what_a_session_enqueued_runs_when_it_has_committed(
    kind: Kind, database: Database, engine: AsyncEngine
) -> None:
    """no loss: many transactions over the same few connections, with rollbacks in between."""
    ran: list[int] = []

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        ran.append(task.payload)

    async with hooked(database) as queue, workq.Executor(queue, [note], **QUICK):
        for number in range(20):
            async with kind(engine) as tx:
                await queue.enqueue(tx, note, number)
                await (tx.rollback() if number % 4 == 0 else tx.commit())
        await queue.wait(timeout=SOON)
    assert sorted(ran) == [number for number in range(20) if number % 4]


@pytest.mark.parametrize("end", ["commit", "rollback", "a failing flush"])
@pytest.mark.parametrize("flushed", [True, False], ids=["flushed before", "flushed by the commit"])
async def test_objects_and_tasks_are_stored_together_or_not_at_all(
    flushed: bool, end: str, database: Database, queue: workq.Queue, engine: AsyncEngine
) -> None:
    """no trace: pending objects are in the same transaction, whichever comes first."""

    class Base(orm.DeclarativeBase):
        pass

    class User(Base):
        __tablename__ = "users"
        __table_args__ = {"schema": database.schema}
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
        email: orm.Mapped[str] = orm.mapped_column(unique=True)

    async with engine.begin() as conn:
        await conn.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:
        session.add(User(email="ann"))
        if flushed:
            await session.flush()
        await queue.enqueue(session, NOTE, "welcome, ann")
        if end == "commit":
            await session.commit()
        elif end == "rollback":
            await session.rollback()
        else:
            session.add(User(email="ann"))
            with pytest.raises(exc.IntegrityError):
                await session.commit()
    async with AsyncSession(engine) as session:
        users = (await session.scalars(sa.select(User.email))).all()
    tasks = [row.payload for row in await queue.find()]
    assert (list(users), tasks) == ((["ann"], ["welcome, ann"]) if end == "commit" else ([], []))


async def test_a_scoped_session_is_the_one_of_this_asyncio_task(queue: workq.Queue, engine: AsyncEngine) -> None:
    """Two tasks, one scoped_session: one commits, the other does not."""
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)

    async def work(payload: str) -> None:
        await queue.enqueue(scoped, NOTE, payload)
        await (scoped.commit() if payload == "kept" else scoped.rollback())
        await scoped.remove()

    for payload in ("kept", "undone"):
        await asyncio.create_task(work(payload))
    assert [row.payload for row in await queue.find()] == ["kept"]


@contextmanager
def synchronous() -> Generator[dict[str, object]]:
    """SQLAlchemy's side for threads, which would block the loop."""
    engine = sa.create_engine("sqlite://")
    try:
        with engine.connect() as conn, orm.Session(engine) as session:
            maker = orm.sessionmaker(engine)
            scoped = orm.scoped_session(maker)
            yield {
                "Session": session,
                "Connection": conn,
                "Engine": engine,
                "sessionmaker": maker,
                "scoped_session": scoped,
            }
            scoped.remove()
    finally:
        engine.dispose()


@pytest.mark.parametrize("what", ["Session", "Connection", "Engine", "sessionmaker", "scoped_session"])
async def test_the_synchronous_side_is_refused_with_the_remedy(what: str, queue: workq.Queue) -> None:
    with synchronous() as given, pytest.raises(TypeError, match=r"block the event loop: .*create_async_engine"):
        await queue.enqueue(given[what], NOTE, "never")  # type: ignore[call-overload]  # pyright: ignore
    with synchronous() as given, pytest.raises(TypeError, match="create_async_engine"):
        await queue.find(tx=given[what])  # type: ignore[arg-type]  # pyright: ignore
    assert await queue.find() == []


async def test_an_engine_and_a_session_maker_are_refused_with_the_remedy(
    queue: workq.Queue, engine: AsyncEngine
) -> None:
    """They are no transaction. On every method that takes one."""
    shelf = await Shelf(queue).fill()
    before = await shelf.look()
    refused: list[tuple[Any, str]] = [
        (engine, r"engine\.begin\(\)"),
        (async_sessionmaker(engine), r"sessions\.begin\(\)"),
    ]
    for given, remedy in refused:
        for operation in OPERATIONS.values():
            with pytest.raises(TypeError, match=remedy):
                await operation(shelf, given)
        with pytest.raises(TypeError, match=remedy):
            await queue.get(shelf.waiting, tx=given)
    assert await shelf.look() == before


async def test_complete_refuses_an_engine_with_the_remedy(database: Database, engine: AsyncEngine) -> None:
    events = Events()

    @workq.handler("note")
    async def note(task: workq.Task) -> None:
        await task.complete(engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    async with hooked(database, events) as queue:
        id = await queue.enqueue(None, note)
        async with workq.Executor(queue, [note], **QUICK):
            await events.until("failed")
        assert "engine.begin()" in ((await row_of(queue, id)).error or "")


@every_kind
@pytest.mark.parametrize("where", ["engine", "execution options"])
async def test_autocommit_is_refused_with_the_remedy(
    where: str, kind: Kind, database: Database, queue: workq.Queue
) -> None:
    """There is no transaction to be part of. Reading needs none."""
    shelf = await Shelf(queue).fill()
    before = await shelf.look()
    async with made(url_of(database)) as plain:
        engine = plain.execution_options(isolation_level="AUTOCOMMIT")
        if where == "engine":
            engine = create_async_engine(url_of(database), isolation_level="AUTOCOMMIT")
        try:
            for operation in OPERATIONS.values():
                async with kind(engine) as tx:
                    with pytest.raises(RuntimeError, match="AUTOCOMMIT.*None to commit at once"):
                        await operation(shelf, tx)
            async with kind(engine) as tx:
                assert await queue.find(tx=tx) == before
        finally:
            await engine.dispose()
    assert await shelf.look() == before


async def test_a_session_that_switches_to_autocommit_is_refused(queue: workq.Queue, engine: AsyncEngine) -> None:
    """And one that switches back is taken again: it is the connection of the moment that counts."""
    async with AsyncSession(engine) as session:
        await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(RuntimeError, match="AUTOCOMMIT"):
            await queue.enqueue(session, NOTE, "never")
        await session.rollback()
        id = await queue.enqueue(session, NOTE, "kept")
        await session.commit()
    assert [row.id for row in await queue.find()] == [id]


async def test_an_engine_of_the_other_database_is_refused_with_the_remedy(
    sqlite: SQLiteDatabase, postgres: PostgresDatabase
) -> None:
    async with (
        hooked(sqlite) as on_sqlite,
        hooked(postgres) as on_postgres,
        made(url_of(sqlite)) as sqlite_engine,
        made(url_of(postgres)) as postgres_engine,
    ):
        for kind in KINDS.values():
            async with kind(postgres_engine) as tx:
                with pytest.raises(TypeError, match=r"uses asyncpg.*sqlite\+aiosqlite://"):
                    await on_sqlite.enqueue(tx, NOTE, "never")
                with pytest.raises(TypeError, match=r"uses asyncpg"):
                    await on_sqlite.find(tx=tx)
            async with kind(sqlite_engine) as tx:
                with pytest.raises(TypeError, match=r"uses aiosqlite.*postgresql\+asyncpg://"):
                    await on_postgres.enqueue(tx, NOTE, "never")
        assert await on_sqlite.find() == []
        assert await on_postgres.find() == []


def begins_nothing(connection: Any, record: object) -> None:
    connection.isolation_level = None


def begins_itself(engine: AsyncEngine, begin: str) -> None:
    """From SQLAlchemy's manual: Python's sqlite3 begins nothing, a "begin" event does."""

    def do_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine.sync_engine, "connect", begins_nothing)
    event.listen(engine.sync_engine, "begin", do_begin)


@every_kind
@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
async def test_the_recipe_with_a_begin_event_is_a_transaction(begin: str, kind: Kind, sqlite: SQLiteDatabase) -> None:
    """no trace: it looks like AUTOCOMMIT until it has begun."""
    async with hooked(sqlite) as queue, made(url_of(sqlite)) as engine:
        begins_itself(engine, begin)
        shelf = await Shelf(queue).fill()
        before = await shelf.look()
        for name, operation in OPERATIONS.items():
            async with kind(engine) as tx:
                assert await operation(shelf, tx), name
                await tx.rollback()
            assert await shelf.look() == before, name
        async with kind(engine) as tx:
            with pytest.raises(LookupError):
                await enqueue_and_break_off(queue, tx.begin_nested(), tx)
            async with tx.begin_nested():
                await queue.enqueue(tx, NOTE, "undone too")
            await tx.rollback()
            assert await shelf.look() == before
            id = await queue.enqueue(tx, NOTE, "kept")
            await tx.commit()
        assert [row.id for row in await queue.find(after=shelf.failed)] == [id]


@every_kind
async def test_the_recipe_without_its_begin_event_is_refused(kind: Kind, sqlite: SQLiteDatabase) -> None:
    async with hooked(sqlite) as queue, made(url_of(sqlite)) as engine:
        event.listen(engine.sync_engine, "connect", begins_nothing)
        async with kind(engine) as tx:
            with pytest.raises(RuntimeError, match="AUTOCOMMIT"):
                await queue.enqueue(tx, NOTE, "never")
        assert await queue.find() == []


@every_kind
@pytest.mark.parametrize("how", ["as it comes", "AUTOCOMMIT", "the recipe without its begin event"])
async def test_a_savepoint_that_may_commit_when_it_is_released_is_refused(
    how: str, kind: Kind, sqlite: SQLiteDatabase
) -> None:
    """no trace: Python's sqlite3 begins nothing before a SAVEPOINT, and releasing the outermost one is a commit."""
    async with hooked(sqlite) as queue, made(url_of(sqlite)) as plain:
        engine = plain.execution_options(isolation_level="AUTOCOMMIT") if how == "AUTOCOMMIT" else plain
        if "recipe" in how:
            event.listen(engine.sync_engine, "connect", begins_nothing)
        shelf = await Shelf(queue).fill()
        before = await shelf.look()
        for operation in OPERATIONS.values():
            async with kind(engine) as tx:
                async with tx.begin_nested():
                    with pytest.raises(RuntimeError, match=r"savepoint.*autocommit.*begin.*before begin_nested\(\)"):
                        await operation(shelf, tx)
                    assert await queue.find(tx=tx) == before
                await tx.rollback()
            assert await shelf.look() == before


@every_kind
async def test_complete_in_such_a_savepoint_is_refused_too(kind: Kind, sqlite: SQLiteDatabase) -> None:
    events = Events()

    @workq.handler("note")
    async def note(task: workq.Task) -> None:
        async with kind(engine) as tx:
            async with tx.begin_nested():
                await task.complete(tx)
            await tx.rollback()

    async with hooked(sqlite, events) as queue, made(url_of(sqlite)) as engine:
        id = await queue.enqueue(None, note)
        async with workq.Executor(queue, [note], **QUICK):
            await events.until("failed")
        assert "savepoint" in ((await row_of(queue, id)).error or "")


@every_kind
async def test_a_savepoint_of_the_recipe_takes_part_in_its_transaction(kind: Kind, sqlite: SQLiteDatabase) -> None:
    """no trace, no loss: as the first thing in it, and with execution options."""
    async with hooked(sqlite) as queue, made(url_of(sqlite)) as plain:
        begins_itself(plain, "BEGIN")
        for engine in (plain, plain.execution_options(logging_token="test")):
            for commits in (False, True):
                async with kind(engine) as tx:
                    async with tx.begin_nested():
                        await queue.enqueue(tx, NOTE, str(commits))
                    await (tx.commit() if commits else tx.rollback())
        assert [row.payload for row in await queue.find()] == ["True", "True"]


@every_kind
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3.connect(autocommit=) is new in Python 3.12")
async def test_the_autocommit_setting_of_newer_pythons_is_heeded(kind: Kind, sqlite: SQLiteDatabase) -> None:
    """no trace: SQLAlchemy's newer recipe (False) is a transaction; True is none, whatever isolation_level says."""
    async with hooked(sqlite) as queue:
        async with made(url_of(sqlite), connect_args={"autocommit": False}) as engine, kind(engine) as tx:
            await queue.enqueue(tx, NOTE, "never")
            await tx.rollback()
            async with tx.begin_nested():
                await queue.enqueue(tx, NOTE, "never")
            await tx.rollback()
            id = await queue.enqueue(tx, NOTE, "kept")
            await tx.commit()
        assert [row.id for row in await queue.find()] == [id]
        async with made(url_of(sqlite), connect_args={"autocommit": True}) as engine, kind(engine) as tx:
            with pytest.raises(RuntimeError, match="AUTOCOMMIT|autocommit"):
                await queue.enqueue(tx, NOTE, "never")
            await tx.rollback()
        assert [row.id for row in await queue.find()] == [id]


@every_kind
async def test_a_sqlalchemy_before_2_0_43_is_served_too(
    kind: Kind, database: Database, queue: workq.Queue, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dialects have no detect_autocommit_setting."""
    for part in type(engine.dialect).__mro__:
        if "detect_autocommit_setting" in vars(part):
            monkeypatch.delattr(part, "detect_autocommit_setting")
    async with kind(engine) as tx:
        await queue.enqueue(tx, NOTE, "never")
        await tx.rollback()
        id = await queue.enqueue(tx, NOTE, "kept")
        await tx.commit()
    async with made(url_of(database), isolation_level="AUTOCOMMIT") as autocommit, kind(autocommit) as tx:
        with pytest.raises(RuntimeError, match="AUTOCOMMIT"):
            await queue.enqueue(tx, NOTE, "never")
    assert [row.id for row in await queue.find()] == [id]
