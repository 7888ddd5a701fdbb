"""A database as a benchmark sees it: what workq sends is counted, what comes back is looked at, wake-ups may be off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import workq
from workq.dialect import Connection, Dialect, Params, Rows, Statement, Statements, Transaction, Urgency

Seen: TypeAlias = Callable[[Statement, Params, Rows], None]


class Watched:
    """A dialect round another one.

    seen: called after every statement on workq's own connections, except for the listening one.
    wake_ups: False takes them away: nothing rings, and nobody hears anything.
    """

    def __init__(self, inner: Dialect, seen: Seen = lambda statement, params, rows: None, *, wake_ups: bool = True):
        self._inner = inner
        self._seen = seen
        self._wake_ups = wake_ups
        self._sql = inner.sql if wake_ups else replace(inner.sql, ring=None)

    @property
    def sql(self) -> Statements:
        """The statements."""
        return self._sql

    async def fetch(self, statement: Statement, params: Params, tx: Transaction) -> Rows:
        """On the caller's connection."""
        return await self._inner.fetch(statement, params, tx)

    def connection(self, purpose: str, *, first: bool = False) -> WatchedConnection:
        """A connection whose statements are seen."""
        return WatchedConnection(self._inner.connection(purpose, first=first), self._seen)

    def reserve(self, connections: int) -> Callable[[], None]:
        """As the inner one."""
        return self._inner.reserve(connections)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """As the inner one."""
        return self._inner.transaction()

    def after(self, tx: Transaction, callback: Callable[[], None]) -> None:
        """As the inner one, or never."""
        if self._wake_ups:
            self._inner.after(tx, callback)

    async def listen(self, heard: Callable[[str | None], None]) -> None:
        """As the inner one, or nothing is ever heard."""
        if self._wake_ups:
            await self._inner.listen(heard)
        else:
            await asyncio.Event().wait()

    def at_close(self, flush: Callable[[], Awaitable[None]]) -> None:
        """As the inner one."""
        self._inner.at_close(flush)


class WatchedConnection:
    """One connection."""

    def __init__(self, inner: Connection, seen: Seen) -> None:
        self._inner = inner
        self._seen = seen

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        """Run one statement, and show it."""
        rows = await self._inner.fetch(statement, params, urgency)
        self._seen(statement, params, rows)
        return rows

    async def close(self) -> None:
        """Give it back."""
        await self._inner.close()


@asynccontextmanager
async def quiet_queue(url: str, *, wake_ups: bool) -> AsyncGenerator[workq.Queue]:
    """A queue on an existing table, with wake-ups or without."""
    async with workq.connect(url) as db:
        yield workq.Queue(Watched(db, wake_ups=wake_ups))
