"""The application's side of a crash run: connections and transactions of its own, which workq knows nothing of."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiosqlite
import asyncpg

PATIENCE = 5.0
"""Seconds that a statement of the application may take."""


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite:")


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[Any]:
    """A connection with `execute`. Whatever went wrong, leaving does not wait."""
    if is_sqlite(url):
        path = url.removeprefix("sqlite:///")
        async with aiosqlite.connect(path, isolation_level=None, timeout=PATIENCE) as conn:
            yield conn
        return
    # Without prepared statements, so that it can also go through a pooler.
    conn = await asyncpg.connect(url, timeout=PATIENCE, command_timeout=PATIENCE, statement_cache_size=0)
    try:
        yield conn
        with suppress(Exception):
            await conn.close(timeout=PATIENCE)
    finally:
        conn.terminate()


def begin(url: str) -> str:
    """The statement that begins a transaction which is going to write."""
    # Where the network lost the client and nobody tells the server, its keys would stay locked for ever.
    limited = f"begin; set local idle_in_transaction_session_timeout = '{PATIENCE:g}s'"
    return "begin immediate" if is_sqlite(url) else limited


def table(schema: str | None, name: str) -> str:
    """A table's name, quoted."""
    return f'"{schema or "main"}"."{name}"'


async def make_ledger(url: str, schema: str | None) -> None:
    """The application's table: a row for each task that ended with `complete(tx)`. Nothing keeps doubles out."""
    await run(url, f"create table {table(schema, 'ledger')} (token text not null, task bigint not null)")


async def run(url: str, sql: str) -> None:
    """Run one statement, committed."""
    async with connected(url) as conn:
        await conn.execute(sql)


async def read(url: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    async with connected(url) as conn:
        rows = await (conn.execute_fetchall(sql) if is_sqlite(url) else conn.fetch(sql))
        return [tuple(row) for row in rows]


def token_of(payload: str) -> str:
    """The token that a row's payload is."""
    return str(json.loads(payload))
