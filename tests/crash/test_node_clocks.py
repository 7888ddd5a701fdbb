"""Processes whose wall clock is ten minutes off (F46), by libfaketime; their monotonic clock is right.

On PostgreSQL the database's clock decides, whatever a node's says. On SQLite the machine's does, and all processes are
on one machine: they may be wrong together. A process whose clock is ahead of the others' by more than a lease (in a
container with a time of its own, say) would take their tasks over: that is not promised.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import workq
from crash.names import name_of
from faults.nodes import Nodes, nodes_on
from records import record
from support import Database, PostgresDatabase, SQLiteDatabase, eventually

LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
LEASE = 3.0
LONG = 4.5
"""Seconds that a task takes: it lives by its beats."""
DELAY = 1.5


@pytest.fixture
def faketime() -> Path:
    for pattern in LIBRARIES:
        for found in Path("/").glob(pattern.removeprefix("/")):
            return found
    pytest.skip("there is no libfaketime here (Debian: apt-get install libfaketime)")


def off(faketime: Path, minutes: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong."""
    settings = {"FAKETIME": f"{minutes:+d}m", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"}
    return {"LD_PRELOAD": str(faketime), **settings}


async def judged(database: Database, nodes: Nodes, title: str, took: float) -> list[int]:
    """No task was without an end, started twice or taken over. Returns which were enqueued."""
    ids = [line.id for line in nodes.journal.lines("enqueued")]
    starts, ends = nodes.journal.times("start"), nodes.journal.times("completed")
    taken = len(nodes.journal.lines("lost")) + sum(starts[id] - 1 for id in starts)
    broken = {"no loss": sum(ends[id] == 0 for id in ids), "one holder": taken}
    record("crash", await name_of(database), title, tasks=len(ids), took=took, violations=broken)
    assert broken == {"no loss": 0, "one holder": 0}
    return ids


async def test_nodes_ten_minutes_off_start_nothing_early_and_steal_nothing(
    postgres: PostgresDatabase, tmp_path: Path, faketime: Path
) -> None:
    """F46: one holder; two nodes each at -10, 0 and +10 minutes, which enqueue for at once and for later."""
    began, skews = time.monotonic(), (-10, 0, 10)
    async with postgres.open() as db:
        await workq.Queue(db).migrate()
    before = time.time()
    with nodes_on(postgres, tmp_path) as nodes:
        options: dict[str, Any] = {"workers": 6, "lease": LEASE, "poll": 0.1, "takes": LONG}
        for minutes in skews:
            await nodes.start(environment=off(faketime, minutes), produce=4, schedules=1, **options)
        for minutes in skews:
            await nodes.start(environment=off(faketime, minutes), produce=8, delay=DELAY, schedules=1, **options)
        rows = list[tuple[int, float, bool]]()

        async def all_there() -> bool:
            rows[:] = [
                (id, float(due), bool(later))
                for id, due, later in await postgres.rows(
                    "select id, extract(epoch from run_at), run_at > created_at from {table} where name = 'work'"
                )
            ]
            return sum(later for *_, later in rows) == 24

        await eventually(all_there)
        ticks = await postgres.rows("select extract(epoch from run_at) from {table} where name = 'tick'")
        after = time.time()
        await nodes.journal.until("completed", 36, timeout=30)
    wrong = [line.wall - line.monotonic for line in nodes.journal.lines("ready")]
    real = time.time() - time.monotonic()
    due = {id: at for id, at, later in rows if later}
    early = [line for line in nodes.journal.lines("start") if line.monotonic + real < due.get(line.id, 0)]
    enqueued = await judged(postgres, nodes, "nodes whose clocks are ten minutes off", time.monotonic() - began)
    assert len(enqueued) == 36
    assert sorted(round((seconds - real) / 60) for seconds in wrong) == sorted(skews * 2)
    assert early == []
    ((tick,),) = ticks
    assert before <= float(tick) - 3600 <= after


async def test_processes_that_share_a_wrong_clock_do_not_notice(
    sqlite: SQLiteDatabase, tmp_path: Path, faketime: Path
) -> None:
    """F46: on SQLite; nothing is early and nothing is taken over."""
    began = time.monotonic()
    async with sqlite.open() as db:
        await workq.Queue(db).migrate()
    with nodes_on(sqlite, tmp_path) as nodes:
        options: dict[str, Any] = {
            "workers": 6,
            "lease": LEASE,
            "poll": 0.1,
            "takes": LONG,
            "environment": off(faketime, 10),
        }
        await nodes.start(produce=4, **options)
        await nodes.start(produce=8, delay=DELAY, **options)
        due = dict[int, float]()

        async def all_there() -> bool:
            rows = await sqlite.rows("select id, run_at from {table} where run_at > created_at")
            due.update((id, micros / 1e6) for id, micros in rows)
            return len(due) == 8

        await eventually(all_there)
        await nodes.journal.until("completed", 12, timeout=30)
        early = [line for line in nodes.journal.lines("start") if line.wall < due.get(line.id, 0)]
    assert (
        len(await judged(sqlite, nodes, "the clock of all processes is ten minutes ahead", time.monotonic() - began))
        == 12
    )
    assert early == []
