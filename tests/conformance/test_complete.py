"""`task.complete(tx)`: the handler's writes and the end of its task commit together, or not at all."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import asyncpg
import pytest

import workq
from support import SOON, Caller, Database, Events, PostgresDatabase, Runs, eventually, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.1, "stop_timeout": 2}
EVERY = workq.every(minutes=10)
CHARGE = workq.Spec("charge", int)


@dataclass
class Cursor:
    """A payload that handlers move on."""

    at: int


class Ledger:
    """A table of the application's own beside workq's, and the transactions that write to it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.table = database.table.replace("workq", "ledger")

    async def make(self) -> None:
        await self.database.rows(f"create table {self.table} (entry integer)")

    async def write(self, app: Caller, entry: int) -> None:
        await app.execute(f"insert into {self.table} values ({entry})")

    async def entries(self) -> list[int]:
        return [entry for (entry,) in await self.database.rows(f"select entry from {self.table} order by entry")]


class Story(NamedTuple):
    """A queue with a ledger beside it, and what was told."""

    queue: workq.Queue
    ledger: Ledger
    events: Events


@asynccontextmanager
async def story(database: Database, *hooks: workq.Hook) -> AsyncGenerator[Story]:
    events = Events()
    async with hooked(database, events, *hooks) as queue:
        ledger = Ledger(database)
        await ledger.make()
        yield Story(queue, ledger, events)


async def stored(queue: workq.Queue, target: workq.Spec[Any], payload: object) -> int:
    id = await queue.enqueue(None, target, payload)
    assert id is not None
    return id


async def make_due(queue: workq.Queue, target: workq.Target) -> int:
    """Let the time of a schedule come. Returns its id."""
    (row,) = await queue.find(target=target)
    assert await queue.reschedule(None, row.id)
    return row.id


async def the_row(queue: workq.Queue, id: int) -> workq.TaskRow:
    row = await queue.get(id)
    assert row is not None
    return row


@asynccontextmanager
async def overtaken(
    database: Database,
    queue: workq.Queue,
    slow: Runs,
    first: workq.Handler[int, Any],
    second: workq.Handler[int, Any],
) -> AsyncGenerator[tuple[int, workq.Executor, Events]]:
    """A task whose lease is over while `first` holds it in `slow`, and an executor elsewhere that takes it over."""
    elsewhere = Events()
    id = await stored(queue, CHARGE, 1)
    async with workq.Executor(queue, [first], workers=1, **QUICK):  # or it would take it over itself
        await slow.until(lambda: "first" in slow.running)
        await database.age(id, 100)
        async with hooked(database, elsewhere) as other, workq.Executor(other, [second], **QUICK) as executor:
            yield id, executor, elsewhere


def due_in(row: workq.TaskRow) -> int:
    """Seconds from the end of the last run to the next, to the half minute."""
    assert row.finished_at is not None
    return round((row.run_at - row.finished_at).total_seconds() / 30) * 30


RESULTS: dict[str, Callable[[], workq.Outcome | None]] = {
    "None": lambda: None,
    "Done": workq.Done,
    "Skip": workq.Skip,
    "Later": lambda: workq.Later(0),
    "Retry": workq.Retry,
    "Fail": lambda: workq.Fail("no use"),
}


async def test_a_commit_ends_the_task_with_the_handlers_own_row(database: Database) -> None:
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                assert await queue.get(task.id, tx=app.tx) is None
                await app.commit()

        await queue.enqueue_many(None, [workq.NewTask(CHARGE, number) for number in range(20)])
        # Claimed ahead, one might be handed back on a busy machine, and `released` be told of it.
        async with workq.Executor(queue, [charge], workers=4, claim_ahead=False, **QUICK):
            await events.until("completed", 20)
        assert await ledger.entries() == list(range(20))
        assert await queue.find() == []
    assert Counter(events.kinds()) == Counter(enqueued=20, started=20, completed=20)


