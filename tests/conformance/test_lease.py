"""one holder, fence, takeover: who may run a task, who may end it, and what a vanished holder leaves behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

import workq
from support import (
    SOON,
    Database,
    DroppedReply,
    Events,
    HeldReply,
    PostgresDatabase,
    Runs,
    SQLiteDatabase,
    Wire,
    eventually,
    hooked,
    session,
    told,
)
from workq.dialect import Dialect

LONG: dict[str, Any] = {"lease": 300, "poll_interval": 0.05, "stop_timeout": 2}
"""No beat comes while such a test runs: only `age` ends a lease."""
SHORT: dict[str, Any] = {"lease": 0.6, "poll_interval": 0.05, "stop_timeout": 2}


class Node:
    """A queue with hooks of its own, as a process has it."""

    def __init__(self, db: Dialect) -> None:
        self.db = db
        self.events = Events()
        self.queue = workq.Queue(db, on_event=[self.events])
        self.runs = Runs()

    def handler(self, name: str = "note", **options: Any) -> workq.Handler[Any, Any]:
        """A handler that says that it runs, and waits for `go`."""

        async def hold(task: workq.Task[Any]) -> None:
            await self.runs.hold(task.payload)

        return workq.handler(name, **options)(hold)

    def executor(self, *handlers: workq.Handler[Any, Any], **options: Any) -> workq.Executor:
        return workq.Executor(self.queue, handlers or [self.handler()], **(LONG | options))


@asynccontextmanager
async def nodes(database: Database) -> AsyncGenerator[tuple[Node, Node]]:
    """Two nodes on one database."""
    async with database.open() as db:
        first, second = Node(db), Node(db)
        await first.queue.migrate()
        yield first, second


async def row_of(queue: workq.Queue, id: int | None) -> workq.TaskRow:
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    return row


async def enqueued(queue: workq.Queue, payload: object = 1, name: str = "note", **options: Any) -> int:
    id = await queue.enqueue(None, name, payload, **options)
    assert id is not None
    return id


async def vanish(database: Database, *ids: int, lost: int = 0) -> None:
    """Leave tasks as a holder leaves them that died a while ago, after `lost` others."""
    some = ", ".join(map(str, ids))
    await database.rows(
        f"update {{table}} set locked_by = 1, version = version + 1, locked_until = created_at, lost = {lost} "
        f"where id in ({some})"
    )


async def taken_over(database: Database, id: int, before: Node, after: Node) -> None:
    """End the lease of a task that runs on one node, and wait until it runs on the other."""
    await before.runs.until(lambda: bool(before.runs.running))
    await database.age(id, 301)
    await after.runs.until(lambda: bool(after.runs.running))


async def holder(database: Database, id: int) -> tuple[Any, ...]:
    """All that a write by a stale holder could change."""
    (row,) = await database.rows(
        f"select version, locked_by, locked_until, run_at, attempt, lost, error, failed_at, finished_at "
        f"from {{table}} where id = {id}"
    )
    return row


async def test_the_task_of_a_holder_that_is_gone_starts_elsewhere(database: Database) -> None:
    """F01, F02: nothing but the row decides, whoever held it and however long ago."""
    async with nodes(database) as (_, node):
        id = await enqueued(node.queue)
        await database.rows("update {table} set node = 'long-gone:1'")
        await vanish(database, id)
        node.runs.go.set()
        async with node.executor():
            await node.events.until("completed")
        assert node.runs.started == Counter({1: 1})


async def test_all_the_tasks_of_a_holder_that_is_gone_start_elsewhere(database: Database) -> None:
    """F01: more than a page, and more than there are places."""
    async with nodes(database) as (_, node):
        ids = await node.queue.enqueue_many(None, [workq.NewTask("note", number) for number in range(100)])
        await vanish(database, *(id for id in ids if id is not None))
        node.runs.go.set()
        async with node.executor(workers=7):
            await node.queue.wait(timeout=SOON)
        assert node.runs.started == Counter(range(100))


async def test_a_lease_that_ran_out_is_taken_over_within_its_bound_and_not_before(database: Database) -> None:
    """takeover: within lease + poll_interval + 1 s; one holder: not while the lease is alive."""
    async with nodes(database) as (dead, alive):
        id = await enqueued(dead.queue)
        async with dead.executor(workers=1):
            await dead.runs.until(lambda: bool(dead.runs.running))
            await database.age(id, 299)
            ends = (await row_of(dead.queue, id)).locked_until
            assert ends is not None
            async with alive.executor(poll_interval=0.2):
                started = await alive.events.until("started")
                assert ends <= started.at <= ends + timedelta(seconds=0.2 + 1)
                alive.runs.go.set()
                await alive.events.until("completed")
            dead.runs.go.set()


async def test_a_task_whose_lease_is_alive_is_left_alone(database: Database) -> None:
    """one holder."""
    async with nodes(database) as (first, second):
        await enqueued(first.queue)
        async with first.executor():
            await first.runs.until(lambda: bool(first.runs.running))
            second.runs.go.set()
            async with second.executor():
                for number in range(2, 12):
                    await enqueued(second.queue, number)
                await eventually_true(lambda: len(second.runs.started) + len(first.runs.started) == 11)
            assert second.runs.started[1] == 0
            first.runs.go.set()
        assert (first.runs.started + second.runs.started) == Counter(range(1, 12))


async def eventually_true(fact: Callable[[], bool], timeout: float = SOON) -> None:
    async def look() -> bool:
        return fact()

    await eventually(look, timeout)


async def beaten(queue: workq.Queue, name: str, seconds: float) -> None:
    """Wait until the lease of every task of this name reaches so far from now."""
    until = datetime.now(UTC) + timedelta(seconds=seconds)
    ids = [row.id for row in await queue.find(target=name)]
    assert ids

    async def moved() -> bool:
        rows = [await queue.get(id) for id in ids]
        return all(row is not None and row.locked_until is not None and row.locked_until > until for row in rows)

    await eventually(moved)


async def test_executors_of_different_leases_never_take_over_live_work(database: Database) -> None:
    """F03: the end of a lease travels with the row, so nobody judges by a setting of his own."""
    async with nodes(database) as (short, long):
        async with short.executor(workers=10, **SHORT), long.executor(workers=10, poll_interval=0.05):
            await short.queue.enqueue_many(None, [workq.NewTask("note", number) for number in range(20)])
            await eventually_true(lambda: len(short.runs.running) + len(long.runs.running) == 20)
            # A third of each looks for more all the time, with the shortest lease of all.
            third = Node(short.queue.hub.dialect)
            async with third.executor(workers=4, **(SHORT | {"lease": 0.3})):
                mine = [row.id for row in await short.queue.find(state="running") if near(row)]
                assert len(mine) == 10
                until = datetime.now(UTC) + timedelta(seconds=2.5)

                async def many_leases_later() -> bool:
                    rows = [await row_of(short.queue, id) for id in mine]
                    return all(row.locked_until is not None and row.locked_until > until for row in rows)

                await eventually(many_leases_later)
            assert third.runs.started == Counter()
            short.runs.go.set()
            long.runs.go.set()
            await short.queue.wait(timeout=SOON)
        assert short.runs.started + long.runs.started == Counter(range(20))
        assert short.events.count("lost") + long.events.count("lost") == 0


def near(row: workq.TaskRow) -> bool:
    """Does its lease end within seconds?"""
    assert row.locked_until is not None
    return row.locked_until - datetime.now(UTC) < timedelta(seconds=10)


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
async def test_tasks_that_run_for_many_leases_under_load_are_never_taken_over(plain: bool, database: Database) -> None:
    """F10: beats come every lease / 3, whatever else is written."""
    started: Counter[int] = Counter()
    free, go = threading.Event(), asyncio.Event()

    @workq.handler("long")
    async def on_the_loop(task: workq.Task[int]) -> None:
        started[task.payload] += 1
        await go.wait()

    @workq.handler("long")
    def in_a_thread(task: workq.Task[int]) -> None:
        started[task.payload] += 1
        free.wait(SOON)

    @workq.handler("quick")
    async def quick(task: workq.Task[int]) -> None: ...

    leases: dict[str, Any] = {"lease": 1.0, "workers": 40, "poll_interval": 0.05, "stop_timeout": 5}
    events = Events()
    async with hooked(database, events) as queue:
        handlers = [in_a_thread if plain else on_the_loop, quick]
        async with workq.Executor(queue, handlers, **leases), workq.Executor(queue, handlers, **leases):
            await queue.enqueue_many(None, [workq.NewTask("long", number) for number in range(60)])
            await eventually_true(lambda: len(started) == 60)

            async def load() -> None:
                while True:
                    await queue.enqueue_many(None, [workq.NewTask(quick, number) for number in range(50)])
                    await queue.wait(quick)

            loading = asyncio.create_task(load())
            await beaten(queue, "long", 4)
            loading.cancel()
            free.set()
            go.set()
            await queue.wait(timeout=SOON)
    assert started == Counter(range(60))
    assert events.count("lost") == 0
    assert events.count("failed") == 0


async def test_a_foreign_transaction_longer_than_the_lease_steals_nothing(sqlite: SQLiteDatabase) -> None:
    """one holder: on SQLite it blocks every beat; when it ends, the beats come before any takeover."""
    elsewhere, ready, free = Counter[int](), threading.Event(), threading.Event()

    def another_process() -> None:
        """A loop of its own, so that the two know of each other only by the file."""

        @workq.handler("note")
        def hold(task: workq.Task[int]) -> None:
            elsewhere[task.payload] += 1
            free.wait(SOON)

        async def serve() -> None:
            async with sqlite.open() as db, workq.Executor(workq.Queue(db), [hold], workers=16, **SHORT):
                ready.set()
                await eventually_true(free.is_set, timeout=60)

        asyncio.run(serve())

    async with nodes(sqlite) as (node, _):
        thread = threading.Thread(target=another_process)
        thread.start()
        try:
            await eventually_true(ready.is_set)
            async with node.executor(workers=16, **SHORT):
                await node.queue.enqueue_many(None, [workq.NewTask("note", number) for number in range(8)])
                await eventually_true(lambda: len(node.runs.running) + len(elsewhere) == 8)
                for _ in range(4):
                    async with sqlite.caller() as app:
                        await app.execute("create table if not exists theirs (x)")
                        ends = max(row.locked_until or datetime.now(UTC) for row in await node.queue.find())

                        async def over(ends: datetime = ends) -> bool:
                            return datetime.now(UTC) > ends + timedelta(seconds=0.3)

                        await eventually(over)
                        await app.commit()
                    await beaten(node.queue, "note", 0.5)
                node.runs.go.set()
                free.set()
                await node.queue.wait(timeout=SOON)
        finally:
            free.set()
            await asyncio.to_thread(thread.join, SOON)
        assert node.runs.started + elsewhere == Counter(range(8))
        assert node.events.count("lost") == 0


Ending = Callable[[workq.Task[Any]], Any]


def returns(task: workq.Task[Any], /) -> None: ...
def raises(task: workq.Task[Any], /) -> None:
    raise ValueError("by a stale holder")


def retries(task: workq.Task[Any]) -> workq.Result:
    return workq.Retry("by a stale holder", after=0.2)


def comes_later(task: workq.Task[Any]) -> workq.Result:
    task.payload = "by a stale holder"
    return workq.Later(0.2)


def fails(task: workq.Task[Any]) -> workq.Result:
    return workq.Fail("by a stale holder")


def skips(task: workq.Task[Any]) -> workq.Result:
    return workq.Skip("by a stale holder")


@pytest.mark.parametrize("scheduled", [False, True], ids=["task", "schedule"])
@pytest.mark.parametrize(
    "end", [returns, raises, retries, comes_later, fails, skips, None], ids=lambda end: end.__name__ if end else "stop"
)
async def test_a_stale_holder_changes_nothing(end: Ending | None, scheduled: bool, database: Database) -> None:
    """F09, fence: whatever its run ends with, and also when it is handed back by stop."""
    async with nodes(database) as (stale, current):

        @workq.handler("note")
        async def late(task: workq.Task[Any]) -> workq.Result:
            await stale.runs.hold(task.payload)
            return None if end is None else end(task)

        in_time = current.handler()

        def on(handler: workq.Handler[Any, Any]) -> list[workq.Schedule]:
            return [workq.Schedule(handler, workq.every(hours=1), 1)] if scheduled else []

        id = None if scheduled else await enqueued(stale.queue)
        async with stale.executor(late, workers=1, schedules=on(late)) as executor:
            if id is None:
                (row,) = await stale.queue.find()
                id = row.id
                assert await stale.queue.reschedule(None, id)
            await stale.runs.until(lambda: bool(stale.runs.running))
            async with current.executor(in_time, schedules=on(in_time)):
                await taken_over(database, id, stale, current)
                before = await holder(database, id)
                if end is None:
                    await executor.stop(0)
                stale.runs.go.set()
                await stale.events.until("lost")
                assert await holder(database, id) == before
                assert (await row_of(current.queue, id)).payload == 1
                current.runs.go.set()
                await current.events.until("completed")
        assert stale.events.kinds()[-1] == "lost"
        assert not {"completed", "failed", "released"} & set(stale.events.kinds())


async def test_a_stale_holder_does_not_bring_back_what_the_other_has_ended(database: Database) -> None:
    """F09: also after the other one's finish, when the row is gone or failed."""
    async with nodes(database) as (stale, current):

        @workq.handler("note", retry=workq.linear(retries=5, delay=0))
        async def late(task: workq.Task[int]) -> None:
            await stale.runs.hold(task.payload)
            raise ValueError("by a stale holder")

        done, failed = await enqueued(stale.queue, 1), await enqueued(stale.queue, 2)
        current.runs.go.set()

        @workq.handler("note")
        async def in_time(task: workq.Task[int]) -> None:
            if task.payload == 2:
                raise LookupError("by its holder")

        async with stale.executor(late, workers=2):
            await stale.runs.until(lambda: len(stale.runs.running) == 2)
            await database.age(done, 301)
            await database.age(failed, 301)
            async with current.executor(in_time):
                await current.events.until("completed")
                await current.events.until("failed")
                before = await holder(database, failed)
                stale.runs.go.set()
                await stale.events.until("lost", 2)
            assert await stale.queue.get(done) is None
            assert await holder(database, failed) == before
            assert "by its holder" in ((await row_of(current.queue, failed)).error or "")


