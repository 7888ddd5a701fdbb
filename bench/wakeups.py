"""What wake-ups cost those who enqueue: many producers that commit one task at a time, with wake-ups and without."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

from common import empty_queue
from node import node
from producers import Produce, clear, in_transaction
from watched import quiet_queue

PRODUCERS = 64
ROUNDS = 3

EXECUTORS = {"serves another queue": ["--queue", "another"], "runs them": []}
"""The first hears the rings and has nothing to do; the second shows the whole, claims and finishes included."""


async def cost_of_wake_ups(url: str, producers: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Tasks a second with and without, for each kind of executor that listens."""
    async with empty_queue(url):
        pass
    found: list[dict[str, Any]] = []
    for executor, flags in EXECUTORS.items():
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for wake_ups in rates:  # in turns, so that a slow minute of the machine counts for both
                await clear(url)
                rates[wake_ups].append(await rate(url, flags, producers, seconds, wake_ups=wake_ups))
        on, off = median(rates[True]), median(rates[False])
        found.append({"executor": executor, "producers": producers, "with": on, "without": off, "ratio": on / off})
    return found


async def rate(url: str, flags: list[str], producers: int, seconds: float, *, wake_ups: bool) -> float:
    """Committed tasks a second."""
    async with (
        node(url, *flags, *([] if wake_ups else ["--deaf"])),
        quiet_queue(url, wake_ups=wake_ups) as queue,
        AsyncExitStack() as stack,
    ):
        ready = [await stack.enter_async_context(in_transaction(queue, url)) for _ in range(producers)]
        for produce in ready:
            await produce()  # its statements are prepared
        began = time.monotonic()
        counts = await asyncio.gather(*(produced(produce, began + seconds) for produce in ready))
        return sum(counts) / (time.monotonic() - began)


async def produced(produce: Produce, until: float) -> int:
    """How many tasks this one committed."""
    count = 0
    while time.monotonic() < until:
        await produce()
        count += 1
    return count
