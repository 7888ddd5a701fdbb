"""What the peers' scripts share: arguments, the count of runs, the clock, and one JSON object as the answer.

    python bench/peers/<peer>_.py URL PLACES SINGLES TASKS

SINGLES tasks are enqueued one by one by PLACES producers at once, the others up to TASKS in bulk, a thousand in each
call (a peer without such a call gets them all one by one). Then one worker with PLACES places runs them. Its clock goes
from its start until the last handler has returned and the peer has recorded it in the database.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

BULK = 1000
LOOK = 0.002
"""Seconds between two looks at the table, once the last handler has returned."""
TEXT = "hello"
"""The one argument of every task, called `text` where arguments have names."""


class Contender(NamedTuple):
    """A peer with its schema installed and its connections open."""

    enqueue: Callable[[], Awaitable[object]]
    enqueue_many: Callable[[int], Awaitable[object]] | None
    worker: Callable[[], AbstractAsyncContextManager[object]]
    """Starts the worker; leaving it stops the worker."""
    recorded: Callable[[], Awaitable[bool]]
    """Does the database hold nothing more to do?"""


class Work(NamedTuple):
    url: str
    places: int
    singles: int
    tasks: int


class Runs:
    """Counts the handlers that have returned."""

    def __init__(self) -> None:
        self.left = 0
        self.over = asyncio.Event()

    def expect(self, tasks: int) -> None:
        self.left = tasks
        self.over.clear()

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.over.set()


def module(name: str) -> Any:
    """A module of the peer, which may have no types and need not be installed where this is checked."""
    return importlib.import_module(name)


def main(package: str, contender: Callable[[str, int], AbstractAsyncContextManager[Contender]], ran: Runs) -> None:
    """The whole script of a peer on asyncio, whose handler calls `ran`."""
    work = arguments()
    answer(package, run(lambda: measure(work, contender, ran)))


def arguments() -> Work:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    for name in Work._fields[1:]:
        parser.add_argument(name, type=int)
    logging.basicConfig(level=logging.ERROR)
    return Work(**vars(parser.parse_args()))


def answer(package: str, rates: dict[str, float | None]) -> None:
    print(json.dumps({"version": importlib.metadata.version(package), **rates}))


def run(main: Callable[[], Coroutine[Any, Any, dict[str, float | None]]]) -> dict[str, float | None]:
    try:
        runner = module("uvloop").run
    except ImportError:
        runner = asyncio.run
    return runner(main())


async def measure(
    work: Work, contender: Callable[[str, int], AbstractAsyncContextManager[Contender]], ran: Runs
) -> dict[str, float | None]:
    async with contender(work.url, work.places) as peer:
        many = peer.enqueue_many
        singles = work.tasks if many is None else work.singles

        start = time.perf_counter()
        await produce(peer.enqueue, singles, work.places)
        enqueue = singles / (time.perf_counter() - start)

        bulk = None
        if many is not None:
            start = time.perf_counter()
            for done in range(singles, work.tasks, BULK):
                await many(min(BULK, work.tasks - done))
            bulk = (work.tasks - singles) / (time.perf_counter() - start)

        await settle(work.url)
        ran.expect(work.tasks)
        start = time.perf_counter()
        async with peer.worker():
            await ran.over.wait()
            while not await peer.recorded():  # noqa: ASYNC110  # its table tells nobody
                await asyncio.sleep(LOOK)
            execute = work.tasks / (time.perf_counter() - start)
    return {"enqueue": enqueue, "bulk": bulk, "execute": execute}


async def settle(url: str) -> None:
    """What autovacuum would have done by now, had the tasks not all come in the last seconds."""
    if url.startswith("postgres"):
        conn: Any = await module("asyncpg").connect(url)
        await conn.execute("vacuum analyze")
        await conn.close()


async def produce(enqueue: Callable[[], Awaitable[object]], tasks: int, producers: int) -> None:
    """Enqueue so many, one by one in each of the producers."""
    rest = iter(range(tasks))

    async def producer() -> None:
        for _ in rest:
            await enqueue()

    async with asyncio.TaskGroup() as group:
        for _ in range(producers):
            group.create_task(producer())
