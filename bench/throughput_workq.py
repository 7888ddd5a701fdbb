"""workq's side of throughput.py, for comparisons, too: every function makes the table empty and returns one rate.

Tasks have a payload of one number in a dataclass. Handlers go through the real path: the payload is decoded into its
type, every run has a fresh context, an event hook is set, the heartbeat is on; all settings are the defaults, but for
`workers`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import limits_postgres
import limits_sqlite
import workq
from measure import TABLE, Driver, Measure, pages, rate

PATIENCE = 300
"""Seconds after which a run has hung."""


@dataclass
class Number:
    """The payload."""

    number: int


@workq.handler("noop")
async def noop(task: workq.Task[Number]) -> None:
    """A handler that has nothing to do."""


class Watch:
    """An event hook that counts, and knows when the last task was completed."""

    def __init__(self, n: int) -> None:
        self._left = n
        self.ended = asyncio.Event()
        self.at = 0.0

    def __call__(self, event: workq.Event) -> None:
        if event.kind == "completed":
            self._left -= 1
            if not self._left:
                self.at = time.perf_counter()
                self.ended.set()


@asynccontextmanager
async def emptied(url: str, *hooks: Callable[[workq.Event], None]) -> AsyncGenerator[workq.Queue]:
    """A queue on the empty table."""
    await driver(url).empty(url)
    async with workq.connect(url, table=TABLE) as db:
        yield workq.Queue(db, on_event=hooks or [ignore])


def driver(url: str) -> Driver:
    """The bare driver's side for this database."""
    return limits_sqlite if url.startswith("sqlite") else limits_postgres


def ignore(event: workq.Event) -> None:
    """The event hook of producers."""


async def execute_rate(url: str, p: int, n: int, *, claim_ahead: bool = True) -> float:
    """n tasks are there; one executor with p workers starts and runs them all.

    From before its start until the last one's row is gone: `completed` comes after the commit.
    """
    watch = Watch(n)
    async with emptied(url, watch) as queue:
        await fill(queue, n)
        gc.collect()
        since = time.perf_counter()
        async with workq.Executor(queue, [noop], workers=p, claim_ahead=claim_ahead):
            await asyncio.wait_for(watch.ended.wait(), PATIENCE)
    if left := await driver(url).left(url):
        raise AssertionError(f"{left} of {n} tasks are still there")
    return n / (watch.at - since)


async def fill(queue: workq.Queue, n: int) -> None:
    """Store n tasks in thousands."""
    for page in pages(n):
        await queue.enqueue_many(None, [workq.NewTask(noop, Number(1)) for _ in range(page)])


async def enqueue_rate(url: str, p: int, n: int) -> float:
    """p producers in one process, n calls of `enqueue(None, ...)` in all."""
    async with emptied(url) as queue:
        return await rate(p, n, lambda _: queue.enqueue(None, noop, Number(1)))


async def enqueue_tx_rate(url: str, p: int, n: int) -> float:
    """The same with `enqueue(tx, ...)`: one transaction per task, in the pattern of the bare driver's."""
    async with emptied(url) as queue:
        return await driver(url).committed(url, p, n, lambda conn: queue.enqueue(conn, noop, Number(1)))


async def enqueue_many_rate(url: str, p: int, n: int) -> float:
    """`enqueue_many(None, ...)` in thousands, by one producer; the making of the tasks counts."""
    async with emptied(url) as queue:
        return n * await rate(1, 1, lambda _: fill(queue, n))


SINGLE: dict[str, Measure] = {
    "execute": execute_rate,
    "enqueue(None)": enqueue_rate,
    "enqueue(tx)": enqueue_tx_rate,
}
MULTI: dict[str, Measure] = {"enqueue_many": enqueue_many_rate}
