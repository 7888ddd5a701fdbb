"""Connections of workq's own to one file: one that writes and one that reads, each a thread of aiosqlite's."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
from pathlib import Path
from typing import Any, cast

import aiosqlite

from workq.dialect import (
    Busy,
    Interrupted,
    NotNow,
    Params,
    Rows,
    Statement,
    UniqueViolation,
    Unreachable,
    Urgency,
    require_process,
    to_its_end,
)
from workq_aiosqlite._bind import bound, read
from workq_aiosqlite._turn import turn_of

OLDEST = (3, 35, 0)
WAL_LIMIT = 64 << 20
LOOK_AT_LOG = 64
"""Writes between two looks at its size."""
SHORTEN_TRIES = 20
BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
NO_WAY_IN = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
    }
)
"""Errors of the disk or the file that say nothing about the statement, after which nothing was done."""


class Visited(sqlite3.Connection):
    """Runs a statement of two parts in one visit to the thread, which costs more than most statements."""

    def execute(self, sql: str | Statement, parameters: Any = ()) -> Any:
        """As of sqlite3; for a Statement with a `page`, both its parts in one transaction."""
        if isinstance(sql, str):
            return super().execute(sql, parameters)
        super().execute("begin immediate")
        try:
            parts = super().execute(sql.page, parameters).fetchall()
            rows = [row for (part,) in parts for row in json.loads(part)]
            if rows:
                super().execute(sql.text, {**parameters, "ids": json.dumps([row[0] for row in rows])})
            super().execute("commit")
        except BaseException:
            if self.in_transaction:
                super().execute("rollback")
            raise
        return Page(rows)


class Page:
    """Stands for the cursor that execute() returns."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def fetchall(self) -> list[Any]:
        """The rows."""
        return self._rows


async def opened(path: Path) -> aiosqlite.Connection:
    """Open the file with our settings. Raises RuntimeError if this SQLite is too old."""
    if sqlite3.sqlite_version_info < OLDEST:
        raise RuntimeError(f"workq needs SQLite 3.35 or later for RETURNING; this Python has {sqlite3.sqlite_version}")
    # No busy handler: it sleeps in steps of up to 100 ms and starves beats (2.9 s at worst against 44 ms with ours).
    conn = aiosqlite.connect(path, isolation_level=None, timeout=0, factory=Visited)
    thread = getattr(conn, "_thread", None)
    if thread is not None:
        thread.daemon = True  # a connection that was forgotten must not keep the interpreter alive
    try:
        # To its end: the thread opens the file whatever happens here, and its handle would be left unclosed.
        await to_its_end(started(conn))
        for pragma in ("journal_mode = wal", "synchronous = normal", f"journal_size_limit = {WAL_LIMIT}"):
            await persistently(conn, f"pragma {pragma}", {}, wait=5)
        conn.text_factory = readable
    except BaseException as error:
        await to_its_end(conn.close())
        if isinstance(error, sqlite3.OperationalError):
            raise sqlite3.OperationalError(f"{error}: {path}") from None
        raise
    return conn


def readable(text: bytes) -> str:
    """Text that somebody wrote by hand, and not as UTF-8, must not keep the other rows from being read."""
    return text.decode(errors="replace")


async def started(conn: aiosqlite.Connection) -> None:
    """Open it, in its thread."""
    await conn


async def persistently(conn: aiosqlite.Connection, text: str | Statement, params: Any, *, wait: float) -> Any:
    """Run a statement, again and again while another process writes. Raises Busy after `wait` seconds."""
    pause, deadline = 0.0005, 0.0
    while True:
        try:
            return await conn.execute_fetchall(cast(str, text), params)
        except sqlite3.OperationalError as error:
            if code_of(error) not in BUSY:
                raise
            clock = asyncio.get_running_loop().time
            deadline = deadline or clock() + wait
            if clock() + pause <= deadline:
                await asyncio.sleep(pause * random.uniform(0.5, 1))
            # Looked at again, or a process that was frozen meanwhile would claim with the time of long ago.
            if clock() + pause > deadline:
                raise Busy(f"another connection held SQLite's writer for {wait:g} s") from error
        pause = min(pause * 2, 0.005)


def code_of(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def size_of(path: str) -> int:
    """Bytes, 0 where there is no file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class File:
    """The open file: a writer, a reader, and whose turn it is."""

    def __init__(self, path: Path, writer: aiosqlite.Connection, reader: aiosqlite.Connection) -> None:
        self.path = path
        self._log = f"{path}-wal"
        self.writer = writer
        self.reader = reader
        status = os.stat(path)
        self._turn = turn_of(status.st_dev, status.st_ino)
        self._writes = 0

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency, first: bool) -> Rows:
        """Run one statement, in a transaction of its own."""
        try:
            return await self._fetch(statement, params, urgency, first)
        except sqlite3.OperationalError as error:
            # Or else a finish that meets a full disk would be taken for one that is refused, and fail its task.
            if code_of(error) in NO_WAY_IN:
                raise NotNow(f"the file cannot be used: {error}") from error
            if code_of(error) == sqlite3.SQLITE_IOERR:
                raise Interrupted(f"the file broke: {error}") from error
            raise
        except MemoryError as error:
            # SQLite's, or Python's when the statement had been carried out.
            raise Interrupted("no memory is left") from error

    async def _fetch(self, statement: Statement, params: Params, urgency: Urgency, first: bool) -> Rows:
        if not statement.writes:
            rows = await persistently(self.reader, statement.text, bound(params), wait=urgency.timeout)
            return read(statement, rows)
        wait = urgency.timeout if urgency.lock_wait is None else urgency.lock_wait
        values = bound(params)
        left = wait
        if not self._turn.taken_at_once():
            clock = asyncio.get_running_loop().time
            since = clock()
            await self._turn.take(first=first, wait=wait)
            left = max(since + wait - clock(), 0)
        try:
            sent = statement if statement.page else statement.text
            rows = await persistently(self.writer, sent, values, wait=left)
            self._writes += 1
            if self._writes % LOOK_AT_LOG == 0 and size_of(self._log) > WAL_LIMIT:
                await self._shorten()
            return read(statement, rows)
        except sqlite3.IntegrityError as error:
            if statement.savepoint:
                raise UniqueViolation from error
            raise
        finally:
            self._turn.give()

    async def _shorten(self) -> None:
        # Where readers come without a pause, nobody's automatic checkpoint ever meets none of them, and the log only
        # grows: four busy processes made one of 370 MB. The turn is ours, so in this process nobody writes.
        for _ in range(SHORTEN_TRIES):
            try:
                ((busy, *_),) = await self.writer.execute_fetchall("pragma wal_checkpoint(truncate)")
            except sqlite3.OperationalError:
                return
            if not busy:
                return
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """Close both connections and end their threads."""
        await asyncio.gather(self.writer.close(), self.reader.close())


class SQLiteConnection:
    """What one loop holds: the file's writer and reader are shared, so there is nothing to open or close."""

    def __init__(self, file: File | None, first: bool) -> None:
        self._file = file
        self._first = first
        self._pid = os.getpid()

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        """Run one statement in a transaction of its own."""
        require_process(self._pid)
        if self._file is None:
            raise Unreachable("the SQLite file is not open")
        return await self._file.fetch(statement, params, urgency, self._first)

    async def close(self) -> None:
        """Nothing to give back."""