@pytest.mark.parametrize("result", [*RESULTS, "an error", "a timeout"])
async def test_once_committed_the_task_is_done_whatever_its_handler_does_then(result: str, database: Database) -> None:
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE, timeout=1 if result == "a timeout" else None, retry=workq.linear(delay=0))
        async def charge(task: workq.Task[int]) -> workq.Result:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                await app.commit()
            if result == "a timeout":
                await asyncio.Event().wait()
            if result == "an error":
                raise ValueError("afterwards")
            return RESULTS[result]()  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("completed")
        assert await ledger.entries() == [1]
        assert await queue.find() == []
    assert events.kinds() == ["enqueued", "started", "completed"]


@pytest.mark.parametrize("result", RESULTS)
async def test_once_committed_a_ticker_has_moved_on_whatever_its_handler_does_then(
    result: str, database: Database
) -> None:
    async with story(database) as (queue, _, events):

        @workq.handler("sync", retry=workq.linear(delay=0))
        async def sync(task: workq.Task[Cursor]) -> workq.Result:
            task.payload.at += 1
            async with database.caller() as app:
                await task.complete(app.tx)
                await app.commit()
            task.payload.at += 1
            return RESULTS[result]()  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("completed")
        row = await the_row(queue, id)
        assert (row.state, row.payload, row.attempt, row.error, due_in(row)) == ("waiting", {"at": 1}, 0, None, 600)
    assert events.kinds() == ["started", "completed"]


@pytest.mark.parametrize("result", RESULTS)
async def test_a_rollback_is_a_failed_run_whatever_the_handler_returns(result: str, database: Database) -> None:
    """no trace."""
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE, retry=None if result == "Retry" else workq.linear(delay=60))
        async def charge(task: workq.Task[int]) -> workq.Result:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                await app.rollback()
            return RESULTS[result]()  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("failed")
        assert await ledger.entries() == []
        row = await the_row(queue, id)
        assert (row.state, row.attempt) == ("failed" if result == "Fail" else "waiting", 1)
        if result in ("None", "Done", "Skip", "Later"):
            assert "tx was not committed" in (row.error or "")
    assert events.kinds() == ["enqueued", "started", "failed"]


async def test_a_rollback_without_a_policy_keeps_the_task_as_failed(database: Database) -> None:
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("failed")
        assert await ledger.entries() == []
        row = await the_row(queue, id)
        assert (row.state, row.payload) == ("failed", 1)


async def test_an_error_inside_the_transaction_follows_the_policy(database: Database) -> None:
    """no trace: the second run finds the ledger as the first one did."""
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE, retry=workq.linear(retries=1, delay=0))
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.attempt)
                await task.complete(app.tx)
                if task.attempt == 1:
                    raise ConnectionError("in the middle")
                await app.commit()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("completed")
        assert await ledger.entries() == [2]
    assert events.kinds() == ["enqueued", "started", "failed", "started", "completed"]
    assert isinstance(events[2].error, ConnectionError)


