"""How long a claim takes, whatever else is in the table: the Store's claim, pages of 1 and of 100.

`--rows` stands for the million; the small backlog is a hundredth of it. Each case fills an empty table, gives it the
statistics that autovacuum would have made, and claims page after page as an executor does. What was claimed is finished
before the next claim, outside the measured time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, NamedTuple

import asyncpg

import workq
from common import Kind, address, arguments, empty_queue, kinds, machine, print_result, run, table
from heaps import DUE, FINISHED, HEAPS, SETTLED
from producers import clear, execute
from workq._claim import START, Cursor, next_cursor
from workq._clock import Clock
from workq._store import Lane, Store, Wanted
from workq._task import Claimed
from workq.dialect import Connection, Urgency

SMALL, LEAST = 100, 500
"""The small backlog is this part of the large one, but no less than so many tasks."""
PAGES = {1: 200, 100: 50}
"""Tasks a page, and pages claimed."""
WARM_UP = 10
"""Pages before those: PostgreSQL decides after five executions whether a general plan will do."""
LONGEST = 20.0
"""Seconds after which no further page is claimed, where claims are slow."""
URGENCY = Urgency(timeout=600)


class Case(NamedTuple):
    """What is in the table."""

    title: str
    many_due: bool = False
    """As many due tasks of the name that is claimed as `--rows` says, instead of the small backlog."""
    beside: str | None = None
    """The kind of the other rows, as many as `--rows` says."""
    dead: bool = False
    """As many due rows were there before, and are done; an open snapshot still holds them."""
    cursor: bool = True
    """Each claim goes on where the last one ended."""


CASES = (
    Case("few due"),
    Case("few due, without cursor", cursor=False),
    Case("many due", many_due=True),
    Case("many due, without cursor", many_due=True, cursor=False),
    Case("few due, many in the future", beside="future"),
    Case("few due, many failed", beside="failed"),
    Case("few due, many of another name", beside="foreign"),
    Case("few due, many dead under a snapshot", dead=True),
    Case("few due, many dead under a snapshot, without cursor", dead=True, cursor=False),
)


def few(rows: int) -> int:
    """The size of the small backlog."""
    return max(rows // SMALL, LEAST)


async def take(store: Store, connection: Connection, limit: int, cursor: Cursor) -> tuple[float, list[Claimed]]:
    """One claim. Returns seconds, and the page."""
    wanted = Wanted(
        queue="",
        names=["due", "never enqueued"],
        limit=limit,
        token=1,
        lease=timedelta(seconds=600),
        cursor=[Lane(*lane, *place) for lane, place in cursor.items()],
        schedules=[],
        tokens=[],
        takeover=True,
        suspect=3,
        suspects=False,
        ahead=False,
    )
    began = time.perf_counter()
    page = await store.claim(connection, wanted, URGENCY)
    return time.perf_counter() - began, page


async def claims(url: str, limit: int, pages: int, cursor: Cursor, *, moves: bool) -> list[float]:
    """Seconds of each claim."""
    async with workq.connect(url) as db:
        store, connection = Store(db, Clock()), db.connection("bench")
        times: list[float] = []
        until = time.perf_counter() + LONGEST
        while len(times) < pages and (len(times) <= WARM_UP or time.perf_counter() < until):
            seconds, page = await take(store, connection, limit, cursor)
            await store.succeed(connection, [task.lease for task in page], URGENCY)
            times.append(seconds)
            if moves:
                cursor = next_cursor(cursor, page, limit)
        await connection.close()
    return times[min(WARM_UP, pages // 2) :]


@asynccontextmanager
async def snapshot(url: str) -> AsyncGenerator[None]:
    """A transaction that can still see all that is there now."""
    conn = await asyncpg.connect(url)
    try:
        await conn.execute("begin isolation level repeatable read")
        await conn.execute("select 1 from workq limit 1")
        yield
    finally:
        await conn.close()


async def measured(kind: Kind, url: str, case: Case, rows: int) -> list[dict[str, Any]]:
    """One case: a row for each size of page."""
    heaps, found = HEAPS[kind], list[dict[str, Any]]()
    due = rows if case.many_due else few(rows)
    await clear(url)
    await execute(url, heaps["due"].format(rows=due))
    if case.beside is not None:
        await execute(url, heaps[case.beside].format(rows=rows))
    if case.dead:
        await execute(url, heaps["done"].format(rows=rows))
    await execute(url, SETTLED[kind])
    async with snapshot(url) if case.dead else nullcontext():
        if case.dead:
            await execute(url, *FINISHED, SETTLED[kind])
        for limit, pages in PAGES.items():
            # As if the executor had just run what is dead now.
            start = {("due", 0): (datetime.now(UTC) - DUE, 0)} if case.dead and case.cursor else START
            claimed = min(WARM_UP + pages, due // 2 // limit)  # never so many that a page would be short
            times = await claims(url, limit, claimed, start, moves=case.cursor)
            found.append({"case": case.title, "page": limit, "claims": len(times), "ms": 1e3 * median(times)})
    return found


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each time, how many times that of few due rows it is."""
    base = {row["page"]: row["ms"] for row in rows if row["case"] == CASES[0].title}
    return [row | {"ratio": row["ms"] / base[row["page"]]} for row in rows]


def measure(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """All cases, on one database."""

    async def migrated(url: str) -> None:
        async with empty_queue(url):
            pass

    with address(kind) as url:
        run(lambda: migrated(url))
        rows: list[dict[str, Any]] = []
        for case in CASES:
            if kind == "postgres" or not case.dead:
                rows += run(lambda case=case: measured(kind, url, case, options.rows))
        run(lambda: clear(url))
        return {"machine": machine(url), "rows": options.rows, "claims": with_ratios(rows)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of a large table")
    options = parser.parse_args()
    results = {kind: measure(kind, options) for kind in kinds(options)}
    text = table(
        f"A claim's median time in milliseconds; many: {options.rows:,}, few: {few(options.rows):,}",
        ["in the table", "database", "page", "claims", "ms", "ratio"],
        [
            [row["case"], kind, row["page"], row["claims"], row["ms"], row["ratio"]]
            for kind, found in results.items()
            for row in found["claims"]
        ],
    )
    print_result(options, dict(results), text)


if __name__ == "__main__":
    main()
