"""The application's own transactions on an SQLite file, for programs that are killed in them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import aiosqlite

Begun: TypeAlias = Callable[[], AbstractAsyncContextManager[aiosqlite.Connection]]
"""Begins a transaction of the application's own, and commits it."""


def on_sqlite(path: str) -> Begun:
    @asynccontextmanager
    async def begun() -> AsyncGenerator[aiosqlite.Connection]:
        async with aiosqlite.connect(path, isolation_level=None, timeout=60) as conn:
            await conn.execute("begin immediate")
            yield conn
            await conn.execute("commit")

    return begun


async def moment(most: float) -> None:
    """Any time in which this process may be killed."""
    await asyncio.sleep(random.uniform(0, most))