async def test_of_two_runs_of_one_task_one_end_is_accepted(database: Database) -> None:
    """fence: the stale one returns first, the one that took over afterwards."""
    async with nodes(database) as (stale, current):
        id = await enqueued(stale.queue)
        async with stale.executor(workers=1), current.executor(workers=1):
            await eventually_true(lambda: bool(stale.runs.running or current.runs.running))
            first, second = (stale, current) if stale.runs.running else (current, stale)
            await database.age(id, 301)
            await second.runs.until(lambda: bool(second.runs.running))
            first.runs.go.set()
            await first.events.until("lost")
            second.runs.go.set()
            await second.events.until("completed")
        assert await stale.queue.find() == []
        kinds = Counter(stale.events.kinds() + current.events.kinds())
        assert kinds == Counter(enqueued=1, started=2, lost=1, completed=1)


@pytest.mark.parametrize("end", [returns, raises, comes_later], ids=lambda end: end.__name__)
async def test_the_same_version_under_another_token_is_another_claim(end: Ending, database: Database) -> None:
    """fence: after a crash of the server that lost our claim, somebody else may have claimed to the same version."""
    async with nodes(database) as (stale, _):

        @workq.handler("note")
        async def late(task: workq.Task[Any]) -> workq.Result:
            await stale.runs.hold(task.payload)
            result: workq.Result = end(task)
            return result

        id = await enqueued(stale.queue)
        async with stale.executor(late, workers=1):
            await stale.runs.until(lambda: bool(stale.runs.running))
            await database.rows(f"update {{table}} set locked_by = 1 where id = {id}")
            before = await holder(database, id)
            stale.runs.go.set()
            await stale.events.until("lost")
            assert await holder(database, id) == before
        assert told(stale.events) == ["enqueued", "started", "lost"]


