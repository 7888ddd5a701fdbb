"""How soon a task starts: from before `enqueue` to the handler's first line, on an executor that is idle.

One task about every 50 ms, all settings at their defaults. Also what an idle executor costs, and what the wake-ups cost
those who enqueue.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import asyncpg

import workq
from common import Kind, address, arguments, empty_queue, kinds, machine, print_result, run, table
from node import node
from producers import Produce, autocommit, clear, in_transaction
from wakeups import PRODUCERS, ROUNDS, cost_of_wake_ups
from work import Log, until

WARM_UP = 10
"""The first tasks, which are not counted: statements are prepared, connections opened."""

Producer: TypeAlias = Callable[[workq.Queue, str], AbstractAsyncContextManager[Produce]]
Delays: TypeAlias = Callable[[int], Awaitable[list[int]]]
"""Wait until so many tasks have run, and return what each waited, in nanoseconds."""

HOW: dict[str, Producer] = {"enqueue(None)": autocommit, "in a transaction": in_transaction}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summary(delays: Sequence[int]) -> dict[str, float]:
    """In milliseconds."""
    ms = [delay / 1e6 for delay in delays]
    return {"samples": len(ms), "p50": quantile(ms, 0.5), "p99": quantile(ms, 0.99), "max": max(ms)}


# -- the time to the handler


@asynccontextmanager
async def elsewhere(queue: workq.Queue, url: str) -> AsyncGenerator[Delays]:
    """An executor in another process."""
    async with node(url, "--keep") as other:

        async def delays(number: int) -> list[int]:
            await other.until_done(number)
            return await other.ask("delays")

        yield delays


@asynccontextmanager
async def here(queue: workq.Queue, url: str) -> AsyncGenerator[Delays]:
    """An executor in the producer's process, on the same queue."""
    log = Log(keeps=True)

    async def delays(number: int) -> list[int]:
        async def reached() -> bool:
            return log.done >= number

        await until(reached)
        return log.delays

    async with workq.Executor(queue, [log.handler()]):
        yield delays


WHERE: dict[str, Callable[[workq.Queue, str], AbstractAsyncContextManager[Delays]]] = {
    "another process": elsewhere,
    "the same process": here,
}


async def pick_up(url: str, where: str, how: str, samples: int) -> dict[str, float]:
    """The delays of so many tasks."""
    async with (
        empty_queue(url) as queue,
        WHERE[where](queue, url) as delays,
        HOW[how](queue, url) as produce,
    ):
        for _ in range(WARM_UP + samples):
            # Not exactly 50 ms: SQLite's file is looked at every 10 ms, and the two would run in step.
            await asyncio.sleep(random.uniform(0.04, 0.06))
            await produce()
        return summary((await delays(WARM_UP + samples))[WARM_UP:])


# -- the cost of an executor that has nothing to do


async def transactions(url: str) -> int | None:
    """How many the PostgreSQL server has counted, all connections together (it counts with a second's delay)."""
    if url.startswith("sqlite"):
        return None
    conn = await asyncpg.connect(url)
    try:
        found: int = await conn.fetchval(
            "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
        )
        return found
    finally:
        await conn.close()


async def idle(url: str, seconds: float) -> dict[str, float | None]:
    """Statements and transactions a second, and the share of a core, of an idle executor's process."""
    async with empty_queue(url), node(url) as other:
        await asyncio.sleep(1)
        counted, before = await transactions(url), await other.ask("cost")
        await asyncio.sleep(seconds)
        counted_then, after = await transactions(url), await other.ask("cost")
    elapsed = after["at"] - before["at"]
    return {
        "seconds": elapsed,
        "statements_per_second": (after["statements"] - before["statements"]) / elapsed,
        "transactions_per_second": None
        if counted is None or counted_then is None
        else (counted_then - counted) / elapsed,
        "core": (after["cpu"] - before["cpu"]) / elapsed,
    }


# -- the command


def measure(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one database."""
    with address(kind) as url:
        facts = machine(url)
        picked_up: list[dict[str, Any]] = []
        for where in WHERE:
            for how in HOW:
                found = run(lambda where=where, how=how: pick_up(url, where, how, options.samples))
                picked_up.append({"executor_in": where, "enqueued": how, **found})
        found_idle = run(lambda: idle(url, options.idle))
        wake_ups = run(lambda: cost_of_wake_ups(url, options.producers, options.seconds, options.rounds))
        run(lambda: clear(url))
    return {"machine": facts, "pick_up_ms": picked_up, "idle": found_idle, "wake_ups": wake_ups}


def text(results: dict[str, dict[str, Any]]) -> str:
    """For people."""
    return "\n\n".join(
        [
            table(
                "From before the enqueue to the handler's first line, in milliseconds:",
                ["database", "executor in", "enqueued", "samples", "p50", "p99", "max"],
                [
                    [kind, *(row[name] for name in ("executor_in", "enqueued", "samples", "p50", "p99", "max"))]
                    for kind, found in results.items()
                    for row in found["pick_up_ms"]
                ],
            ),
            table(
                "An idle executor:",
                ["database", "statements a second", "transactions a second", "% of a core"],
                [
                    [
                        kind,
                        found["idle"]["statements_per_second"],
                        found["idle"]["transactions_per_second"],
                        100 * found["idle"]["core"],
                    ]
                    for kind, found in results.items()
                ],
            ),
            table(
                "Tasks a second of producers that commit each by itself, with wake-ups and without:",
                ["database", "an executor in another process", "with", "without", "ratio"],
                [
                    [kind, row["executor"], round(row["with"]), round(row["without"]), row["ratio"]]
                    for kind, found in results.items()
                    for row in found["wake_ups"]
                ],
            ),
        ]
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=300, help="tasks for each row of the first table")
    parser.add_argument("--idle", type=float, default=10, help="seconds to watch an idle executor")
    parser.add_argument("--producers", type=int, default=PRODUCERS)
    parser.add_argument("--seconds", type=float, default=3, help="for which they produce, each time")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of which the median counts")
    options = parser.parse_args()
    results = {kind: measure(kind, options) for kind in kinds(options)}
    print_result(options, dict(results), text(dict(results)))


if __name__ == "__main__":
    main()