async def test_what_was_enqueued_before_completing_commits_with_it(database: Database) -> None:
    """no loss: the next step of a chain exists if and only if this one is done."""
    step = workq.Spec("step", int)
    async with story(database) as (queue, ledger, events):

        @workq.handler(step, retry=workq.linear(delay=0))
        async def work(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                if task.payload < 5:
                    await queue.enqueue(app.tx, step, task.payload + 1)
                await task.complete(app.tx)
                await (app.rollback() if task.attempt == 1 else app.commit())

        await stored(queue, step, 0)
        async with workq.Executor(queue, [work], **QUICK):
            await events.until("completed", 6)
        assert await ledger.entries() == list(range(6))
        assert await queue.find() == []


async def test_a_ticker_moves_on_with_its_payload_in_the_same_transaction(database: Database) -> None:
    async with story(database) as (queue, ledger, events):
        seen: list[workq.TaskRow | None] = []

        @workq.handler("sync")
        async def sync(task: workq.Task[Cursor]) -> None:
            task.payload.at += 1
            async with database.caller() as app:
                await ledger.write(app, task.payload.at)
                await task.complete(app.tx)
                seen.append(await queue.get(task.id))
                seen.append(await queue.get(task.id, tx=app.tx))
                await app.commit()
            seen.append(await queue.get(task.id))

        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("completed")
            before, inside, after = seen
            assert before is not None
            assert inside is not None
            assert after is not None
            assert (before.state, before.payload, before.finished_at) == ("running", {"at": 0}, None)
            for row in (inside, after, await the_row(queue, id)):
                assert (row.state, row.payload, row.attempt, row.error) == ("waiting", {"at": 1}, 0, None)
                assert due_in(row) == 600
            await make_due(queue, sync)
            await events.until("completed", 2)
        assert await ledger.entries() == [1, 2]
        assert (await the_row(queue, id)).payload == {"at": 2}
    assert Counter(events.kinds()) == Counter(started=2, completed=2)


@pytest.mark.parametrize("policy", [None, workq.linear(delay=60)], ids=["no policy", "linear"])
async def test_a_ticker_whose_transaction_rolls_back_keeps_payload_and_time(
    policy: workq.RetryPolicy | None, database: Database
) -> None:
    """no trace: and the run has failed, as that of any other task."""
    async with story(database) as (queue, ledger, events):

        @workq.handler("sync", retry=policy)
        async def sync(task: workq.Task[Cursor]) -> None:
            task.payload.at += 1
            async with database.caller() as app:
                await ledger.write(app, task.payload.at)
                await task.complete(app.tx)
                await app.rollback()

        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        assert await ledger.entries() == []
        row = await the_row(queue, id)
        assert (row.payload, row.attempt) == ({"at": 0}, 1)
        assert row.state == "failed" if policy is None else (row.state, due_in(row)) == ("waiting", 60)


async def test_a_tickers_payload_is_captured_at_the_call(database: Database) -> None:
    """What is done to it after the call is in no transaction, so it is not kept."""
    async with story(database) as (queue, _, events):

        @workq.handler("sync")
        async def sync(task: workq.Task[Cursor]) -> None:
            async with database.caller() as app:
                task.payload.at = 5
                await task.complete(app.tx)
                task.payload.at = 6
                await app.commit()
            task.payload.at = 7

        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("completed")
        assert (await the_row(queue, id)).payload == {"at": 5}


@pytest.mark.parametrize("leaves", [object(), "x" * (1 << 20)], ids=["an object", "too much"])
async def test_a_ticker_that_leaves_what_cannot_be_stored_is_told_so_at_the_call(
    leaves: object, database: Database
) -> None:
    async with story(database) as (queue, ledger, events):
        raised: list[BaseException] = []

        @workq.handler("sync")
        async def sync(task: workq.Task[Any]) -> None:
            task.payload = leaves
            async with database.caller() as app:
                await ledger.write(app, 1)
                try:
                    await task.complete(app.tx)
                except workq.PayloadError as error:
                    raised.append(error)
                    raise
                await app.commit()

        schedule = workq.Schedule(sync, EVERY, "old")
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        assert len(raised) == 1
        assert await ledger.entries() == []
        row = await the_row(queue, id)
        assert (row.state, row.payload) == ("failed", "old")
        assert "PayloadError" in (row.error or "")


async def test_complete_after_a_takeover_is_refused_and_the_new_holders_end_counts(database: Database) -> None:
    """F09, fence: the stale holder's writes go with its transaction."""
    async with story(database) as (queue, ledger, events):
        slow, runs, refused = Runs(), list[str](), list[BaseException]()

        @workq.handler(CHARGE)
        async def first(task: workq.Task[int]) -> None:
            runs.append("first")
            await slow.hold("first")
            async with database.caller() as app:
                await ledger.write(app, 1)
                try:
                    await task.complete(app.tx)
                except workq.LeaseLost as error:
                    refused.append(error)
                    raise
                await app.commit()

        @workq.handler(CHARGE)
        async def second(task: workq.Task[int]) -> None:
            runs.append("second")
            async with database.caller() as app:
                await ledger.write(app, 2)
                await task.complete(app.tx)
                await app.commit()

        async with overtaken(database, queue, slow, first, second) as (id, _, elsewhere):
            await elsewhere.until("completed")
            slow.go.set()
            await events.until("lost")
        assert runs == ["first", "second"]
        assert len(refused) == 1
        assert f"task {id} " in str(refused[0])
        assert await ledger.entries() == [2]
        assert await queue.find() == []
    assert events.kinds() == ["enqueued", "started", "lost"]
    assert elsewhere.kinds() == ["started", "completed"]


async def test_complete_of_a_task_that_runs_elsewhere_by_now_is_refused(database: Database) -> None:
    """fence: and changes nothing of that run."""
    async with story(database) as (queue, ledger, events):
        slow, fast = Runs(), Runs()

        @workq.handler(CHARGE)
        async def first(task: workq.Task[int]) -> None:
            await slow.hold("first")
            async with database.caller() as app:
                await ledger.write(app, 1)
                with pytest.raises(workq.LeaseLost):
                    await task.complete(app.tx)
                await app.rollback()

        @workq.handler(CHARGE)
        async def second(task: workq.Task[int]) -> None:
            await fast.hold("second")

        async with overtaken(database, queue, slow, first, second) as (id, _, elsewhere):
            await fast.until(lambda: "second" in fast.running)
            slow.go.set()
            await events.until("lost")
            assert (await the_row(queue, id)).state == "running"
            fast.go.set()
            await elsewhere.until("completed")
        assert await ledger.entries() == []
        assert await queue.find() == []
    assert events.count("failed") + events.count("completed") == 0


async def test_complete_of_a_deleted_task_is_refused(database: Database) -> None:
    async with story(database) as (queue, ledger, events):
        runs = Runs()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            await runs.hold(task.payload)
            async with database.caller() as app:
                await ledger.write(app, 1)
                await task.complete(app.tx)
                await app.commit()

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await runs.until(lambda: bool(runs.running))
            assert await queue.delete(None, id)
            runs.go.set()
            await events.until("lost")
        assert await ledger.entries() == []
    assert events.kinds() == ["enqueued", "started", "lost"]


async def test_complete_after_the_loss_was_noticed_is_refused_without_asking_the_database(database: Database) -> None:
    """The handler was cancelled for it, but went on."""
    async with story(database) as (queue, ledger, events):
        runs, refused = Runs(), list[BaseException]()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            try:
                await runs.hold(task.payload)
            except asyncio.CancelledError as error:
                refused.append(error)
            async with database.caller() as app:
                await ledger.write(app, 1)
                try:
                    await task.complete(app.tx)
                except workq.LeaseLost as error:
                    refused.append(error)
                await app.rollback()

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], lease=0.6, **QUICK):
            await runs.until(lambda: bool(runs.running))
            assert await queue.delete(None, id)
            await events.until("lost")
            await eventually(lambda: known(lambda: len(refused) == 2))
        assert [type(error) for error in refused] == [asyncio.CancelledError, workq.LeaseLost]


