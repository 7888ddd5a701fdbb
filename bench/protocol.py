"""W's executor without everything around it: a claimer, p workers, and nothing between them but a list."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

Claimed: TypeAlias = tuple[int, int]
"""A task's id and version."""

Claim: TypeAlias = Callable[[int], Awaitable[Sequence[Claimed]]]
"""At most so many tasks, now this node's."""

Finish: TypeAlias = Callable[[int, Claimed], Awaitable[object]]
"""Worker `which` deletes its task. Gives the row if it was still there."""


async def drain(p: int, n: int, claim: Claim, finish: Finish) -> float:
    """Run n tasks that do nothing. Returns how many a second.

    As soon as a place is free the claimer asks for as many tasks as there are free places; a worker's place is free
    when its own DELETE is committed.
    """
    tasks: asyncio.Queue[Claimed] = asyncio.Queue()
    freed = asyncio.Event()
    free = p

    async def work(which: int) -> None:
        nonlocal free
        while True:
            if await finish(which, await tasks.get()) is None:
                raise AssertionError("a task was lost")
            free += 1
            freed.set()

    gc.collect()
    since = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work(which)) for which in range(p)]
        claimed = 0
        while claimed < n:
            found = await claim(free)
            claimed += len(found)
            free -= len(found)
            for task in found:
                tasks.put_nowait(task)
            freed.clear()
            if not free:
                await freed.wait()
        while free < p:
            freed.clear()
            await freed.wait()
        elapsed = time.perf_counter() - since
        for worker in workers:
            worker.cancel()
    return n / elapsed
