"""Keys: one live task for each (queue, name, key), whoever enqueues it; when it has ended the key is free again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

import workq
from support import SOON, Caller, Database, Events, PostgresDatabase, Runs, eventually
from workq import NewTask

NOTE = workq.Spec("note", str)
KEYED = workq.Spec("keyed", str, key=lambda text: text)


async def stored(queue: workq.Queue, text: str) -> int:
    """A new keyed task."""
    id = await queue.enqueue(None, KEYED, text)
    assert id is not None
    return id


# While the task lives


async def test_a_waiting_task_holds_its_key(queue: workq.Queue) -> None:
    first = await stored(queue, "k")
    assert await queue.enqueue(None, KEYED, "k") is None
    assert await queue.enqueue(None, KEYED, "k", delay=60, priority=-5) is None
    assert await queue.enqueue_many(None, [NewTask(KEYED, "k"), NewTask("keyed", "other", key="k")]) == [None, None]
    assert [row.id for row in await queue.find()] == [first]


async def test_a_task_of_the_future_holds_its_key(queue: workq.Queue) -> None:
    assert await queue.enqueue(None, KEYED, "k", delay=3600) is not None
    assert await queue.enqueue(None, KEYED, "k") is None


async def test_a_running_task_holds_its_key(queue: workq.Queue) -> None:
    runs, inside = Runs(), list[int | None]()

    @workq.handler(KEYED)
    async def hold(task: workq.Task[str]) -> None:
        inside.append(await queue.enqueue(None, KEYED, task.payload))
        await runs.hold(task.payload)

    await stored(queue, "k")
    async with workq.Executor(queue, [hold], poll_interval=0.1):
        await runs.until(lambda: "k" in runs.running)
        assert await queue.enqueue(None, KEYED, "k") is None
        runs.go.set()
    assert inside == [None]


async def test_a_task_between_two_runs_holds_its_key(database: Database) -> None:
    events = Events()

    @workq.handler(KEYED, retry=workq.linear(retries=1, delay=3600))
    async def fail(task: workq.Task[str]) -> None:
        raise ValueError

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        id = await stored(queue, "k")
        async with workq.Executor(queue, [fail], poll_interval=0.1):
            await events.until("failed")
        row = await queue.get(id)
        assert row is not None
        assert (row.state, row.attempt) == ("waiting", 1)
        assert await queue.enqueue(None, KEYED, "k") is None


async def test_a_key_belongs_to_one_name_in_one_queue(queue: workq.Queue) -> None:
    ids = [
        await queue.enqueue(None, KEYED, "k"),
        await queue.enqueue(None, KEYED, "k", queue="other"),
        await queue.enqueue(None, NOTE, "k", key="k"),
        await queue.enqueue(None, KEYED, "k2"),
        await queue.enqueue(None, NOTE, "k"),
        await queue.enqueue(None, NOTE, "k"),
    ]
    assert None not in ids
    assert len(set(ids)) == 6


# Free again


async def test_success_frees_the_key_before_it_is_told(database: Database) -> None:
    """A `completed` hook may enqueue the same key again."""
    events, runs = Events(), list[str]()

    @workq.handler(KEYED)
    async def again(task: workq.Task[str]) -> None:
        runs.append(task.payload)

    def enqueue_again(event: workq.Event) -> None:
        if event.kind == "completed" and len(runs) < 3:
            queue.enqueue_soon(KEYED, "k")

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[enqueue_again, events])
        await queue.migrate()
        await stored(queue, "k")
        async with workq.Executor(queue, [again], poll_interval=0.1):
            await events.until("completed", 3)
            await queue.wait(timeout=SOON)
        assert runs == ["k", "k", "k"]
        await stored(queue, "k")


async def test_failure_frees_the_key(queue: workq.Queue) -> None:
    @workq.handler(KEYED)
    async def fail(task: workq.Task[str]) -> None:
        raise ValueError

    first = await stored(queue, "k")
    async with workq.Executor(queue, [fail], poll_interval=0.1):
        await queue.wait(KEYED, timeout=SOON)
        second = await stored(queue, "k")
        await queue.wait(KEYED, timeout=SOON)
        third = await stored(queue, "k")
        await queue.wait(KEYED, timeout=SOON)
    assert [(row.id, row.key, row.state) for row in await queue.find()] == [
        (id, "k", "failed") for id in (first, second, third)
    ]


async def test_delete_frees_the_key(queue: workq.Queue) -> None:
    first = await stored(queue, "k")
    assert await queue.delete(None, first)
    assert await stored(queue, "k") > first


async def test_disable_frees_the_key(queue: workq.Queue) -> None:
    first = await stored(queue, "k")
    assert await queue.disable(None, first)
    second = await stored(queue, "k")
    assert [(row.id, row.state) for row in await queue.find(key="k")] == [(first, "failed"), (second, "waiting")]


async def test_a_rollback_frees_the_key(database: Database, queue: workq.Queue) -> None:
    """no trace: in a savepoint too."""
    async with database.caller() as app:
        assert await queue.enqueue(app.tx, KEYED, "whole") is not None
        await app.execute("savepoint s")
        assert await queue.enqueue(app.tx, KEYED, "part") is not None
        assert await queue.enqueue(app.tx, KEYED, "part") is None
        await app.execute("rollback to savepoint s")
        assert await queue.enqueue(app.tx, KEYED, "part") is not None
        await app.rollback()
    assert await queue.find() == []
    await stored(queue, "whole")
    await stored(queue, "part")


# Many at once


async def enqueue_at_once(database: Database, queue: workq.Queue, number: int, together: int) -> None:
    """Enqueue one key from so many transactions, so many at a time."""
    places = asyncio.Semaphore(together)

    async def one(number: int) -> int | None:
        async with places, database.caller() as app:
            id = await queue.enqueue(app.tx, KEYED, "k", headers={"from": str(number)})
            await app.commit()
        return id

    ids = await asyncio.gather(*map(one, range(number)))
    (row,) = await queue.find()
    assert [id for id in ids if id is not None] == [row.id]
    assert ids[int(row.headers["from"])] == row.id


async def test_of_sixty_four_enqueues_of_one_key_one_is_stored(database: Database, queue: workq.Queue) -> None:
    """F14: in transactions of their own, and each caller learns whether it was the one."""
    await enqueue_at_once(database, queue, 64, together=16)


async def test_of_sixty_four_open_transactions_one_stores_the_key(postgres: PostgresDatabase) -> None:
    """F14: all at the same time, where a database has more than one writer."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await enqueue_at_once(postgres, queue, 64, together=64)