async def known(fact: Callable[[], bool]) -> bool:
    return fact()


async def test_complete_after_the_handler_has_ended_is_refused(database: Database) -> None:
    """By a background task that outlived it, say: the run's end was written by then."""
    async with story(database) as (queue, _, events):
        kept: list[workq.Task[int]] = []

        @workq.handler(CHARGE, retry=workq.linear(delay=60))
        async def charge(task: workq.Task[int]) -> None:
            kept.append(task)
            raise ValueError

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("failed")
            async with database.caller() as app:
                with pytest.raises(workq.LeaseLost, match="no longer this run's"):
                    await kept[0].complete(app.tx)
                await app.commit()
        assert (await the_row(queue, id)).state == "waiting"


async def test_complete_may_be_called_again_after_a_rollback(database: Database) -> None:
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            for attempt in (1, 2, 3):
                async with database.caller() as app:
                    await ledger.write(app, attempt)
                    await task.complete(app.tx)
                    if attempt == 3:
                        await app.commit()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("completed")
        assert await ledger.entries() == [3]
        assert await queue.find() == []
    assert events.kinds() == ["enqueued", "started", "completed"]


async def test_after_a_rollback_the_lease_lives_on(database: Database) -> None:
    """one holder: a handler that goes on after its transaction was rolled back is not started anew beside itself."""
    async with story(database) as (queue, _, events), database.open() as elsewhere:
        runs = Runs()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await task.complete(app.tx)
            await runs.hold(task.payload)

        id = await stored(queue, CHARGE, 1)
        short: dict[str, Any] = {**QUICK, "lease": 0.9}
        async with workq.Executor(queue, [charge], **short), workq.Executor(workq.Queue(elsewhere), [charge], **short):
            await runs.until(lambda: bool(runs.running))
            first = await the_row(queue, id)

            async def outlived() -> bool:
                row = await the_row(queue, id)
                assert first.locked_until is not None
                assert row.locked_until is not None
                return row.locked_until - first.locked_until > timedelta(seconds=1.5)

            await eventually(outlived)
            runs.go.set()
            await events.until("failed")
        assert (await the_row(queue, id)).lost == 0
        assert runs.started == Counter([1])


