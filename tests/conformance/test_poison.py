"""isolation: a task that kills its process is parked in the end, and no other pays for it or waits without bound."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

import workq
from faults.nodes import ENVIRONMENT
from support import SOON, Database, Events, Runs, eventually, hooked

WORKER = Path(__file__).with_name("poison_worker.py")
PAST = datetime.now(UTC) - timedelta(hours=1)
QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 2}


async def vanish(database: Database, ids: Sequence[int | None], times: int = 1) -> None:
    """Leave tasks as their holder leaves them that died a while ago, the last of so many."""
    chosen = ", ".join(map(str, ids))
    await database.rows(
        f"update {{table}} set locked_by = 1, version = version + 1, locked_until = created_at, lost = {times - 1} "
        f"where id in ({chosen})"
    )


async def lived(database: Database, *options: str) -> tuple[int, list[str]]:
    """Run a process to its end, whatever that is: its exit code, and the lines it wrote."""
    schema = [] if database.schema is None else [f"--schema={database.schema}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(WORKER), database.url, *schema, *options, env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(3 * SOON):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, printed.decode().splitlines()


@pytest.mark.parametrize("place", [3, pytest.param(0, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
async def test_a_task_that_kills_its_process_is_parked_and_its_neighbours_are_not(
    place: int, database: Database, queue: workq.Queue
) -> None:
    """F06: after max_lost, with an error that says so; the tasks that were running beside it all end well."""
    payloads = ["fine"] * 6
    payloads.insert(place, "poison")
    ids = await queue.enqueue_many(None, [workq.NewTask("work", payload) for payload in payloads])
    poison = ids[place]
    assert poison is not None

    starts: Counter[int] = Counter()
    together = 0
    for _ in range(6):
        code, lines = await lived(database)
        assert code == 9
        page = [int(line.split()[1]) for line in lines if line.startswith("start")]
        starts.update(page)
        together += len(page) > 1 and poison in page
        for row in await queue.find():
            await database.age(row.id, 60)
    row = await queue.get(poison)
    assert row is not None
    assert (row.state, row.lost) == ("waiting", 5)

    code, lines = await lived(database)
    assert code == 0
    assert f"start {poison}" not in lines
    assert starts[poison] == 6
    assert together >= 2
    (row,) = await queue.find()
    assert (row.id, row.state, row.attempt) == (poison, "failed", 0)
    assert row.error is not None
    assert "vanished 6 times" in row.error


@pytest.mark.parametrize("max_lost", [1, 2])
async def test_a_small_crash_budget_parks_the_killer_alone_too(
    max_lost: int, database: Database, queue: workq.Queue
) -> None:
    """F06: neighbours become suspects with it, and run one at a time before their own budget is used up."""
    payloads = ["fine", "fine", "poison", "fine"]
    ids = await queue.enqueue_many(None, [workq.NewTask("work", payload) for payload in payloads])
    for _ in range(max_lost + 4):
        code, _ = await lived(database, f"--max-lost={max_lost}")
        if code == 0:
            break
        for row in await queue.find():
            await database.age(row.id, 60)
    (row,) = await queue.find()
    assert (row.id, row.state) == (ids[2], "failed")
    assert f"vanished {max_lost + 1} times" in (row.error or "")


async def test_a_task_past_max_lost_is_parked_without_being_started_and_retry_gives_it_a_clean_count(
    database: Database,
) -> None:
    """F06: the event says that it is final."""
    events, runs = Events(), Runs()
    runs.go.set()

    @workq.handler("work", retry=workq.linear(retries=9, delay=0))
    async def work(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async with hooked(database, events) as queue:
        ids = await queue.enqueue_many(None, [workq.NewTask(work, number) for number in range(3)])
        assert ids[1] is not None
        await vanish(database, [ids[0]], times=5)
        await vanish(database, [ids[1]], times=6)
        async with workq.Executor(queue, [work], workers=1, **QUICK):
            failed = await events.until("failed")
            await queue.wait(timeout=SOON)
            assert sorted(runs.order) == [0, 2]
            assert (failed.id, failed.retry_at, failed.attempt) == (ids[1], None, 1)
            assert "vanished 6 times" in str(failed.error)
            assert await queue.retry(None, ids[1])
            row = await queue.get(ids[1])
            assert row is None or (row.lost, row.error) == (0, None)
            await queue.wait(timeout=SOON)
        assert runs.started == Counter(range(3))
        assert await queue.find() == []


async def test_suspects_run_one_at_a_time_beside_everything_else(database: Database, queue: workq.Queue) -> None:
    """F06: whoever of them kills the process next takes no other one along."""
    runs = Runs()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    def suspects() -> set[str]:
        return {name for name in runs.running if name.startswith("suspect")}

    ids = await queue.enqueue_many(None, [workq.NewTask(work, f"suspect {number}") for number in range(4)])
    await vanish(database, ids, times=3)
    most = 0
    async with workq.Executor(queue, [work], workers=8, **QUICK):
        await runs.until(lambda: len(suspects()) == 1)
        await queue.enqueue_many(None, [workq.NewTask(work, f"fine {number}") for number in range(4)])
        await runs.until(lambda: len(runs.running) == 5)
        for _ in range(5):
            await asyncio.sleep(0.05)
            most = max(most, len(suspects()))
        assert most == 1
        runs.go.set()
        await queue.wait(timeout=SOON)
    assert runs.started == Counter([*(f"suspect {n}" for n in range(4)), *(f"fine {n}" for n in range(4))])
    assert await queue.find() == []


async def test_a_run_that_ends_in_any_way_clears_the_suspicion(database: Database, queue: workq.Queue) -> None:
    """F06: only a holder that vanishes counts, not one that says how the run went."""
    ways: dict[str, workq.Outcome | Exception] = {
        "fails": ValueError("fails"),
        "retries": workq.Retry("later", after=3600),
        "waits": workq.Later(3600),
    }

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        raise ways[task.payload]

    ids = await queue.enqueue_many(None, [workq.NewTask(work, way) for way in ways])
    await vanish(database, ids, times=4)
    async with workq.Executor(queue, [work], **QUICK):
        await queue.wait(timeout=SOON)
        rows = await queue.find()
    assert {row.payload: row.lost for row in rows} == dict.fromkeys(ways, 0)


async def test_recovered_retried_and_fresh_work_share_one_order(database: Database, queue: workq.Queue) -> None:
    """F57: priority, then due time, then id, whoever had a row before."""
    order: list[int] = []

    def made(name: str) -> workq.Handler[int, Any]:
        async def work(task: workq.Task[int]) -> None:
            order.append(task.payload)

        return workq.handler(name)(work)

    random = Random(57)
    wanted = [(random.choice((-1, 0, 1)), random.randrange(40)) for _ in range(90)]
    ids = await queue.enqueue_many(
        None,
        [
            workq.NewTask("abc"[number % 3], number, priority=priority, run_at=PAST + timedelta(seconds=second))
            for number, (priority, second) in enumerate(wanted)
        ],
    )
    kinds = random.sample(range(90), 60)
    await vanish(database, [ids[number] for number in kinds[:20]])
    await vanish(database, [ids[number] for number in kinds[20:40]], times=2)
    for number in kinds[40:]:
        id = ids[number]
        assert id is not None
        assert await queue.disable(None, id)
        assert await queue.retry(None, id, run_at=PAST + timedelta(seconds=wanted[number][1]))
    async with workq.Executor(queue, [made(name) for name in "abc"], workers=1, claim_ahead=False, **QUICK):
        await queue.wait(timeout=SOON)
    assert order == sorted(range(90), key=lambda number: (*wanted[number], number))


async def test_with_many_names_no_task_is_passed_by_more_than_a_page_of_each_other_name(queue: workq.Queue) -> None:
    """F57: a busy name does not starve a quiet one."""
    order: list[int] = []
    names, workers = "abcde", 4

    def made(name: str) -> workq.Handler[int, Any]:
        async def work(task: workq.Task[int]) -> None:
            order.append(task.payload)
            await asyncio.sleep(0)

        return workq.handler(name)(work)

    random = Random(7)
    tasks = [
        workq.NewTask(random.choice("aaaaaaaaaabbbcde"), number, run_at=PAST + timedelta(seconds=number))
        for number in range(400)
    ]
    await queue.enqueue_many(None, tasks)
    async with workq.Executor(queue, [made(name) for name in names], workers=workers, claim_ahead=False, **QUICK):
        await queue.wait(timeout=SOON)
    assert sorted(order) == list(range(400))
    late = {number: place - number for place, number in enumerate(order) if place - number > workers * len(names)}
    assert late == {}


async def test_what_becomes_due_behind_a_backlog_that_is_older_than_a_page_does_not_wait_for_its_end(
    database: Database,
) -> None:
    """F57: retried, recovered and rescheduled rows lie before the cursor, which comes back within a poll interval."""
    events, order = Events(), list[str]()
    backlog = 1500

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        order.append(task.payload)
        await asyncio.sleep(0.002)

    async with hooked(database, events) as queue:
        parked = await queue.enqueue(None, work, "retried", run_at=PAST)
        resting = await queue.enqueue(None, work, "rescheduled", run_at=datetime.now(UTC) + timedelta(hours=1))
        orphan = await queue.enqueue(None, work, "recovered", run_at=PAST + timedelta(hours=2))
        assert parked is not None
        assert resting is not None
        assert orphan is not None
        await queue.disable(None, parked)
        await queue.enqueue_many(
            None, [workq.NewTask(work, "backlog", run_at=PAST + timedelta(minutes=1)) for _ in range(backlog)]
        )
        async with workq.Executor(queue, [work], workers=4, claim_ahead=False, poll_interval=0.1, lease=30):
            await events.until("completed", 20)
            await vanish(database, [orphan])
            await database.age(orphan, 3 * 3600)
            assert await queue.retry(None, parked, run_at=PAST)
            assert await queue.reschedule(None, resting, run_at=PAST)
            await queue.wait(timeout=3 * SOON)
    places = {payload: place for place, payload in enumerate(order) if payload != "backlog"}
    assert places.keys() == {"retried", "rescheduled", "recovered"}
    assert max(places.values()) < backlog * 3 / 4


async def test_a_suspect_is_looked_at_as_soon_as_the_queue_is_drained_faster_than_filled(
    database: Database, queue: workq.Queue
) -> None:
    """F57: full pages of fresh work do not hide it for ever."""
    runs, enough = Counter[str](), asyncio.Event()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        runs[task.payload] += 1

    async def produce() -> None:
        while not enough.is_set():
            await queue.enqueue_many(None, [workq.NewTask(work, "fresh") for _ in range(20)])
            await asyncio.sleep(0.05)

    suspect = await queue.enqueue(None, work, "suspect")
    await vanish(database, [suspect], times=4)
    await queue.enqueue_many(None, [workq.NewTask(work, "fresh") for _ in range(300)])

    async def started() -> bool:
        return runs["suspect"] == 1

    async with asyncio.TaskGroup() as group, workq.Executor(queue, [work], workers=4, **QUICK):
        group.create_task(produce())
        try:
            await eventually(started)
        finally:
            enough.set()
        await queue.wait(timeout=SOON)
    assert await queue.find() == []


async def test_a_lower_priority_waits_only_while_a_higher_one_is_due(queue: workq.Queue) -> None:
    """F57: strict priority, also for a page that takes of both."""
    order: list[int] = []

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        order.append(task.payload)
        if task.payload > 90:
            await queue.enqueue(None, work, task.payload - 1, priority=task.payload - 1)

    await queue.enqueue_many(None, [workq.NewTask(work, 0, priority=50) for _ in range(20)])
    await queue.enqueue(None, work, 100, priority=100)
    await queue.enqueue(None, work, -100, priority=-100)
    async with workq.Executor(queue, [work], workers=1, claim_ahead=False, **QUICK):
        await queue.wait(timeout=SOON)
    assert order == [-100, *[0] * 20, *range(100, 89, -1)]