async def test_of_many_enqueues_of_one_key_without_a_transaction_one_is_stored(queue: workq.Queue) -> None:
    """F14."""
    ids = await asyncio.gather(*(queue.enqueue(None, KEYED, "k") for _ in range(64)))
    assert [id for id in ids if id is not None] == [row.id for row in await queue.find()]


async def test_none_means_that_a_committed_task_has_the_key(database: Database, queue: workq.Queue) -> None:
    """F14: of callers half of whom roll back, one is stored if any of the others wanted it."""

    places = asyncio.Semaphore(8)

    async def one(commits: bool) -> int | None:
        async with places, database.caller() as app:
            id = await queue.enqueue(app.tx, KEYED, "k")
            await (app.commit() if commits else app.rollback())
        return id if commits else None

    ids = await asyncio.gather(*(one(n % 2 == 1) for n in range(32)))
    assert [id for id in ids if id is not None] == [row.id for row in await queue.find()]
    assert len(await queue.find()) == 1


def crossing(rounds: int, size: int) -> list[tuple[list[NewTask], list[NewTask]]]:
    """Pairs of batches that want the same keys, of several names and queues, in opposite orders."""
    pairs: list[tuple[list[NewTask], list[NewTask]]] = []
    for number in range(rounds):
        batch = [
            NewTask(f"name{n % 3}", n, key=f"{number}.{n * 7919 % size}", queue=f"queue{n % 2}") for n in range(size)
        ]
        pairs.append((batch, batch[::-1]))
    return pairs


async def committed(queue: workq.Queue, app: Caller, batch: Sequence[NewTask]) -> list[int | None]:
    ids = await queue.enqueue_many(app.tx, batch)
    await app.commit()
    return ids


