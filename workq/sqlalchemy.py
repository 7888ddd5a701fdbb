"""SQLAlchemy 2's async sessions and connections as `tx`. Nothing to call: give them to the queue's methods.

Statements run *through* SQLAlchemy (`exec_driver_sql`). Its asyncpg adapter begins the driver's transaction at its own
first statement, so that a statement on the raw connection before that would be committed at once and survive a
rollback. SQLAlchemy is not imported here: what is not loaded cannot have been given.
"""

from __future__ import annotations

import sys
from typing import Any

from workq.dialect import Rows, Statement, UniqueViolation

__all__ = ["is_sqlalchemy", "raw_connection", "run"]


def is_sqlalchemy(tx: object) -> bool:
    """Is this an async session or connection? Raises TypeError, naming the remedy, for SQLAlchemy's other objects."""
    asyncio_part: Any = sys.modules.get("sqlalchemy.ext.asyncio")
    if asyncio_part is not None:
        if isinstance(tx, asyncio_part.AsyncSession | asyncio_part.AsyncConnection | asyncio_part.async_scoped_session):
            return True
        if isinstance(tx, asyncio_part.AsyncEngine):
            raise TypeError(
                "an engine is not a transaction: use `async with engine.begin() as conn:` and give conn, "
                "or give None to commit at once"
            )
        if isinstance(tx, asyncio_part.async_sessionmaker):
            raise TypeError(
                "a session maker is not a transaction: use `async with sessions.begin() as session:` and give session"
            )
    orm: Any = sys.modules.get("sqlalchemy.orm")
    core: Any = sys.modules.get("sqlalchemy.engine")
    if (orm is not None and isinstance(tx, orm.Session | orm.scoped_session | orm.sessionmaker)) or (
        core is not None and isinstance(tx, core.Connection | core.Engine)
    ):
        raise TypeError(
            "this is SQLAlchemy's synchronous side, which would block the event loop: "
            "use create_async_engine and give an AsyncSession or AsyncConnection"
        )
    return False


async def run(tx: Any, driver: str, statement: Statement, parameters: Any) -> Rows:
    """Run one statement in the session's or connection's transaction and return its rows."""
    conn = await _connection(tx)
    if conn.dialect.driver != driver:
        raise TypeError(
            f"this queue speaks {driver}, but the engine uses {conn.dialect.driver}: "
            f"make it with a URL of {'postgresql' if driver == 'asyncpg' else 'sqlite'}+{driver}://"
        )
    if statement.writes:
        await _require_transaction(conn)
    if not statement.savepoint:
        return _rows(await conn.exec_driver_sql(statement.text, parameters))
    exceptions: Any = sys.modules["sqlalchemy.exc"]
    try:
        async with conn.begin_nested():
            return _rows(await conn.exec_driver_sql(statement.text, parameters))
    except exceptions.IntegrityError as error:
        raise UniqueViolation from error


def raw_connection(tx: Any) -> Any:
    """The driver's connection below, to hear when its transaction ends; only after a statement, never to run one."""
    part: Any = sys.modules["sqlalchemy.ext.asyncio"]
    if isinstance(tx, part.async_scoped_session):
        tx = tx()
    sync = tx.sync_connection if isinstance(tx, part.AsyncConnection) else tx.sync_session.connection()
    return sync.connection.driver_connection


async def _connection(tx: Any) -> Any:
    part: Any = sys.modules["sqlalchemy.ext.asyncio"]
    return tx if isinstance(tx, part.AsyncConnection) else await tx.connection()


async def _require_transaction(conn: Any) -> None:
    pooled = conn.sync_connection.connection
    if conn.dialect.driver == "aiosqlite" and conn.in_nested_transaction():
        _require_begin(conn.sync_connection, pooled)
        return
    if not _commits_at_once(pooled, conn.dialect.driver):
        return
    # An engine whose "begin" event sends BEGIN itself (SQLAlchemy's recipe for SQLite) looks the same until it did.
    await conn.exec_driver_sql("select 1")
    if not getattr(pooled.driver_connection, "in_transaction", False):
        raise RuntimeError(
            "this SQLAlchemy connection is in AUTOCOMMIT, so there is no transaction to be part of: "
            "use another engine, or give None to commit at once"
        )


def _require_begin(sync: Any, pooled: Any) -> None:
    # Python's sqlite3 sends BEGIN before a write, not before a SAVEPOINT, and the release of an outermost savepoint is
    # a commit. SQLite does not tell which one is the outermost, so it must be plain that something sent BEGIN.
    if getattr(pooled.driver_connection._conn, "autocommit", None) is False or sync.dispatch.begin:
        return
    raise RuntimeError(
        "this savepoint may be no part of a transaction, and commit the task when it is released: on SQLite the engine "
        'must send BEGIN itself. Make it with connect_args={"autocommit": False} (Python 3.12) or with the "begin" '
        "event of SQLAlchemy's recipe for SQLite, or do this before begin_nested()"
    )


def _commits_at_once(pooled: Any, driver: str) -> bool:
    # Asked of the drivers: SQLAlchemy's own question is new in 2.0.43, and knows nothing of sqlite3's `autocommit`.
    if driver == "asyncpg":
        return bool(pooled.dbapi_connection.autocommit)
    mode = getattr(pooled.driver_connection._conn, "autocommit", None)
    return mode if isinstance(mode, bool) else pooled.driver_connection.isolation_level is None


def _rows(result: Any) -> Rows:
    return [tuple(row) for row in result.all()] if result.returns_rows else []