@pytest.mark.parametrize("how", ["taken over", "deleted"])
async def test_the_handler_of_a_lost_task_is_cancelled_and_its_place_is_free_again(
    how: str, database: Database
) -> None:
    """fence: a beat notices; the hook is told once, and what the handler does on its way out changes nothing."""
    async with nodes(database) as (node, _):
        left: list[str] = []

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None:
            if task.payload == 2:
                return
            try:
                await node.runs.hold(task.payload)
            except asyncio.CancelledError:
                left.append("cancelled")
                raise ValueError("on its way out") from None

        async with node.executor(note, workers=1, **SHORT):
            id = await enqueued(node.queue)
            await node.runs.until(lambda: bool(node.runs.running))
            if how == "deleted":
                assert await node.queue.delete(None, id)
            else:
                await database.rows(
                    f"update {{table}} set version = version + 1, locked_by = 1, name = 'elsewhere' where id = {id}"
                )
            lost = await node.events.until("lost")
            assert lost.id == id
            await enqueued(node.queue, 2)
            await node.events.until("completed")
        assert left == ["cancelled"]
        assert node.events.kinds().count("lost") == 1
        assert "failed" not in node.events.kinds()
        assert node.runs.started == Counter({1: 1})


async def test_a_lost_task_in_a_thread_runs_on_and_its_end_changes_nothing(database: Database) -> None:
    """fence: a thread cannot be cancelled, but it can be refused."""
    async with nodes(database) as (node, _):
        running, free = threading.Event(), threading.Event()

        @workq.handler("note")
        def note(task: workq.Task[int]) -> None:
            running.set()
            free.wait(SOON)
            raise ValueError("too late")

        id = await enqueued(node.queue)
        async with node.executor(note, **SHORT) as executor:
            await eventually_true(running.is_set)
            await database.rows(
                f"update {{table}} set version = version + 1, locked_by = 1, name = 'elsewhere' where id = {id}"
            )
            await node.events.until("lost")
            before = await holder(database, id)
            free.set()
            await eventually_true(lambda: executor.health().running == 0)
            assert await holder(database, id) == before
        assert told(node.events) == ["enqueued", "started", "lost"]