async def test_batches_with_crossing_keys_lose_nothing(database: Database, queue: workq.Queue) -> None:
    """F26, F14: in concurrent transactions, each key is stored once and somebody got its id."""

    async def own(batch: Sequence[NewTask]) -> list[int | None]:
        async with database.caller() as app:
            return await committed(queue, app, batch)

    for one, other in crossing(5, 60):
        first, second = await asyncio.gather(own(one), own(other))
        for mine, yours in zip(first, reversed(second), strict=True):
            assert (mine is None) != (yours is None)
    found = Counter((row.queue, row.name, row.key) for row in await queue.find(limit=10_000))
    assert len(found) == 5 * 60
    assert set(found.values()) == {1}


async def test_batches_with_crossing_keys_do_not_deadlock(postgres: PostgresDatabase) -> None:
    """F26: both transactions are open before either sends its batch."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        for one, other in crossing(8, 500):
            async with postgres.caller() as mine, postgres.caller() as yours:
                first, second = await asyncio.gather(committed(queue, mine, one), committed(queue, yours, other))
            assert sum(id is not None for id in first + second) == 500


async def test_batches_of_two_processes_do_not_deadlock(database: Database, queue: workq.Queue) -> None:
    """F26: without a transaction, from two connections of workq's own."""
    async with database.open() as db:
        other_queue = workq.Queue(db)
        for one, other in crossing(5, 60):
            first, second = await asyncio.gather(queue.enqueue_many(None, one), other_queue.enqueue_many(None, other))
            for mine, yours in zip(first, reversed(second), strict=True):
                assert (mine is None) != (yours is None)
    assert len(await queue.find(limit=10_000)) == 5 * 60


# The caller's transaction


async def test_a_double_leaves_the_callers_transaction_usable(database: Database, queue: workq.Queue) -> None:
    """F15: what was done before and after it commits."""
    await stored(queue, "taken")
    async with database.caller() as app:
        before = await queue.enqueue(app.tx, NOTE, "before")
        assert await queue.enqueue(app.tx, KEYED, "taken") is None
        mixed = await queue.enqueue_many(app.tx, [NewTask(KEYED, "taken"), NewTask(KEYED, "new"), NewTask(NOTE, "x")])
        assert [id is None for id in mixed] == [True, False, False]
        await app.execute("create temporary table witness (id integer)")
        await app.commit()
    assert {row.id for row in await queue.find()} >= {before, mixed[1], mixed[2]}
    assert len(await queue.find()) == 4


async def test_retry_of_a_task_whose_key_is_taken_leaves_the_transaction_usable(
    database: Database, queue: workq.Queue
) -> None:
    """F15: KeyTaken, in a transaction and without one, changes nothing."""
    parked = await stored(queue, "k")
    await queue.disable(None, parked)
    live = await stored(queue, "k")
    before = await queue.get(parked)
    with pytest.raises(workq.KeyTaken, match=f"task {parked} .*live task has its key"):
        await queue.retry(None, parked)
    async with database.caller() as app:
        first = await queue.enqueue(app.tx, NOTE, "before")
        with pytest.raises(workq.KeyTaken):
            await queue.retry(app.tx, parked, payload="changed")
        await app.execute(f"create table {database.table.replace('workq', 'witness')} (id integer)")
        second = await queue.enqueue(app.tx, NOTE, "after")
        await app.commit()
    assert await queue.get(parked) == before
    assert [row.id for row in await queue.find()] == [parked, live, first, second]

    await queue.delete(None, live)
    assert await queue.retry(None, parked)
    assert await queue.enqueue(None, KEYED, "k") is None


async def test_a_key_taken_in_the_same_transaction_is_taken(database: Database, queue: workq.Queue) -> None:
    """F15: retry sees what the transaction itself did, and undoing that frees the key for it."""
    parked = await stored(queue, "k")
    await queue.disable(None, parked)
    async with database.caller() as app:
        await app.execute("savepoint s")
        assert await queue.enqueue(app.tx, KEYED, "k") is not None
        with pytest.raises(workq.KeyTaken):
            await queue.retry(app.tx, parked)
        await app.execute("rollback to savepoint s")
        assert await queue.retry(app.tx, parked)
        assert await queue.enqueue(app.tx, KEYED, "k") is None
        await app.commit()
    assert [(row.id, row.state) for row in await queue.find()] == [(parked, "waiting")]