async def test_a_task_rolled_back_and_then_handed_back_elsewhere_is_told_lost(database: Database) -> None:
    """F09, fence: a row that is still there was not completed, however often it changed meanwhile."""
    async with story(database) as (queue, ledger, events):
        slow, fast = Runs(), Runs()

        @workq.handler(CHARGE)
        async def first(task: workq.Task[int]) -> None:
            if slow.order:
                return
            async with database.caller() as app:
                await ledger.write(app, 1)
                await task.complete(app.tx)
                await app.rollback()
            await slow.hold("first")

        @workq.handler(CHARGE)
        async def second(task: workq.Task[int]) -> None:
            await fast.hold("second")

        async with overtaken(database, queue, slow, first, second) as (_, executor, elsewhere):
            await fast.until(lambda: "second" in fast.running)
            await executor.stop(0)
            assert elsewhere.kinds() == ["started", "released"]
            slow.go.set()
            await queue.wait(timeout=SOON)
        assert await ledger.entries() == []
    assert Counter(events.kinds()) == {"enqueued": 1, "started": 2, "lost": 1, "completed": 1}


async def test_a_ticker_whose_payload_complete_refused_fails_with_that_reason(database: Database) -> None:
    async with story(database) as (queue, _, events):

        @workq.handler("sync")
        async def sync(task: workq.Task[Cursor]) -> None:
            task.payload.at = "not a number"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            async with database.caller() as app:
                with pytest.raises(workq.PayloadError):
                    await task.complete(app.tx)

        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        assert "PayloadError" in ((await the_row(queue, id)).error or "")


async def test_of_a_ticker_completed_again_the_payload_of_the_first_call_counts(database: Database) -> None:
    async with story(database) as (queue, _, events):

        @workq.handler("sync")
        async def sync(task: workq.Task[Cursor]) -> None:
            for attempt in (1, 2):
                task.payload.at = attempt
                async with database.caller() as app:
                    await task.complete(app.tx)
                    if attempt == 2:
                        await app.commit()

        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("completed")
        row = await the_row(queue, id)
        assert (row.payload, due_in(row)) == ({"at": 1}, 600)


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_complete_twice_in_one_transaction_is_refused_and_the_end_of_that_counts(
    end: str, database: Database
) -> None:
    """By a handler that calls a function which completes, and then completes itself."""
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE, retry=workq.linear(delay=60))
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, 1)
                await task.complete(app.tx)
                with pytest.raises(workq.LeaseLost):
                    await task.complete(app.tx)
                await (app.commit() if end == "commit" else app.rollback())

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await queue.wait(timeout=SOON)
        if end == "commit":
            assert await ledger.entries() == [1]
            assert await queue.find() == []
        else:
            assert await ledger.entries() == []
            assert [(row.state, row.attempt) for row in await queue.find()] == [("waiting", 1)]
    assert events.kinds() == ["enqueued", "started", "completed" if end == "commit" else "failed"]


async def test_a_savepoint_that_rolls_back_takes_complete_along(database: Database) -> None:
    """no trace: savepoints included."""
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE, retry=workq.linear(delay=60))
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, 1)
                await app.execute("savepoint s")
                await ledger.write(app, 2)
                await task.complete(app.tx)
                await app.execute("rollback to savepoint s")
                await app.commit()

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("failed")
        assert await ledger.entries() == [1]
        row = await the_row(queue, id)
        assert (row.state, row.attempt) == ("waiting", 1)
        assert "tx was not committed" in (row.error or "")


