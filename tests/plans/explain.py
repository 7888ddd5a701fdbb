"""What the planners of both databases say, of tables with whatever there may be beside the tasks one looks for."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import asyncpg

from workq._ending import Settled
from workq._store import Wanted
from workq._task import Lease
from workq.dialect import Statement, Statements, names, postgres, sqlite
from workq_aiosqlite._bind import bound

LIMIT = 100
MILLION = 1_000_000
LEASE = timedelta(seconds=30)
NOW = datetime.now(UTC)

# Name: rows of each kind, and are there statistics of them?
TABLES = {"empty": (0, False), "small": (1_000, True), "filled_at_once": (100_000, False), "million": (MILLION, True)}

# What an executor has registered, and so what else is in the table beside it: see `fill`.
REGISTERED = {
    "beside tasks of names nobody registered": ["small"],
    "among due tasks": ["big", "small"],
    "behind future tasks of a higher priority": ["later", "small"],
    "behind all of them": ["big", "later", "small", "never enqueued"],
}


class Plan(NamedTuple):
    """What EXPLAIN (ANALYZE, BUFFERS) says of one execution."""

    nodes: list[dict[str, Any]]
    buffers: int

    @property
    def scans(self) -> list[dict[str, Any]]:
        """The nodes that read the table."""
        return [node for node in self.nodes if node.get("Relation Name") == "workq" and "Scan" in node["Node Type"]]

    @property
    def rows(self) -> float:
        """Rows of the table that were looked at, taken or not."""
        return sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0))
            * node["Actual Loops"]
            for node in self.scans
        )

    @property
    def sorted(self) -> float:
        """Rows that went into sorts."""
        return sum(
            below["Actual Rows"] * below["Actual Loops"]
            for node in self.nodes
            if "Sort" in node["Node Type"]
            for below in node["Plans"]
        )

    def __repr__(self) -> str:
        return "\n".join(
            f"{node['Node Type']} {node.get('Index Name', node.get('Relation Name', ''))}: {node['Actual Rows']} rows, "
            f"{node['Actual Loops']} times"
            for node in self.nodes
        )


def nodes_of(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's nodes, from the top."""
    yield node
    for below in node.get("Plans", ()):
        yield from nodes_of(below)


def literal(value: object) -> str:
    """A value as EXECUTE takes it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case list() | tuple():
            items = cast("Sequence[object]", value)
            return literal("{" + ",".join(element(item) for item in items) + "}")
        case timedelta():
            return literal(f"{value.total_seconds()} s")
        case datetime():
            return literal(value.isoformat())
        case _:
            return "'" + str(value).replace("'", "''") + "'"


def element(value: object) -> str:
    """A value inside an array's text."""
    if value is None:
        return "null"
    if isinstance(value, bool | int):
        return literal(value)
    text = literal(value)[1:-1].replace("''", "'")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Table(NamedTuple):
    """A filled table, and a connection in a transaction that is rolled back."""

    conn: asyncpg.Connection[Any]
    sql: Statements
    size: int

    async def claim(self, registered: list[str]) -> list[Lease]:
        """Really claim, inside the transaction."""
        rows = await self.conn.fetch(self.sql.claim.text, *self.sql.claim.positional(wanted(registered)))
        return [Lease(row[0], row[1], 1) for row in rows]

    async def plans(self, statement: Statement, params: dict[str, Any]) -> list[Plan]:
        """The plans of eight executions: PostgreSQL decides after five whether a general one will do."""
        arguments = ", ".join(literal(value) for value in statement.positional({"series": 1, **params}))
        found: list[Plan] = []
        await self.conn.execute(f"prepare planned as {statement.text}")
        for _ in range(8):
            await self.conn.execute("savepoint before")
            text = await self.conn.fetchval(
                f"explain (analyze, buffers, timing off, format json) execute planned({arguments})"
            )
            await self.conn.execute("rollback to savepoint before")
            top = json.loads(text)[0]["Plan"]
            found.append(Plan(list(nodes_of(top)), top["Shared Hit Blocks"] + top["Shared Read Blocks"]))
        await self.conn.execute("deallocate planned")
        return found


def wanted(registered: list[str], **others: Any) -> dict[str, Any]:
    """The parameters of a claim."""
    asked = Wanted(
        queue="",
        names=registered,
        limit=LIMIT,
        token=1,
        lease=LEASE,
        cursor=[],
        schedules=[("small", "a schedule")],
        tokens=[],
        takeover=True,
        suspect=3,
        suspects=False,
        ahead=False,
    )
    return asked._asdict() | {"node": "here:1", "now": NOW, "series": 1} | others


def endings_of(leases: list[Lease]) -> list[tuple[object, ...]]:
    """Failed runs, a retry, and a schedule that moves on."""
    each = [
        Settled(failed=True, attempt=1, error='of "its" own, {surely}'),
        Settled(delay=timedelta(seconds=30), attempt=1, error="again"),
        Settled(run_at=NOW, payload='{"n": 2}'),
    ]
    return [(*lease, *each[place % 3]) for place, lease in enumerate(leases)]


