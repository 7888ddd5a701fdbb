"""Producers that commit each task by itself: with `enqueue(None)`, or in a transaction of their own."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import aiosqlite
import asyncpg

import workq
from work import WORK, Job

Produce: TypeAlias = Callable[[], Awaitable[object]]
"""Enqueue one task, and commit it."""


@asynccontextmanager
async def autocommit(queue: workq.Queue, url: str) -> AsyncGenerator[Produce]:
    """By `enqueue(None)`."""

    async def produce() -> None:
        await queue.enqueue(None, WORK, Job(time.monotonic_ns(), 0))

    yield produce


@asynccontextmanager
async def in_transaction(queue: workq.Queue, url: str) -> AsyncGenerator[Produce]:
    """In a transaction on a connection of the caller's; its begin and commit belong to the time it takes."""
    if url.startswith("sqlite"):
        async with aiosqlite.connect(path_of(url), isolation_level=None, timeout=60) as local:

            async def produce_locally() -> None:
                sent = time.monotonic_ns()
                await local.execute("begin immediate")
                await queue.enqueue(local, WORK, Job(sent, 0))
                await local.execute("commit")

            yield produce_locally
        return
    conn = await asyncpg.connect(url)

    async def produce() -> None:
        sent = time.monotonic_ns()
        async with conn.transaction():
            await queue.enqueue(conn, WORK, Job(sent, 0))

    try:
        yield produce
    finally:
        await conn.close()


def path_of(url: str) -> str:
    """The file of an SQLite URL."""
    return url.removeprefix("sqlite:///")


async def execute(url: str, *statements: str) -> None:
    """Run statements of the benchmark's own, each committed by itself. It may block the loop."""
    if url.startswith("sqlite"):
        local = sqlite3.connect(path_of(url), isolation_level=None, timeout=60)
        for statement in statements:
            local.execute(statement)
        local.close()
        return
    conn = await asyncpg.connect(url)
    try:
        for statement in statements:
            await conn.execute(statement)
    finally:
        await conn.close()


async def clear(url: str) -> None:
    """Leave nothing in the table."""
    await execute(url, "delete from workq" if url.startswith("sqlite") else "truncate workq")