async def test_after_a_savepoint_that_rolled_back_complete_may_be_called_again(database: Database) -> None:
    async with story(database) as (queue, ledger, events):

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await app.execute("savepoint s")
                await ledger.write(app, 1)
                await task.complete(app.tx)
                await app.execute("rollback to savepoint s")
                await ledger.write(app, 2)
                await task.complete(app.tx)
                await app.commit()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("completed")
        assert await ledger.entries() == [2]
        assert await queue.find() == []


async def test_a_key_is_free_again_in_the_transaction_that_completed_its_task(database: Database) -> None:
    """Complete before re-enqueueing the same key: before it, the running task has the key."""
    keyed = workq.Spec("keyed", int, key=lambda _: "k")
    async with story(database) as (queue, _, events):
        ids: list[int | None] = []

        @workq.handler(keyed)
        async def work(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                ids.append(await queue.enqueue(app.tx, keyed, 2, delay=3600))
                await task.complete(app.tx)
                ids.append(await queue.enqueue(app.tx, keyed, 3, delay=3600))
                await app.commit()

        await stored(queue, keyed, 1)
        async with workq.Executor(queue, [work], **QUICK):
            await events.until("completed")
        (row,) = await queue.find()
        assert ids == [None, row.id]
        assert (row.payload, row.key) == (3, "k")


async def test_a_transaction_held_open_for_longer_than_the_lease_loses_nothing_and_ends_its_task_once(
    database: Database,
) -> None:
    """one holder, fence: no live task is taken over meanwhile, neither this one nor its neighbours, here or there."""
    async with story(database) as (queue, ledger, events), database.open() as other:
        elsewhere, runs = Events(), Runs()
        settings: dict[str, Any] = {"lease": 0.6, "poll_interval": 0.1, "stop_timeout": 5, "workers": 4}

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            runs.started["charge"] += 1
            await runs.until(lambda: len(runs.running) == 6)
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                # The promise is about a time: twice what the lease allows.
                await asyncio.sleep(1.2)
                await app.commit()

        @workq.handler("neighbour")
        async def neighbour(task: workq.Task[int]) -> None:
            await runs.hold(task.payload)

        await stored(queue, CHARGE, 7)
        await queue.enqueue_many(None, [workq.NewTask(neighbour, number) for number in range(6)])
        async with (
            workq.Executor(queue, [charge, neighbour], **settings),
            workq.Executor(workq.Queue(other, on_event=[elsewhere]), [charge, neighbour], **settings),
        ):
            await eventually(lambda: known(lambda: [*events.kinds(), *elsewhere.kinds()].count("completed") == 1))
            # Beats that had to wait have come by now; then everybody ends.
            await asyncio.sleep(0.3)
            runs.go.set()
            await queue.wait(timeout=SOON)
        told = Counter([*events.kinds(), *elsewhere.kinds()])
        assert told == Counter(enqueued=7, started=7, completed=7)
        assert runs.started == Counter({"charge": 1, **dict.fromkeys(range(6), 1)})
        assert await ledger.entries() == [7]
        assert await queue.find() == []


async def test_a_handler_that_goes_on_after_the_commit_is_neither_cancelled_nor_told_lost(database: Database) -> None:
    """From the call on, beats leave the row alone: that it is gone means nothing."""
    async with story(database) as (queue, ledger, events):
        afterwards = asyncio.Event()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                await app.commit()
            await asyncio.sleep(0.5)  # several beats
            afterwards.set()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], lease=0.3, **QUICK):
            await events.until("completed")
        assert afterwards.is_set()
    assert events.kinds() == ["enqueued", "started", "completed"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_transaction_still_open_when_the_handler_returns_is_waited_for(end: str, database: Database) -> None:
    """Nothing is told before it is known: completed on commit, a failed run on rollback."""
    async with story(database) as (queue, ledger, events), database.caller() as app:
        ended = asyncio.Event()
        await app.rollback()

        @workq.handler(CHARGE, retry=workq.linear(delay=60))
        async def charge(task: workq.Task[int]) -> None:
            await app.execute("begin")
            await ledger.write(app, task.payload)
            await task.complete(app.tx)
            asyncio.get_running_loop().call_soon(ended.set)

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], lease=0.6, **QUICK):
            await asyncio.wait_for(ended.wait(), SOON)
            await asyncio.sleep(0.8)  # longer than the lease, and for several looks
            assert events.kinds() == ["enqueued", "started"]
            if end == "commit":
                await app.commit()
                await events.until("completed")
                assert await queue.get(id) is None
                assert await ledger.entries() == [1]
            else:
                await app.rollback()
                await events.until("failed")
                row = await the_row(queue, id)
                assert (row.state, row.attempt) == ("waiting", 1)
                assert await ledger.entries() == []
    assert len(events) == 3


