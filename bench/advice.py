"""What each piece of the README's advice gains: the same rate without and with it, in turns; the medians.

python bench/advice.py [--json] [--database postgres|sqlite] [--repeat 5]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

import aiosqlite
import asyncpg

import workq
from common import Kind, address, arguments, kinds, machine, print_result, run, table
from measure import TABLE, rate
from throughput_workq import Number, emptied, enqueue_many_rate, enqueue_rate, enqueue_tx_rate, execute_rate, noop

TASKS = 20_000
FEW = 2_000
"""Tasks where every one has a commit of its own."""
DEAD = 300_000

Rate: TypeAlias = Callable[[str], Coroutine[Any, Any, float]]


class Advice(NamedTuple):
    """Two ways to do the same."""

    title: str
    kind: Kind | None
    """None: for both databases."""
    without: Rate
    followed: Rate
    loops: bool = False
    """The first way runs on asyncio's own event loop."""


async def one_by_one(url: str) -> float:
    """One producer, every task with a statement of its own."""
    return await enqueue_rate(url, 1, FEW)


async def at_once(url: str) -> float:
    """Sixteen producers in one process."""
    return await enqueue_rate(url, 16, TASKS)


async def in_thousands(url: str) -> float:
    """One producer, a statement for a thousand."""
    return await enqueue_many_rate(url, 1, TASKS)


async def executed(url: str) -> float:
    """Sixteen workers."""
    return await execute_rate(url, 16, TASKS)


async def executed_frozen(url: str) -> float:
    """What lives as long as the program is left out of garbage collections."""
    gc.collect()
    gc.freeze()
    try:
        return await execute_rate(url, 16, TASKS)
    finally:
        gc.unfreeze()


async def not_ahead(url: str) -> float:
    """With claim_ahead=False."""
    return await execute_rate(url, 16, TASKS, claim_ahead=False)


async def durable(url: str) -> float:
    """Transactions that wait for the disk."""
    return await enqueue_tx_rate(url, 4, FEW)


async def hasty(url: str) -> float:
    """Transactions that do not."""
    return await enqueue_tx_rate(f"{url}?synchronous_commit=off", 4, FEW)


async def vacuumed_never(url: str) -> float:
    """Claims beside dead rows: from the beginning, as every executor looks once a second."""
    return await first_claims(url, vacuum=False)


async def vacuumed(url: str) -> float:
    """The same after a VACUUM, which autovacuum does by itself."""
    return await first_claims(url, vacuum=True)


async def first_claims(url: str, *, vacuum: bool) -> float:
    """Starts of an executor until its first task has run, after many other tasks were done."""
    async with emptied(url) as queue:
        conn = await asyncpg.connect(url)
        try:
            await conn.execute(f"alter table {TABLE} set (autovacuum_enabled = off)")
            await conn.execute(
                f"insert into {TABLE} (queue, name, payload, run_at) "
                "select '', 'noop', '{\"number\":1}', now() - interval '1 s' "
                f"from generate_series(1, {DEAD})"
            )
            await conn.execute(f"delete from {TABLE}")
            if vacuum:
                await conn.execute(f"vacuum {TABLE}")

            async def once(_: int) -> None:
                await queue.enqueue(None, noop, Number(1))
                async with workq.Executor(queue, [noop]):
                    await queue.wait(noop)

            return await rate(1, 5, once)
        finally:
            await conn.execute(f"alter table {TABLE} reset (autovacuum_enabled)")
            await conn.close()


async def deferred(url: str) -> float:
    """Four connections whose transactions take SQLite's lock at their first write; a failed one begins again."""
    return await transactions(url, "begin")


async def immediate(url: str) -> float:
    """The same, with the lock taken at once: they wait for each other."""
    return await transactions(url, "begin immediate")


async def transactions(url: str, begin: str) -> float:
    """Transactions that read and then enqueue, a second."""
    async with emptied(url) as queue:
        conns = [await aiosqlite.connect(url.removeprefix("sqlite:///"), isolation_level=None) for _ in range(4)]

        async def once(which: int) -> None:
            conn = conns[which]
            while True:
                try:
                    await conn.execute(begin)
                    await conn.execute_fetchall(f"select count(*) from {TABLE} where name = 'nobody'")
                    await queue.enqueue(conn, noop, Number(1))
                    await conn.execute("commit")
                except aiosqlite.OperationalError:
                    await conn.execute("rollback")
                else:
                    return

        try:
            return await rate(4, FEW // 4, once)
        finally:
            for conn in conns:
                await conn.close()


ADVICE = (
    Advice("enqueue: enqueue_many instead of one by one", None, one_by_one, in_thousands),
    Advice("enqueue: side by side instead of one after the other", None, one_by_one, at_once),
    Advice("execute: uvloop instead of asyncio's loop", None, executed, executed, loops=True),
    Advice("execute: gc.freeze() once the program is loaded", None, executed, executed_frozen),
    Advice("execute: claim_ahead, quick handlers", None, not_ahead, executed),
    Advice("enqueue(tx): synchronous_commit=off in the application's transactions", "postgres", durable, hasty),
    Advice("start to first task: autovacuum has run (300,000 dead rows)", "postgres", vacuumed_never, vacuumed),
    Advice("enqueue(tx), 4 connections: BEGIN IMMEDIATE", "sqlite", deferred, immediate),
)


def measured(url: str, advice: Advice, repeat: int) -> tuple[float, float]:
    """The median rate without and with it."""
    without: list[float] = []
    followed: list[float] = []
    for _ in range(repeat):
        without.append(asyncio.run(advice.without(url)) if advice.loops else run(lambda: advice.without(url)))
        followed.append(run(lambda: advice.followed(url)))
    return statistics.median(without), statistics.median(followed)


def lines(kind: Kind, url: str, options: argparse.Namespace) -> list[list[object]]:
    """One for each piece of advice."""
    rows: list[list[object]] = []
    for advice in ADVICE:
        if advice.kind in (None, kind):
            without, followed = measured(url, advice, options.repeat)
            rows.append([advice.title, without, followed, f"{followed / without:.2f}"])
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs, of which the median is taken (5)")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    texts: list[str] = []
    for kind in kinds(options):
        with address(kind) as url:
            rows = lines(kind, url, options)
            result[kind] = {"machine": machine(url), "advice": rows}
            texts.append(table(f"{kind}: a second", ["", "without", "with", "times"], rows))
    print_result(options, result, "\n\n".join(texts))


if __name__ == "__main__":
    main()