@pytest.mark.parametrize("then", ["returns", "awaits"])
async def test_a_handler_that_blocks_the_loop_past_its_lease_cannot_finish_what_was_taken_over(
    then: str, database: Database
) -> None:
    """F11: its late finish is refused, or, if it still runs, it is cancelled; an event reports the lost lease."""
    taken, refused = threading.Event(), threading.Event()
    cancelled: list[bool] = []
    elsewhere: list[int] = []

    def another_process() -> None:
        """An executor in a loop of its own, which the blocked one cannot hold up."""

        @workq.handler("blocks")
        def rescue(task: workq.Task[int]) -> None:
            elsewhere.append(task.payload)
            taken.set()
            refused.wait(SOON)

        async def serve() -> None:
            async with database.open() as db:
                executor = workq.Executor(workq.Queue(db), [rescue], **SHORT)
                async with executor:
                    await eventually_true(refused.is_set)

        asyncio.run(serve())

    events = Events()
    async with hooked(database, events) as queue:
        thread = threading.Thread(target=another_process)

        @workq.handler("blocks")
        async def blocks(task: workq.Task[int]) -> None:
            thread.start()
            assert taken.wait(SOON)
            if then == "awaits":
                try:
                    await asyncio.sleep(SOON)
                except asyncio.CancelledError:
                    cancelled.append(True)
                    raise

        await enqueued(queue, 7, "blocks")
        try:
            async with workq.Executor(queue, [blocks], **SHORT):
                await events.until("lost")
                assert len(await queue.find()) == 1
        finally:
            refused.set()
            await asyncio.to_thread(thread.join, SOON)
        assert elsewhere == [7]
        assert cancelled == ([True] if then == "awaits" else [])
        assert told(events) == ["enqueued", "started", "lost"]
        assert await queue.find() == []


