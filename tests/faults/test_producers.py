"""no loss, no trace: many producers that want the same keys, each in a transaction of the application's own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

import workq
from support import SOON, Caller, Database, session
from workq import NewTask

KEYED = workq.Spec("keyed", int, key=str)
SIZES = pytest.mark.parametrize(
    ("producers", "keys"), [(16, 300), pytest.param(64, 10_000, marks=pytest.mark.slow)], ids=["16x300", "64x10000"]
)


class Books:
    """The application's own table, which is written in the same transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.table = database.table.replace("workq", "wishes")

    async def open(self) -> None:
        await self._database.rows(f"create table {self.table} (producer integer, wanted integer, task bigint)")

    async def rows(self) -> list[tuple[Any, ...]]:
        return await self._database.rows(f"select producer, wanted, task from {self.table}")


async def wish(app: Caller, queue: workq.Queue, books: Books, producer: int, key: int) -> int | None:
    """One transaction: the task, and what the application notes about it."""
    await app.execute("begin")
    id = await queue.enqueue(app.tx, KEYED, key)
    await app.execute(f"insert into {books.table} values ({producer}, {key}, {'null' if id is None else id})")
    await app.commit()
    return id


async def all_at_once(
    database: Database, producers: int, produce: Callable[[int, Caller], Coroutine[Any, Any, None]]
) -> None:
    """Have so many producers do their work at the same time, on connections of their own."""
    async with AsyncExitStack() as stack:
        apps = [await stack.enter_async_context(session(database)) for _ in range(producers)]
        async with asyncio.TaskGroup() as group:
            for producer, app in enumerate(apps):
                group.create_task(produce(producer, app))


@SIZES
@pytest.mark.timeout(3600)
async def test_of_all_who_want_a_key_one_gets_it_and_nobodys_transaction_is_broken(
    database: Database, queue: workq.Queue, producers: int, keys: int
) -> None:
    """F14, F15: at READ COMMITTED, one key a transaction, each producer in an order of its own."""
    books = Books(database)
    await books.open()

    async def produce(producer: int, app: Caller) -> None:
        for key in Random(producer).sample(range(keys), keys):
            await wish(app, queue, books, producer, key)

    await all_at_once(database, producers, produce)

    wishes = await books.rows()
    assert Counter((producer, key) for producer, key, _ in wishes) == Counter(
        (producer, key) for producer in range(producers) for key in range(keys)
    )
    granted = {key: id for _, key, id in wishes if id is not None}
    assert sum(id is not None for _, _, id in wishes) == keys
    stored = await database.rows("select key, id from {table}")
    assert len(stored) == keys
    assert {int(key): id for key, id in stored} == granted


@SIZES
@pytest.mark.timeout(3600)
async def test_keys_that_come_free_while_others_want_them_are_held_by_one_at_a_time_and_none_is_lost(
    database: Database, queue: workq.Queue, producers: int, keys: int
) -> None:
    """F14, no loss, one holder: a key's task runs, ends and frees it, and every task that was granted runs once."""
    books, runs, under_way, most = Books(database), Counter[int](), Counter[int](), Counter[int]()
    await books.open()
    few = max(keys // 20, 5)
    wishes = keys // 4

    @workq.handler(KEYED)
    async def keyed(task: workq.Task[int]) -> None:
        runs[task.id] += 1
        under_way[task.payload] += 1
        most[task.payload] = max(most[task.payload], under_way[task.payload])
        await asyncio.sleep(0.001)
        under_way[task.payload] -= 1

    async def produce(producer: int, app: Caller) -> None:
        random = Random(producer)
        for _ in range(wishes):
            await wish(app, queue, books, producer, random.randrange(few))

    async with workq.Executor(queue, [keyed], poll_interval=0.05):
        await all_at_once(database, producers, produce)
        await queue.wait(timeout=2 * SOON + producers * wishes / 100)

    noted = await books.rows()
    assert len(noted) == producers * wishes
    granted = [id for _, _, id in noted if id is not None]
    assert runs == Counter(granted)
    assert few < len(granted) < len(noted)
    assert set(most.values()) == {1}
    assert await queue.find() == []


def batch_of(random: Random, keys: Sequence[int]) -> list[NewTask]:
    """Tasks of several names and queues with these keys, in any order, some twice."""
    wanted = random.sample(keys, len(keys)) + random.sample(keys, len(keys) // 10)
    return [NewTask(f"name{key % 3}", key, key=str(key), queue=f"queue{key % 2}") for key in wanted]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("producers", "rounds"), [(8, 12), pytest.param(16, 200, marks=pytest.mark.slow)], ids=["8x12", "16x200"]
)
async def test_batches_of_many_producers_that_want_the_same_keys_in_any_order_never_deadlock(
    database: Database, queue: workq.Queue, producers: int, rounds: int
) -> None:
    """F26: in transactions, half of which roll back, and without one."""
    kept = Counter[int]()

    async def in_a_transaction(app: Caller, batch: list[NewTask], *, commits: bool) -> list[int | None]:
        await app.execute("begin")
        ids = await queue.enqueue_many(app.tx, batch)
        await (app.commit() if commits else app.rollback())
        return ids if commits else []

    async with AsyncExitStack() as stack:
        apps = [await stack.enter_async_context(session(database)) for _ in range(producers)]
        others = [
            workq.Queue(await stack.enter_async_context(database.open(pool_size=2))) for _ in range(producers // 4)
        ]
        for number in range(rounds):
            keys = range(number * 100, number * 100 + 100)
            random = Random(number)
            async with asyncio.timeout(3 * SOON), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(in_a_transaction(app, batch_of(random, keys), commits=at % 2 == 0))
                    for at, app in enumerate(apps)
                ]
                tasks += [group.create_task(other.enqueue_many(None, batch_of(random, keys))) for other in others]
            kept.update(id for task in tasks for id in task.result() if id is not None)

    stored = await database.rows("select id, queue, name, key from {table}")
    assert kept == Counter(id for id, *_ in stored)
    assert Counter(key for *_, key in stored) == Counter(map(str, range(rounds * 100)))
