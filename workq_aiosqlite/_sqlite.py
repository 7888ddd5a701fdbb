"""The dialect: one file, opened by `async with`."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast

import aiosqlite
import anyio

from workq import sqlalchemy
from workq.dialect import (
    Params,
    Rows,
    Statement,
    Statements,
    Transaction,
    names,
    require_process,
    sqlite,
    to_its_end,
)
from workq.sqlalchemy import is_sqlalchemy
from workq_aiosqlite._bind import bound, read
from workq_aiosqlite._connection import File, SQLiteConnection, opened, persistently

LOOK_EVERY = 0.01
"""Seconds between looks at the file, 3 us each: commits of other processes are seen that soon."""
FIRST_LOOK = 0.0003
"""Seconds until the first look at a transaction of this process; the pauses grow with its age."""
YOUNG = 0.02
"""Seconds: the kernel's file times are that coarse, so a younger change may hide one that came after it."""


class SQLite:
    """workq's table in an SQLite file (3.35 or later), opened and closed by `async with`.

    It is opened in WAL mode with `synchronous=NORMAL`: a crash of the process loses nothing, a power failure may lose
    the last commits. ":memory:" is refused, since every connection would have a database of its own.

    Raises ValueError for a path or table name that cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], /, *, table: str = "workq") -> None:
        text = os.fspath(path)
        if not text or text == ":memory:" or text.startswith("file:"):
            raise ValueError(
                f"workq needs a file, not {text!r}: every connection to a memory database would see its own. "
                "In tests use a temporary file"
            )
        self._path = Path(text)
        self._sql = sqlite(names("main", table))
        self._file: File | None = None
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: set[tuple[int, Callable[[], None]]] = set()
        self._flushes: list[Callable[[], Awaitable[None]]] = []

    @property
    def sql(self) -> Statements:
        """The statements for this table."""
        return self._sql

    async def __aenter__(self) -> Self:
        """Open the file. Raises RuntimeError if this SQLite is too old, sqlite3.OperationalError if it cannot."""
        if self._file is not None:
            raise RuntimeError(f"{self._path} is open already")
        writer = await opened(self._path)
        try:
            reader = await opened(self._path)
        except BaseException:
            await writer.close()
            raise
        self._file = File(self._path, writer, reader)
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write what `enqueue_soon` still holds, and close the file."""
        require_process(self._pid)  # the handle is the parent's to close
        # In an anyio scope that is cancelled every await would fail, and an unclosed file keeps its threads.
        with anyio.CancelScope(shield=True):
            await to_its_end(self._close())

    async def _close(self) -> None:
        try:
            for flush in self._flushes:
                await flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                await file.close()

    def _opened(self) -> File:
        if self._file is not None:
            require_process(self._pid)
        if self._file is None:
            raise RuntimeError(f"{self._path} is not open: use `async with SQLite(path) as db:` or workq.connect(url)")
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError(f"{self._path} was opened in another event loop: open it in the loop that uses it")
        return self._file

    async def fetch(self, statement: Statement, params: Params, tx: Transaction) -> Rows:
        """Run one statement on the caller's connection."""
        values = bound(params)
        if is_sqlalchemy(tx):
            return read(statement, await sqlalchemy.run(tx, "aiosqlite", statement, values))
        conn = connection_of(tx)
        file = self._file
        if file is not None and conn in (file.writer, file.reader):
            raise TypeError("this is the queue's own connection: open one for your transaction")
        if statement.writes:
            require_transaction(conn)
        if conn.row_factory in (None, sqlite3.Row):
            return read(statement, as_text(conn, await conn.execute_fetchall(statement.text, values)))
        cursor = await conn.cursor()
        try:
            cursor.row_factory = None  # rows are read by position, whatever the caller makes of them
            await cursor.execute(statement.text, cast(Any, values))
            return read(statement, as_text(conn, await cursor.fetchall()))
        finally:
            await cursor.close()

    def connection(self, purpose: str, *, first: bool = False) -> SQLiteConnection:
        """What one loop holds."""
        return SQLiteConnection(self._opened(), first)

    def reserve(self, connections: int) -> Callable[[], None]:
        """All loops share the file's two connections."""
        self._opened()
        return lambda: None

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """A transaction that excludes every other writer."""
        self._opened()
        conn = await opened(self._path)
        try:
            await persistently(conn, "begin immediate", {}, wait=30)
            yield conn
            await persistently(conn, "commit", {}, wait=30)
        finally:
            await conn.close()  # which rolls back what was not committed

    def after(self, tx: Transaction, callback: Callable[[], None]) -> None:
        """Look soon whether the transaction is over; `listen` would see its commit some milliseconds later."""
        conn: Any = sqlalchemy.raw_connection(tx) if is_sqlalchemy(tx) else tx
        loop = asyncio.get_running_loop()
        watch = (id(conn), callback)
        if watch in self._watches:
            return
        self._watches.add(watch)

        def look(pause: float) -> None:
            if in_transaction(conn):
                loop.call_later(pause, look, min(pause * 1.5, LOOK_EVERY))
            else:
                self._watches.discard(watch)
                callback()

        loop.call_later(FIRST_LOOK, look, FIRST_LOOK)

    async def listen(self, heard: Callable[[str | None], None]) -> None:
        """Look at the file: whoever commits, in this process or another, changes it."""
        loop = asyncio.get_running_loop()
        seen = signature(self._path)
        timer: asyncio.TimerHandle

        def look() -> None:  # a timer alone costs half of what a sleeping task does
            nonlocal seen, timer
            timer = loop.call_later(LOOK_EVERY, look)
            now = signature(self._path)
            if now != seen:
                seen = now if time.time_ns() - now[0] > YOUNG * 1e9 else (0, 0)
                heard(None)

        timer = loop.call_later(LOOK_EVERY, look)
        try:
            await asyncio.Event().wait()
        finally:
            timer.cancel()

    def at_close(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Remember what is to be written before the file is closed."""
        self._flushes.append(flush)


def signature(path: Path) -> tuple[int, int]:
    """Time and size of the last change: of the write-ahead log, or of the file where there is none."""
    for name in (f"{path}-wal", path):
        try:
            status = os.stat(name)
        except OSError:
            continue
        return status.st_mtime_ns, status.st_size
    return 0, 0


def connection_of(tx: object) -> aiosqlite.Connection:
    """The caller's connection. Raises TypeError, naming the remedy, for everything else."""
    if isinstance(tx, aiosqlite.Connection):
        return tx
    if isinstance(tx, sqlite3.Connection | sqlite3.Cursor):
        raise TypeError("a connection of the sqlite3 module would block the event loop: open one with aiosqlite")
    raise TypeError(
        f"tx must be an aiosqlite connection, or None to commit at once, not "
        f"{type(tx).__module__}.{type(tx).__qualname__}"
    )


def in_transaction(conn: aiosqlite.Connection) -> bool:
    """Is a transaction open on it? Not on one that is closed."""
    try:
        return conn.in_transaction
    except (ValueError, sqlite3.ProgrammingError):
        return False


def as_text(conn: aiosqlite.Connection, rows: Any) -> Any:
    """The rows with text as str, whatever the caller's connection makes of it."""
    if conn.text_factory is str:
        return rows
    return [[value.decode() if isinstance(value, bytes | bytearray) else value for value in row] for row in rows]


def require_transaction(conn: aiosqlite.Connection) -> None:
    """Raise RuntimeError if the statement would commit at once although a transaction was promised."""
    if conn.in_transaction:
        return
    raw: Any = conn._conn  # pyright: ignore[reportPrivateUsage]
    # Python 3.12 has `autocommit`, and then isolation_level counts for nothing.
    mode: object = getattr(raw, "autocommit", None)
    commits_at_once = mode if isinstance(mode, bool) else conn.isolation_level is None
    if commits_at_once:
        raise RuntimeError(
            "this connection has no open transaction and opens none by itself (isolation_level=None): run "
            "`BEGIN IMMEDIATE` first, or give None instead of the connection to commit at once"
        )