async def fill(conn: asyncpg.Connection[Any], schema: str, size: int, *, statistics: bool) -> None:
    """As many due tasks, and as many future ones of a higher priority; a few others in between."""
    await conn.execute(f"create schema {schema}")
    sql = postgres(names(schema, "workq"))
    for text in sql.migrations[0]:
        await conn.execute(text)
    table = sql.names.table
    if not statistics:
        await conn.execute(f"alter table {table} set (autovacuum_enabled = off)")
        await conn.execute(f"vacuum analyze {table}")
    for name, priority, first, number in kinds(size):
        await conn.execute(
            f"insert into {table} (queue, name, priority, run_at, payload) "
            f"select '', '{name}', {priority}, now() + {first} * interval '1 s' + n * interval '1 ms', '1' "
            f"from generate_series(1, {number}) n"
        )
    if statistics:
        await conn.execute(f"vacuum analyze {table}")


def kinds(size: int) -> list[tuple[str, int, int, int]]:
    """Name, priority, seconds until the first is due, number."""
    return [("big", 0, -86_400, size), ("later", -1, 86_400, size), ("small", 0, -3_600, min(size, 2 * LIMIT))]


def check(plans: list[Plan], size: int, *, index: str, or_index: str = "") -> None:
    """Each execution touched what it took and little more."""
    for plan in plans:
        assert plan.buffers < 50 * LIMIT, plan
        assert plan.rows < 50 * LIMIT, plan
        if size < 10_000:
            continue  # here the planner may well read the whole table, or sort it
        assert plan.rows <= 4 * LIMIT, plan
        assert plan.sorted <= LIMIT, plan
        assert [scan for scan in plan.scans if scan["Node Type"] == "Seq Scan"] == [], plan
        assert {index, or_index} & {node.get("Index Name") for node in plan.nodes}, plan


TICK = 100
"""Steps of SQLite's machine for each call of the progress handler."""


class File:
    """A filled file."""

    def __init__(self, path: Path, size: int, *, statistics: bool) -> None:
        self.conn = sqlite3.connect(path, isolation_level=None)
        self.sql = sqlite(names("main", "workq"))
        for text in self.sql.migrations[0]:
            self.conn.execute(text)
        now = int(NOW.timestamp() * 1e6)
        self.conn.execute("begin")
        for name, priority, first, number in kinds(size):
            self.conn.execute(
                "with recursive n(n) as (select 1 union all select n + 1 from n where n < ?) "
                "insert into workq (queue, name, priority, run_at, payload, created_at) "
                "select '', ?, ?, ? + n * 1000, '1', 0 from n where ?",
                (number, name, priority, now + first * 1_000_000, number > 0),
            )
        self.conn.execute("commit")
        if statistics:
            self.conn.execute("analyze")

    def plan(self, statement: Statement, params: dict[str, Any]) -> list[str]:
        """The lines of EXPLAIN QUERY PLAN."""
        values = {"ids": "[]", **bound(params)}
        parts = [part for part in (statement.page, statement.text) if part]
        return [row[3] for part in parts for row in self.conn.execute(f"explain query plan {part}", values)]

    def rows(self, statement: Statement, params: dict[str, Any]) -> list[Any]:
        """Carry it out, both parts if there are two."""
        if not statement.page:
            return self.conn.execute(statement.text, bound(params)).fetchall()
        parts = self.conn.execute(statement.page, bound(params)).fetchall()
        rows = [row for (part,) in parts for row in json.loads(part)]
        self.conn.execute(statement.text, {**bound(params), "ids": json.dumps([row[0] for row in rows])})
        return rows

    def ticks(self, statement: Statement, params: dict[str, Any]) -> int:
        """How long it takes, in steps and not in seconds; undone afterwards."""
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return 0

        self.conn.execute("begin immediate")
        self.conn.set_progress_handler(tick, TICK)
        self.rows(statement, params)
        self.conn.set_progress_handler(None, 0)
        self.conn.execute("rollback")
        return count

    def leases(self) -> list[Lease]:
        """Really claim."""
        rows = self.rows(self.sql.claim, wanted(["big", "small"]))
        return [Lease(row[0], row[1], 1) for row in rows]


def check_files(files: dict[int, File], what: Callable[[File], Statement], params: dict[int, dict[str, Any]]) -> None:
    """No table is walked through, and a file a hundred times larger takes no more steps."""
    for size, file in files.items():
        lines = file.plan(what(file), params[size])
        # The aliases of the table in our statements.
        assert [line for line in lines if re.match(r"SCAN (TABLE )?(workq|w|x|t)\b", line)] == []
        assert [line for line in lines if "SEARCH" in line] != []
    small, large = (file.ticks(what(file), params[size]) for size, file in files.items() if size)
    assert small > 3
    assert large <= 1.2 * small + 3
