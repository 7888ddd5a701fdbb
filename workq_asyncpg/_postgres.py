"""The dialect: a pool of the application's, or one that `workq.connect` made."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from workq import sqlalchemy
from workq.dialect import (
    Params,
    Rows,
    Statement,
    Statements,
    Transaction,
    UniqueViolation,
    names,
    postgres,
    require_process,
)
from workq.sqlalchemy import is_sqlalchemy
from workq_asyncpg._bell import Doorbell, listen_on
from workq_asyncpg._connection import PostgresConnection

if TYPE_CHECKING:
    from typing import TypeAlias

    Pool: TypeAlias = asyncpg.Pool[Any]
    Caller: TypeAlias = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

logger = logging.getLogger("workq")

MIGRATIONS = 0x776F726B71  # "workq": the advisory lock that lets one node migrate at a time

reserved: Counter[int] = Counter()
"""Connections that running executors count on, by the pool's identity: all that share a pool must fit into it."""


class Postgres:
    """workq's table in PostgreSQL 14 or later, through your asyncpg pool, which stays yours to close.

    pool: each running executor holds 3 of its connections, each queue 2 more.
    schema: None is "public". table: its name; indexes and the version table take it as their prefix.
    listen: hear of new tasks by LISTEN; False behind a pooler in transaction mode (polling alone always suffices).

    Raises TypeError if `pool` is no asyncpg pool, and ValueError for names that do not fit.
    """

    def __init__(self, pool: Pool, /, *, schema: str | None = None, table: str = "workq", listen: bool = True) -> None:
        if not isinstance(pool, asyncpg.Pool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Postgres() takes a pool made by asyncpg.create_pool(...), not {type(pool).__name__}")
        self._pool = pool
        self._pid: int | None = None
        self._names = names("public" if schema is None else schema, table)
        self._listen = listen
        statements = postgres(self._names)
        self._sql = statements if listen else replace(statements, ring=None)
        self._doorbell = Doorbell()
        self._flushes: list[Callable[[], Awaitable[None]]] = []

    @property
    def sql(self) -> Statements:
        """The statements for this table."""
        return self._sql

    async def fetch(self, statement: Statement, params: Params, tx: Transaction) -> Rows:
        """Run one statement on the caller's connection."""
        self._here()
        arguments = statement.positional(params)
        if is_sqlalchemy(tx):
            return await sqlalchemy.run(tx, "asyncpg", statement, tuple(arguments))
        conn = connection_of(tx)
        if not statement.writes:
            return await conn.fetch(statement.text, *arguments)
        if not conn.is_in_transaction():
            raise RuntimeError(
                "this connection has no open transaction: use `async with conn.transaction():` around it, "
                "or give None instead of the connection to commit at once"
            )
        if not statement.savepoint:
            return await conn.fetch(statement.text, *arguments)
        # Not conn.transaction(): asyncpg refuses that in a transaction begun by hand.
        await conn.execute("savepoint workq")
        try:
            rows = await conn.fetch(statement.text, *arguments)
        except asyncpg.UniqueViolationError as error:
            await conn.execute("rollback to savepoint workq")
            await conn.execute("release savepoint workq")
            raise UniqueViolation from error
        await conn.execute("release savepoint workq")
        return rows

    def connection(self, purpose: str, *, first: bool = False) -> PostgresConnection:
        """A connection for one loop."""
        self._here()
        return PostgresConnection(self._pool, purpose)

    def reserve(self, connections: int) -> Callable[[], None]:
        """Count on so many connections of the pool."""
        self._here()
        at, size = id(self._pool), self._pool.get_max_size()
        needed = reserved[at] + connections
        if needed > size:
            raise RuntimeError(
                f"the pool is too small: workq needs {needed} connections of it (3 for each running executor, 2 for "
                f"each queue) and it has {size}. Make it larger: with pool_size={needed + 5} for "
                f"workq.connect(), or max_size={needed + 5} for create_pool(), 5 are left for the application"
            )
        if needed == size:
            logger.warning("workq takes all %d connections of the pool; none is left for the application", size)
        reserved[at] = needed

        def release() -> None:
            reserved[at] -= connections
            if not reserved[at]:
                del reserved[at]

        return release

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """A transaction that excludes every other one made here."""
        self._here()
        async with self._pool.acquire() as conn, conn.transaction():
            # Held until the commit. CREATE ... IF NOT EXISTS is not safe against itself.
            await conn.execute("select pg_advisory_xact_lock($1)", MIGRATIONS)
            yield conn

    def after(self, tx: Transaction, callback: Callable[[], None]) -> None:
        """Call `callback` when the caller's transaction ends."""
        raw = sqlalchemy.raw_connection(tx) if is_sqlalchemy(tx) else connection_of(tx)
        self._doorbell.after(raw, callback)

    async def listen(self, heard: Callable[[str | None], None]) -> None:
        """Hear the rings of other processes."""
        if self._listen:
            await listen_on(self._pool, self._names.channel, heard)
        else:
            await asyncio.Event().wait()

    def _here(self) -> None:
        """One process from the first use on; before that it may be made anywhere, for a server that forks, say."""
        if self._pid is None:
            self._pid = os.getpid()
        require_process(self._pid)

    def at_close(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Remember what is to be written before `workq.connect` closes the pool."""
        self._flushes.append(flush)

    async def flush(self) -> None:
        """Write what is still waiting in `enqueue_soon`."""
        for flush in self._flushes:
            await flush()


def connection_of(tx: object) -> Caller:
    """The caller's connection. Raises TypeError, naming the remedy, for everything else."""
    if isinstance(tx, asyncpg.Connection | PoolConnectionProxy):
        return tx  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tx, asyncpg.Pool):
        raise TypeError(
            "a pool is not a transaction: give a connection of it (`async with pool.acquire() as conn, "
            "conn.transaction():`), or None to commit at once"
        )
    raise TypeError(
        f"tx must be an asyncpg connection with an open transaction, or None to commit at once, not "
        f"{type(tx).__module__}.{type(tx).__qualname__}"
    )
