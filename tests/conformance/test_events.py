"""Events: one hook sees everything that happens to a task, each after the fact, and none of it twice."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

import workq
from support import SOON, Caller, Database, Events, Runs, eventually, hooked, told

QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 2}
NOTE = workq.Spec("note", str, queue="notes", key=lambda text: f"key of {text}")


@workq.handler(NOTE)
async def note(task: workq.Task[str]) -> None: ...


async def stored(queue: workq.Queue, target: Any = note, payload: Any = "hello", **options: Any) -> int:
    id = await queue.enqueue(None, target, payload, **options)
    assert id is not None
    return id


async def test_a_task_that_succeeds_is_enqueued_started_and_completed(database: Database) -> None:
    events, before = Events(), datetime.now(UTC)
    async with hooked(database, events) as queue:
        id = await stored(queue, headers={"trace": "abc"})
        async with workq.Executor(queue, [note], **QUICK):
            await events.until("completed")
    enqueued, started, completed = events
    assert events.kinds() == ["enqueued", "started", "completed"]
    for event in events:
        assert (event.id, event.queue, event.name, event.key) == (id, "notes", "note", "key of hello")
        assert (event.attempt, event.in_tx, event.error, event.retry_at) == (1, False, None, None)
        assert event.headers == {"trace": "abc"}
        assert event.at.tzinfo is UTC
    assert before <= enqueued.at <= started.at <= completed.at <= datetime.now(UTC)
    assert enqueued.duration is None
    assert started.duration is None
    assert completed.duration is not None


async def test_the_duration_is_the_handlers(database: Database) -> None:
    events, runs = Events(), Runs()
    async with hooked(database, events) as queue:

        @workq.handler("slow")
        async def slow(task: workq.Task[str]) -> None:
            await runs.hold(task.payload)

        # Two wait for a place meanwhile, which is no part of it.
        async with workq.Executor(queue, [slow], workers=1, **QUICK):
            for number in range(3):
                await stored(queue, slow, str(number))
            await runs.until(lambda: bool(runs.running))
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(0.2)
            held = asyncio.get_running_loop().time() - began
            runs.go.set()
            await events.until("completed", 3)
    first, *others = [event.duration or 0 for event in events if event.kind == "completed"]
    assert first >= held
    assert all(duration < first for duration in others)


async def test_a_failure_is_told_with_its_error_and_duration_once_it_is_stored(database: Database) -> None:
    boom = ValueError("boom")
    stored_error: list[str | None] = []

    async with database.open() as db:
        events, looks = Events(), list[asyncio.Task[None]]()

        def look(event: workq.Event) -> None:
            async def read() -> None:
                row = await queue.get(event.id)
                stored_error.append(None if row is None else row.error)

            if event.kind == "failed":
                looks.append(asyncio.get_running_loop().create_task(read()))

        queue = workq.Queue(db, on_event=[events, look])
        await queue.migrate()

        @workq.handler("fails")
        async def fails(task: workq.Task[str]) -> None:
            raise boom

        async with workq.Executor(queue, [fails], **QUICK):
            id = await stored(queue, fails)
            failed = await events.until("failed")
            await asyncio.gather(*looks)
    assert told(events, id) == ["enqueued", "started", "failed"]
    assert failed.error is boom
    assert failed.duration is not None
    assert failed.retry_at is None
    assert stored_error[0] is not None
    assert stored_error[0].startswith("ValueError: boom")


async def test_every_failed_run_is_told_and_says_when_it_runs_again(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("fails", retry=lambda failed, error: 0.1 * failed if failed < 3 else None)
        async def fails(task: workq.Task[str]) -> None:
            raise ValueError(f"boom {task.attempt}")

        async with workq.Executor(queue, [fails], **QUICK):
            id = await stored(queue, fails)
            await events.until("failed", 3)
    assert told(events, id) == ["enqueued", *["started", "failed"] * 3]
    failures = [event for event in events if event.kind == "failed"]
    assert [event.attempt for event in failures] == [1, 2, 3]
    assert [event.attempt for event in events if event.kind == "started"] == [1, 2, 3]
    assert [str(event.error) for event in failures] == ["boom 1", "boom 2", "boom 3"]
    first, second, last = (event.retry_at for event in failures)
    assert last is None
    for number, again in ((1, first), (2, second)):
        assert again is not None
        assert again.tzinfo is UTC
        assert abs(again - failures[number - 1].at - timedelta(seconds=0.1 * number)) < timedelta(seconds=1)


@pytest.mark.parametrize(
    ("result", "error"),
    [(workq.Fail("no"), "no"), (workq.Skip("nothing"), "nothing"), (workq.Fail(KeyError("k")), KeyError)],
    ids=["Fail", "Skip", "Fail with an exception"],
)
async def test_a_final_result_is_told_as_a_failure(result: workq.Result, error: object, database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("fails", retry=workq.linear(retries=3, delay=0))
        async def fails(task: workq.Task[str]) -> workq.Result:
            return result

        async with workq.Executor(queue, [fails], **QUICK):
            id = await stored(queue, fails)
            failed = await events.until("failed")
    assert told(events, id) == ["enqueued", "started", "failed"]
    assert failed.error == error if isinstance(error, str) else isinstance(failed.error, cast(type, error))
    assert failed.retry_at is None


async def test_a_retry_by_hand_is_told(database: Database) -> None:
    events, broken = Events(), True
    async with hooked(database, events) as queue:

        @workq.handler(workq.Spec("fails", str, queue="notes", key=lambda text: text))
        async def fails(task: workq.Task[str]) -> None:
            if broken:
                raise ValueError("boom")

        async with workq.Executor(queue, [fails], **QUICK):
            id = await stored(queue, fails, "k", headers={"trace": "abc"})
            await events.until("failed")
        assert await queue.retry(None, id)
        broken = False
        async with workq.Executor(queue, [fails], **QUICK):
            await events.until("completed")
        assert not await queue.retry(None, id)
    assert told(events, id) == ["enqueued", "started", "failed", "retried", "started", "completed"]
    retried = await events.until("retried")
    assert (retried.queue, retried.name, retried.key, retried.in_tx) == ("notes", "fails", "k", False)
    assert retried.headers == {"trace": "abc"}
    assert [event.attempt for event in events if event.kind == "started"] == [1, 1]


async def test_retry_all_tells_of_each(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("fails")
        async def fails(task: workq.Task[str]) -> None:
            raise ValueError("boom")

        async with workq.Executor(queue, [fails], **QUICK):
            ids = [await stored(queue, fails) for _ in range(3)]
            await events.until("failed", 3)
        assert await queue.retry_all(None) == 3
    assert sorted(event.id for event in events if event.kind == "retried") == ids


async def test_what_is_enqueued_in_a_transaction_is_told_before_its_commit(database: Database) -> None:
    """W: they fire before your commit, so the transaction can still be rolled back afterwards."""
    events = Events()
    async with hooked(database, events) as queue:
        async with database.caller() as app:
            id = await queue.enqueue(app.tx, note, "never")
            assert id is not None
            (event,) = events
            assert (event.kind, event.id, event.in_tx) == ("enqueued", id, True)
            await app.rollback()
        assert await queue.find() == []
    assert told(events) == ["enqueued"]


async def test_what_is_retried_in_a_transaction_is_told_before_its_commit(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        id = await stored(queue)
        assert await queue.disable(None, id)
        async with database.caller() as app:
            assert await queue.retry(app.tx, id)
            assert [(event.kind, event.in_tx) for event in events if event.kind == "retried"] == [("retried", True)]
            await app.commit()
    assert told(events, id) == ["enqueued", "retried"]


async def test_every_way_of_enqueueing_is_told_once_and_a_taken_key_not_at_all(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        async def many(tx: Caller | None) -> list[int | None]:
            tasks = [workq.NewTask(note, f"{tx is None} {n}") for n in (0, 0, 1)]
            return await queue.enqueue_many(None if tx is None else tx.tx, tasks)

        alone = await stored(queue, note, "alone")
        assert await queue.enqueue(None, note, "alone") is None
        outside = await many(None)
        queue.enqueue_soon(note, "soon")
        queue.enqueue_soon(note, "soon")
        await events.until("enqueued", 4)
        async with database.caller() as app:
            inside = await many(app)
            await app.commit()
        rows = {row.id for row in await queue.find()}
    assert {alone, *outside, *inside} - {None} <= rows
    assert Counter(event.id for event in events) == Counter(rows)
    assert {event.id for event in events if event.in_tx} == set(inside) - {None}


async def test_completed_is_told_only_when_the_row_is_gone_for_everybody(database: Database) -> None:
    gone: list[bool] = []
    async with database.open() as db:
        looks, events = list[asyncio.Task[None]](), Events()

        def look(event: workq.Event) -> None:
            async def read() -> None:
                rows = await database.rows(f"select 1 from {{table}} where id = {event.id}")
                gone.append(rows == [])

            if event.kind == "completed":
                looks.append(asyncio.get_running_loop().create_task(read()))

        queue = workq.Queue(db, on_event=[events, look])
        await queue.migrate()
        async with workq.Executor(queue, [note], **QUICK):
            for number in range(20):
                await stored(queue, note, str(number))
            await events.until("completed", 20)
            await asyncio.gather(*looks)
    assert gone == [True] * 20


async def test_after_complete_in_a_transaction_completed_waits_for_its_commit(database: Database) -> None:
    events, about_to_commit = Events(), asyncio.Event()
    go = asyncio.Event()
    async with hooked(database, events) as queue:

        @workq.handler("within")
        async def within(task: workq.Task[str]) -> None:
            async with database.caller() as app:
                await task.complete(app.tx)
                about_to_commit.set()
                await go.wait()
                await app.commit()

        async with workq.Executor(queue, [within], **QUICK):
            id = await stored(queue, within)
            await about_to_commit.wait()
            assert told(events, id) == ["enqueued", "started"]
            go.set()
            await events.until("completed")
            assert await queue.find() == []
    assert told(events, id) == ["enqueued", "started", "completed"]


async def test_after_complete_in_a_transaction_that_rolls_back_the_run_has_failed(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("within")
        async def within(task: workq.Task[str]) -> None:
            async with database.caller() as app:
                await task.complete(app.tx)
                await app.rollback()

        async with workq.Executor(queue, [within], **QUICK):
            id = await stored(queue, within)
            await events.until("failed")
            assert len(await queue.find(state="failed")) == 1
    assert told(events, id) == ["enqueued", "started", "failed"]


async def test_what_stop_hands_back_is_released(database: Database) -> None:
    events, runs = Events(), Runs()
    async with hooked(database, events) as queue:

        @workq.handler("slow", retry=workq.linear(retries=3, delay=0))
        async def slow(task: workq.Task[str]) -> None:
            await runs.hold(task.payload)

        async with workq.Executor(queue, [slow], **QUICK) as executor:
            id = await stored(queue, slow)
            await runs.until(lambda: bool(runs.running))
            await executor.stop(0)
        released = events[-1]
    # Again, perhaps: a claim that was under way took it, and gave it back at once.
    assert told(events, id)[:3] == ["enqueued", "started", "released"]
    assert set(told(events, id)[3:]) <= {"released"}
    assert (released.attempt, released.error, released.retry_at) == (1, None, None)


async def test_later_is_released_and_no_failure(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        times = 0

        @workq.handler("waits")
        async def waits(task: workq.Task[str]) -> workq.Result:
            nonlocal times
            times += 1
            return workq.Later(0) if times < 3 else None

        async with workq.Executor(queue, [waits], **QUICK):
            id = await stored(queue, waits)
            await events.until("completed")
    assert told(events, id) == ["enqueued", *["started", "released"] * 2, "started", "completed"]
    assert {event.attempt for event in events} == {1}


async def test_a_delayed_copy_can_be_enqueued_from_the_hook(database: Database) -> None:
    """W: to add an automatic retry, enqueue a delayed copy from the handler or from the OnEvent hook."""
    events, runs = Events(), Counter[str]()
    async with database.open() as db:

        def copy(event: workq.Event) -> None:
            if event.kind == "failed" and event.name == "fails":
                left = int(event.headers.get("left", "2"))
                if left:
                    queue.enqueue_soon(
                        "fails", f"copy {left}", queue=event.queue, delay=0.05, headers={"left": str(left - 1)}
                    )

        queue = workq.Queue(db, on_event=[copy, events])
        await queue.migrate()

        @workq.handler("fails", queue="notes")
        async def fails(task: workq.Task[str]) -> None:
            runs[task.payload] += 1
            raise ValueError("boom")

        async with workq.Executor(queue, [fails], **QUICK):
            await stored(queue, fails, "original")
            await events.until("failed", 3)
        assert runs == Counter({"original": 1, "copy 2": 1, "copy 1": 1})
        assert len(await queue.find(state="failed")) == 3
    assert events.count("enqueued") == 3


async def test_what_the_hook_enqueues_at_the_very_end_is_stored_before_stop_returns(database: Database) -> None:
    """no loss: `enqueue_soon` is flushed by stop."""
    async with database.open() as db:

        def follow(event: workq.Event) -> None:
            if event.kind == "completed":
                queue.enqueue_soon("follow-up", event.id)

        queue = workq.Queue(db, on_event=[follow])
        await queue.migrate()
        executor = workq.Executor(queue, [note], **QUICK)
        await executor.start()
        ids = [await stored(queue, note, str(number)) for number in range(20)]
        await queue.wait(note, timeout=SOON)
        await executor.stop()
        assert sorted(row.payload for row in await queue.find(target="follow-up")) == ids


async def test_hooks_are_called_in_their_order_in_the_event_loop(database: Database) -> None:
    called: list[tuple[str, str]] = []

    def hook(name: str, event: workq.Event) -> None:
        asyncio.get_running_loop()
        called.append((name, event.kind))

    events = Events()
    hooks = [functools.partial(hook, "first"), functools.partial(hook, "second"), events]
    async with hooked(database, *hooks) as queue:
        await stored(queue)
        async with workq.Executor(queue, [note], **QUICK):
            await events.until("completed")
    assert called == [(name, kind) for kind in ("enqueued", "started", "completed") for name in ("first", "second")]


async def test_each_executor_tells_the_hooks_of_its_own_queue(database: Database) -> None:
    """W: fired on the node that enqueued, or that runs the task."""
    async with database.open() as db:
        producer, consumer = Events(), Events()
        mine, theirs = workq.Queue(db, on_event=[producer]), workq.Queue(db, on_event=[consumer])
        await mine.migrate()
        async with workq.Executor(theirs, [note], **QUICK):
            await stored(mine)
            await consumer.until("completed")
    assert told(producer) == ["enqueued"]
    assert told(consumer) == ["started", "completed"]


async def test_an_async_hook_is_refused_with_the_remedy(database: Database) -> None:
    async def hook(event: workq.Event) -> None: ...

    async with database.open() as db:
        with pytest.raises(TypeError, match="enqueue_soon"):
            workq.Queue(db, on_event=[cast(Any, hook)])


async def test_a_log_line_of_a_failure_has_names_and_ids_but_no_payload(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F61, F62: one line for each outcome, its fields under a prefix of ours."""
    events = Events()

    @workq.handler("fails", queue="notes")
    async def fails(task: workq.Task[str]) -> None:
        raise ValueError("boom\nforged line")

    with caplog.at_level(logging.DEBUG, "workq"):
        async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
            id = await stored(queue, fails, "the secret")
            await events.until("failed")
    (line,) = [record for record in caplog.records if f"task {id} " in record.getMessage()]
    fields = vars(line)
    assert (fields["workq_task_id"], fields["workq_task"], fields["workq_queue"]) == (id, "fails", "notes")
    assert line.levelno == logging.WARNING
    for record in caplog.records:
        assert "the secret" not in record.getMessage()
        assert "\n" not in record.getMessage()


async def test_a_lost_task_is_told_once(database: Database) -> None:
    events, runs = Events(), Runs()
    async with hooked(database, events) as queue:

        @workq.handler("slow")
        async def slow(task: workq.Task[str]) -> None:
            await runs.hold(task.payload)

        async with workq.Executor(queue, [slow], lease=0.6, **QUICK):
            id = await stored(queue, slow)
            await runs.until(lambda: bool(runs.running))
            assert await queue.delete(None, id)
            lost = await events.until("lost")
            await eventually(lambda: nothing_runs(runs))
            await stored(queue, slow, "another")
            runs.go.set()
            await events.until("completed")
    assert told(events, id) == ["enqueued", "started", "lost"]
    assert (lost.name, lost.attempt, lost.error, lost.retry_at) == ("slow", 1, None, None)


async def nothing_runs(runs: Runs) -> bool:
    return not runs.running
