"""Real processes: together they run everything once, and what one leaves behind the others take over."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import workq
from faults.nodes import Nodes, nodes_on, program
from support import SOON, Database, SQLiteDatabase, eventually

LEASE, POLL = 1.5, 0.2
TAKEOVER = LEASE + POLL + 1
LEAVER = Path(__file__).with_name("leaver.py")


def many(number: int) -> list[workq.NewTask]:
    return [workq.NewTask("work", n) for n in range(number)]


def size_of(file: Path) -> int:
    return file.stat().st_size


async def is_empty(database: Database) -> bool:
    return await database.rows("select id from {table} limit 1") == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_two_processes_run_every_task_exactly_once(
    database: Database, queue: workq.Queue, nodes: Nodes, number: int
) -> None:
    """F12: 0 second starts."""
    one, other = nodes.begin(poll=0.05, takes=0.001), nodes.begin(poll=0.05, takes=0.001)
    await nodes.journal.until("ready", 2)
    ids = await queue.enqueue_many(None, many(number))
    await eventually(lambda: is_empty(database), timeout=SOON + number / 100)
    assert [await one.end(), await other.end()] == ["", ""]
    once = dict.fromkeys(ids, 1)
    assert nodes.journal.times("start") == once
    assert nodes.journal.times("end") == once
    assert nodes.journal.times("completed") == once
    assert {line.pid for line in nodes.journal.lines("start")} == {one.pid, other.pid}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_processes_that_produce_and_run_at_once_never_see_a_locked_file(
    sqlite: SQLiteDatabase, tmp_path: Path, number: int
) -> None:
    """F12, F28: four processes on one file, nothing runs twice and no lock error comes to the surface."""
    async with sqlite.open() as db:
        await workq.Queue(db).migrate()
    with nodes_on(sqlite, tmp_path) as nodes:
        running = [nodes.begin(produce=number, poll=0.05) for _ in range(4)]
        await nodes.journal.until("completed", 4 * number, timeout=SOON + number / 20)
        assert [await node.end() for node in running] == [""] * 4
        assert await is_empty(sqlite)
        assert set(nodes.journal.times("start").values()) == {1}
        assert len(nodes.journal.times("start")) == 4 * number


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "rounds"), [(16, 1), pytest.param(100, 50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_the_tasks_of_a_killed_process_start_elsewhere_when_their_leases_end_and_not_before(
    database: Database, queue: workq.Queue, nodes: Nodes, number: int, rounds: int
) -> None:
    """F01, F02: all of them, within the takeover bound."""
    journal = nodes.journal
    for _ in range(rounds):
        victim = await nodes.start(workers=number, lease=LEASE, poll=POLL, takes=600)
        ids = await queue.enqueue_many(None, many(number))
        await journal.until("start", number, victim.pid)
        heir = await nodes.start(workers=number, lease=LEASE, poll=POLL, takes=600)

        victim.kill()
        killed = time.monotonic()
        held = await queue.find(limit=number)
        ends = {row.id: row.locked_until.timestamp() for row in held if row.locked_until is not None}
        assert {row.node is not None and row.node.rpartition(":")[2] for row in held} == {str(victim.pid)}
        assert set(ends) == set(ids)

        await journal.until("start", number, heir.pid)
        starts = journal.lines("start", heir.pid)
        assert Counter(line.id for line in starts) == dict.fromkeys(ids, 1)
        assert max(line.monotonic for line in starts) - killed < TAKEOVER
        assert [line.id for line in starts if line.wall <= ends[line.id]] == []
        assert {row.lost for row in await queue.find(limit=number)} == {1}
        heir.kill()
        await database.rows("delete from {table}")


async def test_a_process_that_stood_still_changes_nothing_of_what_others_did_and_goes_on_working(
    database: Database, queue: workq.Queue, nodes: Nodes
) -> None:
    """F09: fence. It was stopped for three leases, and its handlers end right after it goes on."""
    lease, journal = 0.9, nodes.journal
    frozen = await nodes.start(lease=lease, poll=POLL, takes=1)
    ids = await queue.enqueue_many(None, many(4))
    await journal.until("start", 4, frozen.pid)
    frozen.freeze()
    stood_still = asyncio.create_task(asyncio.sleep(3 * lease))
    heir = await nodes.start(lease=lease, poll=POLL, takes=3.5)
    await journal.until("start", 4, heir.pid)
    await stood_still
    fences = "select id, version, locked_by from {table} order by id"
    before = await database.rows(fences)
    assert len(before) == 4

    frozen.thaw()
    await journal.until("lost", 4, frozen.pid)
    assert await database.rows(fences) == before
    await journal.until("completed", 4, heir.pid)
    assert journal.times("completed") == dict.fromkeys(ids, 1)

    await heir.end()
    another = await queue.enqueue(None, "work", 1)
    assert another is not None
    await journal.until("completed", 1, frozen.pid)
    assert [line.id for line in journal.lines("completed", frozen.pid)] == [another]


def made_within(rows: list[workq.TaskRow], before: float, after: float) -> bool:
    return all(before <= row.run_at.timestamp() - 3600 <= after for row in rows)


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_sixteen_nodes_that_start_at_once_make_one_table_and_one_row_for_each_schedule(
    database: Database, rounds: int
) -> None:
    """F16, F50: nobody fails, and the first run is when one node alone would have put it."""

    @workq.handler("tick")
    async def tick(task: workq.Task) -> None: ...

    async def start(stack: AsyncExitStack) -> workq.Queue:
        queue = workq.Queue(await stack.enter_async_context(database.open(pool_size=5)))
        await queue.migrate()
        schedules = [workq.Schedule(tick, workq.every(hours=1), key=key) for key in ("", "a", "b")]
        await stack.enter_async_context(workq.Executor(queue, [tick], schedules=schedules))
        return queue

    for _ in range(rounds):
        before = time.time()
        async with AsyncExitStack() as stack:
            queue, *_ = await asyncio.gather(*(start(stack) for _ in range(16)))
            rows = await queue.find()
        assert sorted(row.key or "" for row in rows) == ["", "a", "b"]
        assert made_within(rows, before - 0.001, time.time())
        await database.rows("drop table {table}")
        await database.rows("drop table " + database.table.removesuffix('"') + '_version"')


@pytest.mark.parametrize("number", [4, pytest.param(16, marks=pytest.mark.slow)])
async def test_processes_that_start_at_once_on_an_empty_database_all_start(
    database: Database, nodes: Nodes, number: int
) -> None:
    """F16, F50: with files and sockets of their own."""
    before = time.time()
    running = [nodes.begin("--migrate", schedules=3) for _ in range(number)]
    await nodes.journal.until("ready", number, timeout=6 * SOON)
    assert [await node.end() for node in running] == [""] * number
    async with database.open() as db:
        rows = await workq.Queue(db).find()
    assert sorted(row.key or "" for row in rows) == ["k0", "k1", "k2"]
    assert made_within(rows, before - 0.001, time.time())


@pytest.mark.parametrize("how", ["closed", "raised", "never closed"])
async def test_a_process_that_used_workq_ends_when_its_loop_has(database: Database, how: str) -> None:
    """F31: within 2 s of asyncio.run returning, also when nobody closed anything."""
    schema = [] if database.schema is None else [f"--schema={database.schema}"]
    with program(str(LEAVER), how, database.url, *schema) as process:
        printed, complaint = await asyncio.to_thread(process.communicate, timeout=2 * SOON)
        ended = time.monotonic()
    assert process.returncode == 0, complaint.decode()
    assert ended - float(printed) < 2
    if how != "never closed":
        assert complaint == b""


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (2_000, 20_000),
        pytest.param(40_000, 20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(1_000_000, 300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_the_write_ahead_log_ends_small_however_much_was_written_and_read(
    sqlite: SQLiteDatabase, tmp_path: Path, number: int, size: int
) -> None:
    """F32: no read transaction outlives its statement, so checkpoints can finish. Each payload is written twice."""
    log = Path(f"{sqlite.path}-wal")
    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        with nodes_on(sqlite, tmp_path) as nodes:
            for _ in range(4):
                nodes.begin(produce=number // 4, payload=size, poll=0.05)
            largest = 0
            async with asyncio.timeout(SOON + number / 50):
                while len(nodes.journal.lines("completed")) < number:
                    await queue.find(limit=10)
                    largest = max(largest, size_of(log))
                    await asyncio.sleep(0.02)

            async def is_small() -> bool:
                # The log is cut by the first write after a checkpoint that met no reader.
                await queue.enqueue(None, "work", "x")
                return size_of(log) <= 64 << 20

            await eventually(is_small)
            assert largest < 160 << 20
