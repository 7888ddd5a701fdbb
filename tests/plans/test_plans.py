"""F56: what the hot statements touch is bounded by what they take, whatever else is in the table."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from plans.explain import (
    LEASE,
    LIMIT,
    NOW,
    REGISTERED,
    File,
    Plan,
    Table,
    check,
    check_files,
    endings_of,
    literal,
    nodes_of,
    wanted,
)
from workq._store import Lane
from workq.dialect import Statement


@pytest.mark.parametrize("beside", REGISTERED)
async def test_a_claim_touches_what_it_takes_and_little_more(table: Table, beside: str) -> None:
    """F56: whatever else is in the table, and with whatever statistics."""
    check(await table.plans(table.sql.claim, wanted(REGISTERED[beside])), table.size, index="workq_due")


async def test_a_claim_that_goes_on_at_its_cursor_does_not_walk_what_is_behind_it(table: Table) -> None:
    """F55, F56: in the middle of the due tasks."""
    middle = Lane("big", 0, NOW - timedelta(days=1) + timedelta(milliseconds=table.size / 2), 1)
    params = wanted(REGISTERED["behind all of them"], cursor=[middle])
    check(await table.plans(table.sql.claim, params), table.size, index="workq_due")


async def test_a_search_for_suspects_among_many_others_is_bounded_by_the_names(table: Table) -> None:
    """F56: it may look at the due tasks of its own names, and at nobody else's."""
    params = wanted(["small"], suspects=True, limit=1)
    check(await table.plans(table.sql.claim, params), table.size, index="workq_due")


async def test_a_beat_touches_what_it_extends(table: Table) -> None:
    """F56: 100 leases by their ids."""
    leases = await table.claim(["big", "small"])
    assert len(leases) == min(LIMIT, table.size)
    check(await table.plans(table.sql.extend, {"leases": leases, "lease": LEASE}), table.size, index="workq_pkey")


async def test_a_finish_touches_what_it_ends(table: Table) -> None:
    """F56: 100 successes, and 100 other endings."""
    leases = await table.claim(["big", "small"])
    check(await table.plans(table.sql.succeed, {"leases": leases}), table.size, index="workq_pkey")
    check(await table.plans(table.sql.settle, {"endings": endings_of(leases)}), table.size, index="workq_pkey")


@pytest.mark.parametrize("hot", ["claim", "extend", "succeed", "settle", "look", "complete", "complete_schedule"])
@pytest.mark.parametrize("table", ["empty"], indirect=True)
async def test_no_plan_that_was_made_while_the_table_was_empty_is_kept(table: Table, hot: str) -> None:
    """F56: an executor that waited at an empty table, and then a hundred thousand tasks come at once."""
    statement: Statement = getattr(table.sql, hot)
    no_lease = {"id": 1, "version": 1, "token": 1, "run_at": NOW, "payload": "1"}
    params: dict[str, Any] = {**wanted(["big"]), **no_lease, "leases": [], "endings": [], "ids": [], "series": 1}
    arguments = ", ".join(literal(value) for value in statement.positional(params))
    await table.conn.execute(f"prepare made_early as {statement.text}")
    for _ in range(8):
        await table.conn.execute(f"execute made_early({arguments})")
    await table.conn.execute(
        f"insert into {table.sql.names.table} (queue, name, run_at, payload) "
        "select '', 'big', now() - interval '1 s', '1' from generate_series(1, 100000)"
    )
    text = await table.conn.fetchval(
        f"explain (analyze, buffers, timing off, format json) execute made_early({arguments})"
    )
    top = json.loads(text)[0]["Plan"]
    plan = Plan(list(nodes_of(top)), top["Shared Hit Blocks"] + top["Shared Read Blocks"])
    assert [scan for scan in plan.scans if scan["Node Type"] == "Seq Scan"] == [], plan
    assert plan.buffers < 50 * LIMIT, plan


@pytest.mark.parametrize("beside", REGISTERED)
def test_a_claim_on_sqlite_takes_as_many_steps_beside_any_number_of_others(files: dict[int, File], beside: str) -> None:
    """F56: by the index of due tasks."""
    params = wanted(REGISTERED[beside])
    check_files(files, lambda file: file.sql.claim, dict.fromkeys(files, params))
    for file in files.values():
        assert any("INDEX workq_due" in line for line in file.plan(file.sql.claim, params))


def test_beats_and_finishes_on_sqlite_take_as_many_steps_beside_any_number_of_others(files: dict[int, File]) -> None:
    """F56: by the ids."""
    leases = {size: file.leases() for size, file in files.items()}
    try:
        given = {size: {"leases": held, "lease": LEASE, "now": NOW} for size, held in leases.items()}
        check_files(files, lambda file: file.sql.extend, given)
        check_files(files, lambda file: file.sql.succeed, given)
        endings = {size: {"endings": endings_of(held), "now": NOW} for size, held in leases.items()}
        check_files(files, lambda file: file.sql.settle, endings)
    finally:
        for file in files.values():
            file.conn.execute("update workq set locked_until = null where locked_until is not null")
