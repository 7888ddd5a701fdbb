"""A program whose tasks write a row into the application's own ledger, and end in the same transaction.

It runs until it is killed. Lines of its journal: "ready", and "start" and "end" of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import aiosqlite
import asyncpg

import workq
from faults.worker import Journal

Begun: TypeAlias = Callable[[], AbstractAsyncContextManager[aiosqlite.Connection | asyncpg.Connection]]
"""Begins a transaction of the application's own, and commits it."""


def on_sqlite(path: str) -> Begun:
    @asynccontextmanager
    async def begun() -> AsyncGenerator[aiosqlite.Connection]:
        async with aiosqlite.connect(path, isolation_level=None, timeout=60) as conn:
            await conn.execute("begin immediate")
            yield conn
            await conn.execute("commit")

    return begun


def on_postgres(url: str) -> Begun:
    @asynccontextmanager
    async def begun() -> AsyncGenerator[asyncpg.Connection]:
        conn = await asyncpg.connect(url)
        try:
            async with conn.transaction():
                yield conn
        finally:
            await conn.close()

    return begun


async def moment(most: float) -> None:
    """Any time in which this process may be killed."""
    await asyncio.sleep(random.uniform(0, most))


async def main(args: argparse.Namespace) -> None:
    journal = Journal(args.journal)
    _, is_sqlite, path = args.url.partition("sqlite:///")
    begun = on_sqlite(path) if is_sqlite else on_postgres(args.url)

    @workq.handler("pay")
    async def pay(task: workq.Task[int]) -> None:
        journal.write("start", task.id)
        await moment(args.takes)
        async with begun() as tx:
            await moment(args.pause)
            await tx.execute(f"insert into {args.ledger} (task, amount) values ({task.id}, {task.payload})")
            await moment(args.pause)
            if not args.apart:
                await task.complete(tx)
                await moment(args.pause)
        await moment(args.takes)
        journal.write("end", task.id)

    async with workq.connect(args.url, schema=args.schema) as db:
        executor = workq.Executor(
            workq.Queue(db), [pay], workers=4, lease=args.lease, poll_interval=0.1, max_lost=1_000_000
        )
        async with executor:
            journal.write("ready")
            await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("journal")
    parser.add_argument("ledger", help="the table, quoted")
    parser.add_argument("--schema")
    parser.add_argument("--lease", type=float, default=1)
    parser.add_argument("--takes", type=float, default=0.1, help="seconds at most round the transaction")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds at most between its statements")
    parser.add_argument("--apart", action="store_true", help="leave the end of the task to workq")
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(parser.parse_args()))