@pytest.mark.parametrize("change", ["reschedule", "disable"])
async def test_a_task_is_either_moved_away_or_run_never_both(change: str, database: Database) -> None:
    """F13: the claim decides by the row as it is when it takes it."""
    async with nodes(database) as (node, other):
        node.runs.go.set()
        ids = [
            id
            for id in await node.queue.enqueue_many(None, [workq.NewTask("note", number) for number in range(300)])
            if id is not None
        ]
        later = datetime.now(UTC) + timedelta(hours=1)
        async with node.executor(workers=10, claim_ahead=False):
            moved: set[int] = set()
            for id in reversed(ids):
                done = (
                    await other.queue.reschedule(None, id, run_at=later)
                    if change == "reschedule"
                    else await other.queue.disable(None, id)
                )
                if done:
                    moved.add(id)
            await node.queue.wait(timeout=SOON)
        started = {event.id for event in node.events if event.kind == "started"}
        assert moved
        assert started
        assert moved | started == set(ids)
        assert not moved & started


@pytest.mark.parametrize("change", ["reschedule", "disable", "delete"])
async def test_what_an_open_transaction_has_changed_is_run_neither_before_nor_after_its_commit(
    change: str, database: Database
) -> None:
    """F13, one holder: an executor looks at the row while the change is not yet committed."""
    async with wired(database) as (node, wire):
        node.runs.go.set()
        id = await enqueued(node.queue)
        await enqueued(node.queue, 2)
        async with database.caller() as app:
            later = datetime.now(UTC) + timedelta(hours=1)
            match change:
                case "reschedule":
                    assert await node.queue.reschedule(app.tx, id, run_at=later)
                case "disable":
                    assert await node.queue.disable(app.tx, id)
                case _:
                    assert await node.queue.delete(app.tx, id)
            executor = node.executor()
            await executor.start()
            await eventually_true(lambda: wire.asked[wire.sql.claim] >= 2)
            await app.commit()
        try:
            await node.events.until("completed")
            await enqueued(node.queue, 3)
            await node.events.until("completed", 2)
        finally:
            await executor.stop()
        assert node.runs.started == Counter([2, 3])


async def test_a_running_task_that_an_open_transaction_deletes_holds_up_nobody(postgres: PostgresDatabase) -> None:
    """one holder: no beat and no finish of ours waits for a foreign row lock."""
    async with nodes(postgres) as (node, other):
        async with node.executor(workers=6, **SHORT), other.executor(other.handler("elsewhere"), **SHORT):
            doomed = await enqueued(node.queue, "doomed")
            await enqueued(node.queue, "neighbour")
            await node.runs.until(lambda: len(node.runs.running) == 2)
            async with postgres.caller() as app:
                assert await node.queue.delete(app.tx, doomed)

                async def neighbour_lives_on() -> bool:
                    rows = await node.queue.find(state="running")
                    return any(
                        row.payload == "neighbour" and row.locked_until is not None and row.locked_until > until
                        for row in rows
                    )

                until = datetime.now(UTC) + timedelta(seconds=2)
                await eventually(neighbour_lives_on)
                # By its beats, and not because this node took it over from itself when they had failed.
                assert [row.lost for row in await node.queue.find() if row.payload == "neighbour"] == [0]
                assert node.events.count("lost") == 0
                node.runs.go.set()
                await node.events.until("completed")
                await enqueued(node.queue, "another")
                await node.events.until("completed", 2)
                assert node.events.count("lost") == 0
                await app.commit()
            await node.events.until("lost")
        assert node.runs.started == Counter(doomed=1, neighbour=1, another=1)
        assert {event.id for event in node.events if event.kind == "lost"} == {doomed}
        assert await node.queue.find() == []