async def test_completed_is_told_after_the_commit_and_not_before_the_handler_has_ended(database: Database) -> None:
    """A hook sees the row gone, and the handler's own row there."""
    looks: list[asyncio.Task[tuple[list[int], list[workq.TaskRow]]]] = []
    order: list[str] = []

    def hook(event: workq.Event) -> None:
        if event.kind == "completed":
            order.append("completed")
            looks.append(asyncio.get_running_loop().create_task(look()))

    async with story(database, hook) as (queue, ledger, events):

        async def look() -> tuple[list[int], list[workq.TaskRow]]:
            return await ledger.entries(), await queue.find()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                order.append("complete")
                await app.commit()
                order.append("commit")
            await asyncio.sleep(0.1)
            order.append("handler")

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("completed")
        assert await looks[0] == ([1], [])
    assert order == ["complete", "commit", "handler", "completed"]


async def test_stop_waits_for_a_handler_inside_its_transaction(database: Database) -> None:
    """clean stop."""
    async with story(database) as (queue, ledger, events):
        runs = Runs()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                await runs.hold(task.payload)
                await app.commit()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK) as executor:
            await runs.until(lambda: bool(runs.running))
            stopping = asyncio.create_task(executor.stop(SOON))
            await asyncio.sleep(0.1)
            assert not stopping.done()
            runs.go.set()
            await stopping
        assert await ledger.entries() == [1]
        assert await queue.find() == []
    assert events.kinds() == ["enqueued", "started", "completed"]


async def test_stop_that_cancels_a_handler_inside_its_transaction_hands_the_task_back(database: Database) -> None:
    """clean stop, no trace: its transaction rolled back, and no attempt is spent."""
    async with story(database) as (queue, ledger, events):
        runs = Runs()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                await runs.hold(task.payload)
                await app.commit()

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK) as executor:
            await runs.until(lambda: bool(runs.running))
            await executor.stop(0)
        assert await ledger.entries() == []
        row = await the_row(queue, id)
        assert (row.state, row.attempt, row.lost, row.error) == ("waiting", 0, 0, None)
    assert events.kinds() == ["enqueued", "started", "released"]


