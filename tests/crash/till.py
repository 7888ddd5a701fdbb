"""A program whose every transaction holds the application's row and workq's: orders with their task, and their payment.

It produces and runs at once, on one SQLite file, until it is killed. Lines of its journal: "ready", and "acked" with
the number of an order whose commit has returned.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiosqlite

import workq
from faults.worker import Journal

FROM_EACH = 1_000_000
"""Orders of a producer have the numbers from its own times this, without a gap."""

TABLES = ("create table orders (number integer not null)", "create table payments (number integer not null)")


@asynccontextmanager
async def begun(path: str) -> AsyncGenerator[aiosqlite.Connection]:
    """A transaction of the application's own, committed unless the process is killed in it."""
    async with aiosqlite.connect(path, isolation_level=None, timeout=60) as conn:
        await conn.execute("begin immediate")
        yield conn
        await conn.execute("commit")


async def moment(most: float) -> None:
    """Any time in which this process may be killed."""
    await asyncio.sleep(random.uniform(0, most))


def payer(path: Path) -> workq.Handler[int, Any]:
    """Pays an order, and ends its task, in one transaction."""

    @workq.handler("pay", retry=workq.linear(retries=20, delay=0.1))
    async def pay(task: workq.Task[int]) -> None:
        async with begun(str(path)) as tx:
            await tx.execute(f"insert into payments values ({task.payload})")
            await moment(0.002)
            await task.complete(tx)

    return pay


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[tuple[workq.Queue, workq.Executor]]:
    """The queue on a file, and an executor that is not started."""
    async with workq.connect(f"sqlite:///{path}") as db:
        queue = workq.Queue(db)
        await queue.migrate()
        yield queue, workq.Executor(queue, [payer(path)], workers=4, lease=1, poll_interval=0.1)


async def produce(queue: workq.Queue, path: Path, journal: Journal, first: int) -> None:
    """One order after the other."""
    number = first
    while True:
        async with begun(str(path)) as tx:
            await tx.execute(f"insert into orders values ({number})")
            await queue.enqueue(tx, "pay", number)
        journal.write("acked", number)
        number += 1
        await moment(0.01)


async def main(args: argparse.Namespace) -> None:
    journal = Journal(args.journal)
    async with opened(args.path) as (queue, executor):
        async with begun(str(args.path)) as tx:
            for table in TABLES:
                await tx.execute(table)
        async with executor:
            journal.write("ready")
            await asyncio.gather(*(produce(queue, args.path, journal, place * FROM_EACH) for place in range(3)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("journal")
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(parser.parse_args()))