async def test_a_running_task_whose_deletion_rolls_back_ends_as_if_nothing_had_been(
    postgres: PostgresDatabase,
) -> None:
    """one holder, no trace: its lease ran out meanwhile, but nobody else may have it."""
    async with nodes(postgres) as (node, _):
        async with node.executor(workers=3, **SHORT):
            id = await enqueued(node.queue)
            await node.runs.until(lambda: bool(node.runs.running))
            async with postgres.caller() as app:
                assert await node.queue.delete(app.tx, id)

                async def lease_is_over() -> bool:
                    row = await row_of(node.queue, id)
                    return row.state == "waiting"

                await eventually(lease_is_over)
                node.runs.go.set()
                await eventually_true(lambda: not node.runs.running)
                await app.rollback()
            await node.events.until("completed")
        assert node.runs.started == Counter({1: 1})
        assert told(node.events) == ["enqueued", "started", "completed"]


async def test_a_claim_of_what_runs_here_renews_the_lease_instead_of_starting_twice(database: Database) -> None:
    """one holder: the lease ran out, nobody else came, and this node looks for work."""
    async with nodes(database) as (node, _):
        id = await enqueued(node.queue)
        async with node.executor(workers=3):
            await node.runs.until(lambda: bool(node.runs.running))
            before = await holder(database, id)
            for again in (1, 2):
                await database.age(id, 301)

                async def renewed(again: int = again) -> bool:
                    row = await row_of(node.queue, id)
                    return row.state == "running" and row.lost == again

                await eventually(renewed)
            assert (await holder(database, id))[:2] != before[:2]
            node.runs.go.set()
            await node.events.until("completed")
        assert node.runs.started == Counter({1: 1})
        assert await node.queue.find() == []
        assert told(node.events) == ["enqueued", "started", "completed"]


async def test_each_holder_that_vanishes_counts_and_the_attempts_stay(database: Database) -> None:
    """F06."""
    async with nodes(database) as (node, _):
        id = await enqueued(node.queue)
        for times in (1, 2, 3, 4, 5):
            await vanish(database, id, lost=times - 1)
            runs = Node(node.queue.hub.dialect)
            async with runs.executor() as executor:
                await runs.runs.until(lambda runs=runs: bool(runs.runs.running))
                row = await row_of(node.queue, id)
                assert (row.state, row.lost, row.attempt) == ("running", times, 0)
                started = await runs.events.until("started")
                assert started.attempt == 1
                await executor.stop(0)
            row = await row_of(node.queue, id)
            assert (row.state, row.lost, row.attempt) == ("waiting", times, 0), "a hand-back clears nothing"


@pytest.mark.parametrize("end", [raises, retries, comes_later, fails], ids=lambda end: end.__name__)
async def test_an_accepted_end_clears_the_count(end: Ending, database: Database) -> None:
    """F06: only holders that vanish one after the other count."""
    async with nodes(database) as (node, _):

        @workq.handler("note", retry=workq.linear(retries=5, delay=3600))
        async def note(task: workq.Task[Any]) -> workq.Result:
            result: workq.Result = end(task)
            return workq.Later(3600) if isinstance(result, workq.Later) else result

        id = await enqueued(node.queue)
        await vanish(database, id, lost=2)
        async with node.executor(note):
            await eventually_true(lambda: bool({"failed", "released"} & set(node.events.kinds())))
        assert (await row_of(node.queue, id)).lost == 0


@pytest.mark.parametrize(("max_lost", "lost"), [(0, 0), (2, 2), (3, 3), (5, 5)])
async def test_past_max_lost_a_task_is_parked_with_an_error_that_says_so(
    max_lost: int, lost: int, database: Database
) -> None:
    """F06."""
    async with nodes(database) as (node, _):
        id = await enqueued(node.queue)
        await vanish(database, id, lost=lost)
        node.runs.go.set()
        async with node.executor(max_lost=max_lost):
            failed = await node.events.until("failed")
            assert (failed.id, failed.retry_at, failed.duration) == (id, None, None)
            row = await row_of(node.queue, id)
            assert row.state == "failed"
            assert f"vanished {lost + 1} times" in (row.error or "")
            assert (row.attempt, row.lost, row.payload) == (0, lost + 1, 1)
            assert node.runs.started == Counter()
            # And retry gives it a clean count.
            assert await node.queue.retry(None, id)
            row = await node.queue.get(id)
            assert row is None or row.lost == 0
            await node.events.until("completed")
        assert node.runs.started == Counter({1: 1})


async def test_up_to_max_lost_a_task_is_started_again(database: Database) -> None:
    """F06."""
    async with nodes(database) as (node, _):
        id = await enqueued(node.queue)
        await vanish(database, id, lost=4)
        node.runs.go.set()
        async with node.executor(max_lost=5):
            await node.events.until("completed")
        assert node.runs.started == Counter({1: 1})