async def test_stop_that_cancels_a_handler_after_its_commit_leaves_it_completed(database: Database) -> None:
    async with story(database) as (queue, ledger, events):
        runs = Runs()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                await task.complete(app.tx)
                await app.commit()
            await runs.hold(task.payload)

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK) as executor:
            await runs.until(lambda: bool(runs.running))
            await executor.stop(0)
        assert await ledger.entries() == [1]
        assert await queue.find() == []
    assert events.kinds() == ["enqueued", "started", "completed"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_stop_returns_in_time_while_a_transaction_is_left_open_and_its_end_counts(
    end: str, database: Database
) -> None:
    """clean stop: within its timeout and a second; the open transaction ends the task, or leaves it to others."""
    async with story(database) as (queue, ledger, events), database.caller() as app:
        await app.rollback()
        ended = asyncio.Event()

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            await app.execute("begin")
            await ledger.write(app, task.payload)
            await task.complete(app.tx)
            asyncio.get_running_loop().call_soon(ended.set)

        id = await stored(queue, CHARGE, 1)
        executor = workq.Executor(queue, [charge], lease=0.6, **QUICK)
        await executor.start()
        await asyncio.wait_for(ended.wait(), SOON)
        clock = asyncio.get_running_loop().time
        since = clock()
        await executor.stop(0.2)
        assert clock() - since < 1.2
        if end == "commit":
            await app.commit()
            assert await queue.find() == []
            assert await ledger.entries() == [1]
        else:
            await app.rollback()
            await database.age(id, 100)

            @workq.handler(CHARGE)
            async def again(task: workq.Task[int]) -> None: ...

            # Short, because an executor that had to wait for SQLite's writer takes nothing over for a third of it.
            async with workq.Executor(queue, [again], lease=0.6, **QUICK):
                await events.until("completed")
            assert await queue.find() == []
            assert await ledger.entries() == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_complete_first_holds_through_any_number_of_beats(level: str, postgres: PostgresDatabase) -> None:
    """Under a snapshot that a later beat would break."""
    async with story(postgres) as (queue, ledger, events):

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            async with postgres.caller() as app:
                await app.execute(f"set transaction isolation level {level}")
                await task.complete(app.tx)
                await asyncio.sleep(0.5)
                await ledger.write(app, task.payload)
                await app.commit()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], lease=0.3, **QUICK):
            await events.until("completed")
        assert await ledger.entries() == [1]
    assert events.kinds() == ["enqueued", "started", "completed"]


async def test_complete_after_a_beat_inside_a_snapshot_is_the_databases_error_and_a_failed_run(
    postgres: PostgresDatabase,
) -> None:
    """Why it must come first there. Nothing is lost: the next run does."""
    async with story(postgres) as (queue, ledger, events):

        @workq.handler(CHARGE, retry=workq.linear(delay=0))
        async def charge(task: workq.Task[int]) -> None:
            async with postgres.caller() as app:
                await app.execute("set transaction isolation level repeatable read")
                await ledger.write(app, task.payload)
                if task.attempt == 1:
                    (row,) = await queue.find()
                    await eventually(lambda: beat_since(queue, row))
                await task.complete(app.tx)
                await app.commit()

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], lease=0.6, **QUICK):
            await events.until("completed")
        assert await ledger.entries() == [1]
        failed = await events.until("failed")
        assert isinstance(failed.error, asyncpg.SerializationError)
    assert events.kinds() == ["enqueued", "started", "failed", "started", "completed"]


async def beat_since(queue: workq.Queue, row: workq.TaskRow) -> bool:
    now = await the_row(queue, row.id)
    return now.locked_until != row.locked_until


async def test_a_task_made_by_hand_has_no_row_to_complete(database: Database) -> None:
    async with database.open(), database.caller() as app:
        with pytest.raises(RuntimeError, match="not given out by an executor"):
            await workq.Task(1).complete(app.tx)


async def test_a_handler_that_swallows_what_complete_raised_has_not_completed(database: Database) -> None:
    """It asked for the end of its task inside a transaction that never was: no other end is put in its place."""
    async with story(database) as (queue, ledger, _):
        swallowed: list[BaseException] = []

        @workq.handler(CHARGE, retry=workq.linear(delay=60))
        async def charge(task: workq.Task[int]) -> None:
            async with database.caller() as app:
                await ledger.write(app, task.payload)
                try:
                    await task.complete(object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                except TypeError as error:
                    swallowed.append(error)
                await app.rollback()

        id = await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await queue.wait(timeout=SOON)
        assert len(swallowed) == 1
        assert await ledger.entries() == []
        row = await the_row(queue, id)
        assert (row.state, row.attempt) == ("waiting", 1)


async def test_complete_needs_a_transaction_and_says_so(database: Database) -> None:
    """None would mean "committed at once", which is what returning from the handler does."""
    async with story(database) as (queue, _, events):
        raised: list[BaseException] = []

        @workq.handler(CHARGE)
        async def charge(task: workq.Task[int]) -> None:
            try:
                await task.complete(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            except TypeError as error:
                raised.append(error)
                raise

        await stored(queue, CHARGE, 1)
        async with workq.Executor(queue, [charge], **QUICK):
            await events.until("failed")
    (error,) = raised
    assert "connection" in str(error)
    assert not re.search("or None", str(error)), error
