"""Releases with different schemas beside each other (F54), and the schema changed under running programs (F25).

There is one version so far, so the next release is this one with another step. Promised: where that step says that
version 1 may go on beside it (expand), both releases serve one table, in any order of starting and stopping; where it
does not, code of version 1 refuses to start. Code that is running already is not stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import workq
from crash.names import name_of
from crash.releases import next_release
from faults.flow import flow
from faults.nodes import Nodes, nodes_on
from records import record
from support import Database, PostgresDatabase, eventually

EXPAND = (
    "alter table {table} add column region text",
    "alter table {table} add column weight integer not null default 1",
)


async def version(database: Database) -> object:
    table = database.table.replace("workq", "workq_version")
    ((number,),) = await database.rows(f"select version from {table}")
    return number


async def test_this_release_and_the_next_serve_one_table_while_it_is_migrated(
    database: Database, nodes: Nodes, tmp_path: Path
) -> None:
    """F54: no loss, fence: old, then old and new, then an old one that starts after the migration."""
    began, newer = time.monotonic(), next_release(tmp_path / "next", works_from=1)
    options: dict[str, Any] = {"workers": 4, "poll": 0.1, "lease": 30, "takes": 0.02}
    old = await nodes.start("--migrate", produce=300, **options)
    await nodes.journal.until("completed", 20)
    new = nodes.begin("--migrate", environment=newer, produce=200, **options)
    await nodes.journal.until("completed", 10, new.pid)
    assert await version(database) == 2
    again = await nodes.start("--migrate", produce=100, **options)
    await nodes.journal.until("completed", 10, again.pid)
    assert await version(database) == 2
    await nodes.journal.until("completed", 600, timeout=60)
    printed = [await node.end() for node in (old, new, again)]
    enqueued, completed = nodes.journal.times("enqueued"), nodes.journal.times("completed")
    violations = {"no loss": len(enqueued - completed), "fence": sum(times > 1 for times in completed.values())}
    record(
        "crash",
        await name_of(database),
        "this release and the next on one table",
        tasks=len(enqueued),
        took=time.monotonic() - began,
        violations=violations,
    )
    assert violations == {"no loss": 0, "fence": 0}
    assert len(enqueued) == 600
    assert nodes.journal.lines("failed") == []
    assert printed == ["", "", ""]


@pytest.mark.parametrize("works_from", [None, 2])
async def test_code_that_is_too_old_for_the_table_refuses_to_start_and_says_what_to_do(
    sqlite: Database, tmp_path: Path, works_from: int | None
) -> None:
    """F54: and migrate() does not take the table back; the program that was running goes on."""

    @workq.handler("work")
    async def work(task: workq.Task[object]) -> None: ...

    newer = next_release(tmp_path / "next", works_from=works_from)
    with nodes_on(sqlite, tmp_path) as nodes:
        old = await nodes.start("--migrate", poll=0.1)
        await nodes.start("--migrate", environment=newer, poll=0.1)
        async with sqlite.open() as db:
            queue = workq.Queue(db)
            for attempt in (queue.migrate, workq.Executor(queue, [work]).start):
                with pytest.raises(workq.SchemaError, match=r"version 2, .* knows only 1: install the newer workq"):
                    await attempt()
            assert await version(sqlite) == 2
            await queue.enqueue_many(None, [workq.NewTask("work", number) for number in range(200)])
        await nodes.journal.until("completed", 200)
        assert nodes.journal.lines("completed", old.pid) != []
        assert nodes.journal.lines("failed") == []


async def test_a_column_that_is_added_under_load_fails_no_task(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F25: statements that are prepared, or planned, go on; so does the producer."""
    began = time.monotonic()
    async with flow(database, database.url, lease=30) as tasks:
        for step in EXPAND:
            await tasks.runs(since=time.monotonic())
            await database.rows(step)
            await tasks.runs(since=time.monotonic())
        await tasks.end()
        await eventually(tasks.healthy)
    completed = Counter(tasks.completed())
    record(
        "crash",
        await name_of(database),
        "columns are added under load",
        tasks=len(tasks.enqueued),
        took=time.monotonic() - began,
        violations={"no loss": len(tasks.enqueued - set(completed)), "fence": sum(completed.values()) - len(completed)},
    )
    assert tasks.failures == []
    assert completed == dict.fromkeys(tasks.enqueued, 1)
    assert [event for event in tasks.events if event.kind == "failed"] == []
    assert [entry.getMessage() for entry in caplog.records if entry.name == "workq" and entry.levelname != "INFO"] == []


async def test_a_column_that_changes_its_type_under_load_fails_no_task(postgres: PostgresDatabase) -> None:
    """F25: "cached plan must not change result type" is for the driver and the loops to get over."""
    async with flow(postgres, postgres.url, postgres.url, lease=30) as tasks:
        for kind in ("integer", "bigint", "smallint"):
            await tasks.runs(since=time.monotonic())
            await postgres.rows(f"alter table {{table}} alter column priority type {kind}")
            await tasks.runs(since=time.monotonic())
        await tasks.end()
        await eventually(tasks.healthy)
    assert tasks.failures == []
    assert Counter(tasks.completed()) == dict.fromkeys(tasks.enqueued, 1)
    assert [event for event in tasks.events if event.kind == "failed"] == []