async def test_the_neighbours_of_a_killer_are_not_parked_with_it(database: Database) -> None:
    """F06: a task kills every node that runs it, with all the others that run there; they get through in the end."""
    async with database.open() as db:
        events = Events()
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        killed = asyncio.Event()
        finished: list[int] = []

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None:
            if task.payload == 3:
                # The process is gone: nobody beats and nobody hands back, and in time all its leases run out.
                await database.rows(
                    "update {table} set locked_by = 1, locked_until = created_at where locked_until is not null"
                )
                killed.set()
                await asyncio.sleep(SOON)
            await asyncio.sleep(0.05)
            finished.append(task.payload)

        await queue.enqueue_many(None, [workq.NewTask(note, number) for number in range(8)])
        rounds = 0
        while not await queue.find(state="failed"):
            rounds += 1
            assert rounds < 12
            killed.clear()
            executor = workq.Executor(queue, [note], workers=8, max_lost=5, **LONG)
            await executor.start()
            waiting = asyncio.create_task(killed.wait())
            failed = asyncio.create_task(events.until("failed"))
            await asyncio.wait([waiting, failed], timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            failed.cancel()
            await executor.stop(0)
        async with workq.Executor(queue, [note], **LONG):
            await queue.wait(timeout=SOON)
        (killer,) = await queue.find()
        assert (killer.state, killer.payload) == ("failed", 3)
        assert "vanished 6 times" in (killer.error or "")
        assert rounds == 7
        assert set(finished) == set(range(8)) - {3}


async def test_suspects_run_one_at_a_time_and_hold_up_no_others(database: Database) -> None:
    """F06: or the neighbours of a killer would be parked with it."""
    async with nodes(database) as (node, _):
        running: set[int] = set()
        most: Counter[str] = Counter()

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None:
            running.add(task.payload)
            for kind, found in (
                ("suspects", len([one for one in running if one < 6])),
                ("others", len([one for one in running if one >= 6])),
            ):
                most[kind] = max(most[kind], found)
            # A suspect runs for longer than it takes to look for the next.
            await asyncio.sleep(0.15 if task.payload < 6 else 0.02)
            running.discard(task.payload)

        ids = await node.queue.enqueue_many(None, [workq.NewTask("note", number) for number in range(40)])
        await vanish(database, *[id for id in ids[:3] if id is not None], lost=3)
        # Handed back by its last holder: unlocked, and a suspect all the same.
        await database.rows(f"update {{table}} set lost = 3 where id between {ids[3]} and {ids[5]}")
        async with node.executor(note, workers=10):
            await node.queue.wait(timeout=SOON)
        assert most["suspects"] == 1
        assert most["others"] > 1
        assert Counter(node.events.kinds()) == Counter(started=40, completed=40, enqueued=40)


@asynccontextmanager
async def wired(database: Database) -> AsyncGenerator[tuple[Node, Wire]]:
    async with database.open() as db:
        wire = Wire(db)
        node = Node(cast(Dialect, wire))
        await workq.Queue(db).migrate()
        yield node, wire


async def test_what_is_claimed_but_not_started_when_stop_comes_is_handed_back_at_once(database: Database) -> None:
    """F05: the reply to a claim is on its way while stop is called."""
    async with wired(database) as (node, wire):
        claim = wire.replies[wire.sql.claim] = HeldReply()
        ids = await node.queue.enqueue_many(None, [workq.NewTask("note", number) for number in range(5)])
        executor = node.executor()
        await executor.start()
        await claim.sent.wait()
        assert len(await node.queue.find(state="running")) == 5
        stopping = asyncio.create_task(executor.stop())
        await asyncio.sleep(0)
        claim.go.set()
        await stopping
        assert node.runs.started == Counter()
        assert node.events.count("released") == 5
        rows = await node.queue.find()
        assert {row.id for row in rows} == set(ids)
        assert {(row.state, row.attempt, row.lost, row.error) for row in rows} == {("waiting", 0, 0, None)}
        other = Node(node.queue.hub.dialect)
        other.runs.go.set()
        async with other.executor():
            await other.queue.wait(timeout=SOON)
        assert other.runs.started == Counter(range(5))


async def test_what_a_claim_brought_too_late_is_handed_back_instead_of_started(database: Database) -> None:
    """one holder: by the time the reply is read the lease may be over, and somebody else may run the tasks."""
    async with wired(database) as (node, wire):
        claim = wire.replies[wire.sql.claim] = HeldReply()
        id = await enqueued(node.queue)
        async with node.executor(**SHORT):
            await claim.sent.wait()
            await asyncio.sleep(0.5)  # five sixths of the lease
            claim.go.set()
            await node.events.until("released")
            assert (await row_of(node.queue, id)).lost == 0
            node.runs.go.set()
            await node.events.until("completed")
        assert told(node.events) == ["enqueued", "released", "started", "completed"]


async def test_a_claim_whose_reply_was_lost_is_taken_up_at_once_and_counts_as_no_crash(database: Database) -> None:
    """no loss: its rows are ours, so nobody has to wait for the lease."""
    async with wired(database) as (node, wire):
        claim = wire.replies[wire.sql.claim] = DroppedReply()
        id = await enqueued(node.queue)
        async with node.executor():
            await node.runs.until(lambda: bool(node.runs.running))
            assert claim.times == 1
            assert (await row_of(node.queue, id)).lost == 0
            node.runs.go.set()
            await node.events.until("completed")
        assert node.runs.started == Counter({1: 1})


@pytest.mark.parametrize("end", [returns, raises, retries, comes_later], ids=lambda end: end.__name__)
async def test_an_end_whose_reply_was_lost_is_written_and_told_once(end: Ending, database: Database) -> None:
    """fence: it is sent again, and recognised as our own."""
    async with wired(database) as (node, wire):
        dropped = wire.replies[wire.sql.settle] = wire.replies[wire.sql.succeed] = DroppedReply()

        @workq.handler("note")
        async def note(task: workq.Task[Any]) -> Any:
            if task.attempt > 1 or task.payload == "by a stale holder":
                return None
            return end(task)

        id = await enqueued(node.queue)
        async with node.executor(note):
            if end is raises:
                await node.events.until("failed")
                row = await row_of(node.queue, id)
                assert (row.state, row.attempt) == ("failed", 1)
            else:
                await node.events.until("completed")
                assert await node.queue.find() == []
        assert dropped.times == 1
        again = ["failed", "started"] if end is retries else ["released", "started"] if end is comes_later else []
        last = "failed" if end is raises else "completed"
        assert told(node.events) == ["enqueued", "started", *again, last]


async def test_a_hand_back_leaves_attempts_and_the_last_error(database: Database) -> None:
    """F05: stop takes a running task from its handler, and nothing of that counts as a run."""
    async with nodes(database) as (node, other):

        @workq.handler("note", retry=workq.linear(retries=3, delay=0))
        async def note(task: workq.Task[int]) -> None:
            if task.attempt == 1:
                raise ValueError("the first time")
            await node.runs.hold(task.attempt)

        id = await enqueued(node.queue)
        executor = node.executor(note)
        await executor.start()
        await node.runs.until(lambda: bool(node.runs.running))
        await executor.stop(0)
        row = await row_of(node.queue, id)
        assert (row.state, row.attempt, row.lost, row.locked_until) == ("waiting", 1, 0, None)
        assert "the first time" in (row.error or "")
        assert told(node.events) == ["enqueued", "started", "failed", "started", "released"]
        other.runs.go.set()
        async with other.executor():
            started = await other.events.until("started")
            assert started.attempt == 2
            await other.events.until("completed")


async def test_a_claim_that_waited_for_the_writer_brings_whole_leases(sqlite: SQLiteDatabase) -> None:
    """takeover: a task that was claimed behind a transaction longer than the lease is started, not handed back late."""
    async with sqlite.open() as db, session(sqlite) as app:
        node = Node(db)
        node.runs.go.set()
        await node.queue.migrate()
        id = await enqueued(node.queue)
        await app.execute("begin immediate")
        async with node.executor(lease=0.6, poll_interval=0.05):
            await asyncio.sleep(1.5)  # more than two leases in which nobody else can write
            await app.commit()
            await node.events.until("completed")
        assert told(node.events, id) == ["enqueued", "started", "completed"]


async def test_an_executor_that_starts_behind_a_transaction_waits_for_the_beats_of_others(
    sqlite: SQLiteDatabase,
) -> None:
    """one holder: nobody could beat while it was open, so a lease that is over says nothing yet."""
    lease = 3.0
    async with sqlite.open() as db, session(sqlite) as app:
        node = Node(db)
        node.runs.go.set()
        await node.queue.migrate()
        await vanish(sqlite, await enqueued(node.queue))
        await app.execute("begin immediate")
        handler = node.handler()
        hourly = workq.Schedule(handler, workq.every(hours=1), 2)
        executor = node.executor(handler, schedules=[hourly], lease=lease)
        starting = asyncio.create_task(executor.start())
        await asyncio.wait([starting], timeout=0.5)
        assert not starting.done()
        await app.commit()
        await starting
        since = asyncio.get_running_loop().time()
        await node.events.until("started")
        assert asyncio.get_running_loop().time() - since > lease / 3 * 0.9
        await executor.stop()


async def test_what_was_about_to_start_when_the_process_stood_still_is_handed_back(database: Database) -> None:
    """one holder: a start after the lease is over may come beside somebody else's."""
    blocked = list[int]()
    events = Events()

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        if not blocked:
            blocked.append(task.id)
            time.sleep(0.9)  # noqa: ASYNC251 - as if the process was frozen: the other one of the page is next

    async with hooked(database, events) as queue:
        ids = await queue.enqueue_many(None, [workq.NewTask(note, number) for number in range(2)])
        async with workq.Executor(queue, [note], workers=2, lease=0.9, poll_interval=0.05, claim_ahead=False):
            await events.until("completed", 1)
            await queue.wait(timeout=SOON)
        (other,) = {id for id in ids if id is not None} - set(blocked)
    assert told(events, other) == ["enqueued", "released", "started", "completed"]
