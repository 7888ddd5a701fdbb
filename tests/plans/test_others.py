"""F56: the statements beside the claim, the beat and the finish touch what they take and little more, too."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from plans.explain import LIMIT, NOW, File, Plan, Table, check, wanted
from workq.dialect import Statement, names, postgres

FAILED = 2_000
ITEM = ("", "small", "1", None, 0, None, timedelta(0))

# Those that look for rows, by what they look for. Name of the statement: its parameters, and the index.
BY_ID: dict[str, dict[str, Any]] = {
    "look": {"ids": list(range(5, 5 + LIMIT))},
    "complete": {"version": 0, "token": 1},
    "complete_schedule": {"version": 0, "token": 1, "run_at": NOW, "payload": "1"},
    "retry": {"run_at": None, "payload": None},
    "reschedule": {"run_at": NOW},
    "disable": {},
    "delete": {},
    "get": {},
}
NOTHING: dict[str, Any] = {"name": None, "queue": None, "key": None, "state": None, "limit": LIMIT}
FIND: dict[str, dict[str, Any]] = {
    "first page": {"after": 0},
    "a later page": {"after": 900},
    "waiting ones": {"after": 0, "state": "waiting"},
    "of a common name": {"after": 0, "name": "big"},
}
INSERTS: dict[str, dict[str, Any]] = {
    "insert_one": dict(zip(("queue", "name", "payload", "headers", "priority", "run_at", "delay"), ITEM, strict=True)),
    "insert_alike": {"queue": "", "name": "small", "payloads": ["1"] * LIMIT, "headers": None, "priority": 0}
    | {"run_at": None, "delay": timedelta(0)},
    "insert": {"items": [ITEM] * LIMIT},
    "insert_keyed": {"items": [(*ITEM, f"key {n}") for n in range(LIMIT)]},
    "insert_schedules": {"items": [("", "small", f"key {n}", "1", 0, NOW) for n in range(LIMIT)]},
}
# Which rows are in the way is told by an index, or there would be no ON CONFLICT.
ARBITERS = {"insert_keyed": "workq_key", "insert_schedules": "workq_scheduled"}
LEFT: dict[str, dict[str, Any]] = {
    "all, and there are some": {"names": None},
    "of a name with many later ones": {"names": ["later"]},
    "of a name that is not there": {"names": ["never enqueued"]},
}
ELSEWHERE = {"claim", "extend", "succeed", "settle"}  # test_plans.py
OF_NO_TASK = {"schema_exists", "table_exists", "read_version", "write_version", "now", "ring"}


def test_every_statement_is_looked_at() -> None:
    """A new one has to be put into one of these lists."""
    here = {*BY_ID, *INSERTS, "find", "find_failed", "retry_all", "left"}
    sql = postgres(names("public", "workq"))
    there = {field.name for field in fields(sql) if isinstance(getattr(sql, field.name), Statement)}
    assert there == here | ELSEWHERE | OF_NO_TASK


async def add_failed(table: Table, number: int = FAILED) -> None:
    """The last rows of all, with keys."""
    await table.conn.execute(
        f"insert into {table.sql.names.table} (queue, name, key, run_at, payload, failed_at, error) "
        f"select '', 'fails', 'key ' || n, now(), '1', now() - n * interval '1 ms', 'an error' "
        f"from generate_series(1, {number}) n"
    )


def arbiters(plan: Plan) -> set[str]:
    """The indexes that ON CONFLICT asks."""
    return {name for node in plan.nodes for name in node.get("Conflict Arbiter Indexes", ())}


@pytest.mark.parametrize("name", INSERTS)
async def test_an_insert_reads_nothing_of_the_table(table: Table, name: str) -> None:
    for plan in await table.plans(getattr(table.sql, name), INSERTS[name]):
        assert plan.scans == [], plan
        assert arbiters(plan) == {ARBITERS[name]} if name in ARBITERS else arbiters(plan) == set()
        assert plan.buffers < 100 * LIMIT, plan


@pytest.mark.parametrize("name", BY_ID)
async def test_what_is_said_of_one_task_is_found_by_its_id(table: Table, name: str) -> None:
    params = {"id": 7, **BY_ID[name]}
    plans = await table.plans(getattr(table.sql, name), params)
    check(plans, table.size, index="workq_pkey", or_index="workq_failed_id" if name == "retry" else "")


@pytest.mark.parametrize("table", ["empty", "small", "million"], indirect=True)
@pytest.mark.parametrize("what", FIND)
async def test_a_page_of_find_is_read_in_the_order_of_the_ids(table: Table, what: str) -> None:
    check(await table.plans(table.sql.find, NOTHING | FIND[what]), table.size, index="workq_pkey")


@pytest.mark.parametrize("what", LEFT)
async def test_a_look_of_wait_touches_one_row_of_each_lane(table: Table, what: str) -> None:
    """A row of each name and priority, that is; with a million later ones beside, that are not due."""
    params = LEFT[what] | {"schedules": [("", "small", "a schedule")], "limit": 1}
    check(await table.plans(table.sql.left, params), table.size, index="workq_due")


async def test_a_look_of_wait_beside_future_tasks_only(table: Table) -> None:
    """What a drained queue looks like: nothing is due, and much will be."""
    await table.conn.execute(f"delete from {table.sql.names.table} where name = 'small'")
    params = {"names": ["later", "small"], "schedules": [], "limit": 1}
    check(await table.plans(table.sql.left, params), table.size, index="workq_due")


@pytest.mark.parametrize("table", ["empty", "small", "million"], indirect=True)
async def test_retry_all_takes_failed_tasks_by_their_index_and_ranks_them_once(table: Table) -> None:
    """With keys, of which only the oldest goes on. Asked one by one, 1,000 of 100,000 took 7 s, of more too long."""
    await add_failed(table)
    params = {"name": None, "queue": None, "error_like": "%error%", "limit": LIMIT}
    for plan in await table.plans(table.sql.retry_all, params):
        assert plan.rows <= 4 * FAILED + 4 * LIMIT, plan
        if table.size >= 10_000:
            assert [scan for scan in plan.scans if scan["Node Type"] == "Seq Scan"] == [], plan
            assert {"workq_failed", "workq_key"} <= {node.get("Index Name") for node in plan.nodes}, plan


def file_params(name: str) -> dict[str, Any]:
    """As above, with what SQLite binds beside."""
    common = {"now": NOW, "id": 7, "after": 0, "names": ["later", "never enqueued"], "schedules": [], **NOTHING}
    return wanted(["small"]) | common | BY_ID.get(name, {}) | INSERTS.get(name, {})


@pytest.mark.parametrize("name", [*BY_ID, "find", "left", *INSERTS])
def test_on_sqlite_they_take_as_many_steps_beside_any_number_of_others(files: dict[int, File], name: str) -> None:
    """By the same indexes."""
    steps: list[int] = []
    for size, file in files.items():
        statement: Statement = getattr(file.sql, name)
        lines = file.plan(statement, file_params(name))
        assert [line for line in lines if re.match(r"SCAN (TABLE )?(workq|w|x|t)\b(?!.* USING)", line)] == [], lines
        if size:
            steps.append(file.ticks(statement, file_params(name)))
    assert steps[-1] <= 1.2 * steps[0] + 5, steps


@pytest.mark.parametrize("table", ["empty", "small", "million"], indirect=True)
async def test_failed_tasks_are_found_by_their_index(table: Table) -> None:
    """Though all of them, 2 % of the table, have higher ids than the others; and a page is ordered by the ids."""
    await add_failed(table, 20 * FAILED)
    await table.conn.execute(f"analyze {table.sql.names.table}")
    for plan in await table.plans(table.sql.find_failed, {"after": 0, **NOTHING}):
        assert plan.rows <= 40 * FAILED + LIMIT, plan