async def test_of_failed_tasks_with_one_key_one_can_be_retried(queue: workq.Queue) -> None:
    ids: list[int] = []
    for _ in range(3):
        ids.append(await stored(queue, "k"))
        await queue.disable(None, ids[-1])
    assert await queue.retry(None, ids[1])
    for id in (ids[0], ids[2]):
        with pytest.raises(workq.KeyTaken):
            await queue.retry(None, id)
    assert [row.state for row in await queue.find()] == ["failed", "waiting", "failed"]


async def test_a_hundred_retries_at_once_set_one_free(queue: workq.Queue) -> None:
    """F14: the index decides, not a look before."""
    ids: list[int] = []
    for _ in range(20):
        ids.append(await stored(queue, "k"))
        await queue.disable(None, ids[-1])
    results = await asyncio.gather(*(queue.retry(None, id) for id in ids for _ in range(5)), return_exceptions=True)
    assert sum(result is True for result in results) == 1
    assert all(result is True or result is False or isinstance(result, workq.KeyTaken) for result in results)
    assert Counter(row.state for row in await queue.find()) == {"waiting": 1, "failed": 19}


# Waiting for somebody else's transaction


async def end_once_awaited(database: PostgresDatabase, app: Caller, *, commits: bool) -> None:
    """End a transaction when another one waits for it."""
    await eventually(lambda: database.rows("select 1 from pg_stat_activity where wait_event = 'transactionid'"))
    await (app.commit() if commits else app.rollback())


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a transaction", "without one"])
async def test_an_enqueue_waits_for_the_transaction_that_holds_its_key(
    postgres: PostgresDatabase, commits: bool, inside: bool
) -> None:
    """F14: it learns how that ended, instead of guessing."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        async with postgres.caller() as first, postgres.caller() as second:
            held = await queue.enqueue(first.tx, KEYED, "k")
            id, ended = await asyncio.gather(
                queue.enqueue(second.tx if inside else None, KEYED, "k"),
                end_once_awaited(postgres, first, commits=commits),
                return_exceptions=True,
            )
            assert ended is None
            await second.commit()
        assert (id is None) == commits
        assert [row.id for row in await queue.find()] == [held if commits else id]


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
async def test_a_retry_waits_for_the_transaction_that_holds_its_key(postgres: PostgresDatabase, commits: bool) -> None:
    """F14, F15: and its own transaction stays usable when the key turns out to be taken."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        parked = await stored(queue, "k")
        await queue.disable(None, parked)
        async with postgres.caller() as first, postgres.caller() as second:
            await queue.enqueue(first.tx, KEYED, "k")
            done, ended = await asyncio.gather(
                queue.retry(second.tx, parked),
                end_once_awaited(postgres, first, commits=commits),
                return_exceptions=True,
            )
            assert ended is None
            await queue.enqueue(second.tx, NOTE, "after")
            await second.commit()
        assert isinstance(done, workq.KeyTaken) if commits else done is True
        assert [row.name for row in await queue.find(state="waiting")] == ["keyed", "note"]


async def test_who_waits_for_a_key_holds_up_nobody_else(postgres: PostgresDatabase) -> None:
    """isolation: other enqueues without a transaction, and looks at the table, do not queue up behind it."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        async with postgres.caller() as first:
            await queue.enqueue(first.tx, KEYED, "k")

            async def others() -> None:
                await eventually(
                    lambda: postgres.rows("select 1 from pg_stat_activity where wait_event = 'transactionid'")
                )
                try:
                    async with asyncio.timeout(3):
                        await queue.enqueue(None, NOTE, "other")
                        await queue.find()
                finally:
                    await first.commit()

            double, ended = await asyncio.gather(queue.enqueue(None, KEYED, "k"), others(), return_exceptions=True)
        assert double is None
        assert ended is None
