"""wait(): until nothing that is due is left, in the table or in the hands of this process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import workq
from support import SOON, Database, Events, HeldReply, Runs, hooked, wired_queue

QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 2}
BRIEF = 0.3
"""For a wait that is to run out."""


@workq.handler("note")
async def note(task: workq.Task[int]) -> None: ...


@workq.handler("other")
async def other(task: workq.Task[int]) -> None: ...


@workq.handler("fails")
async def fails(task: workq.Task[int]) -> None:
    raise ValueError("boom")


@workq.handler("tick")
async def tick(task: workq.Task) -> None: ...


def holding(runs: Runs, name: str = "held") -> workq.Handler[int, Any]:
    @workq.handler(name)
    async def hold(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    return hold


async def runs_out(queue: workq.Queue, *targets: workq.Target) -> str:
    """Wait in vain, and return what the error says."""
    with pytest.raises(TimeoutError) as error:
        await queue.wait(*targets, timeout=BRIEF)
    return str(error.value)


async def test_nothing_to_wait_for_returns_at_once(queue: workq.Queue) -> None:
    await queue.wait(timeout=0.5)
    async with workq.Executor(queue, [note], **QUICK):
        await queue.wait(timeout=SOON)


async def test_it_returns_when_every_due_task_has_ended(queue: workq.Queue) -> None:
    async with workq.Executor(queue, [note, other], **QUICK):
        await queue.enqueue_many(None, [workq.NewTask(name, 1) for name in ("note", "other") for _ in range(50)])
        await queue.wait(timeout=SOON)
        assert await queue.find() == []


async def test_running_tasks_count(queue: workq.Queue) -> None:
    runs = Runs()
    async with workq.Executor(queue, [holding(runs)], **QUICK):
        await queue.enqueue(None, "held", 1)
        await runs.until(lambda: bool(runs.running))
        text = await runs_out(queue)
        assert "1 'held' in queue '', 1 of them running" in text
        waiting = asyncio.create_task(queue.wait(timeout=SOON))
        runs.go.set()
        await waiting
        assert await queue.find() == []


@pytest.mark.parametrize(
    "targets", [(note,), ("note",), (workq.Spec("note", int),), (note, "note", "nothing")], ids=str
)
async def test_only_tasks_of_the_given_kinds_count(targets: tuple[workq.Target, ...], queue: workq.Queue) -> None:
    """Handlers, specs and bare names alike."""
    runs = Runs()
    async with workq.Executor(queue, [holding(runs), note], **QUICK):
        await queue.enqueue(None, "held", 1)
        await runs.until(lambda: bool(runs.running))
        await queue.enqueue(None, note, 2)
        await queue.wait(*targets, timeout=SOON)
        assert [row.name for row in await queue.find()] == ["held"]
        text = await runs_out(queue, "held", *targets)
        assert "note" not in text
        runs.go.set()


async def test_any_queue_counts(queue: workq.Queue) -> None:
    await queue.enqueue(None, "note", 1, queue="elsewhere")
    async with workq.Executor(queue, [note], **QUICK):
        assert "in queue 'elsewhere'" in await runs_out(queue)
        assert "in queue 'elsewhere'" in await runs_out(queue, note)
        async with workq.Executor(queue, [note], queue_name="elsewhere", **QUICK):
            await queue.wait(timeout=SOON)


async def test_failed_tasks_do_not_count(queue: workq.Queue) -> None:
    async with workq.Executor(queue, [fails], **QUICK):
        await queue.enqueue(None, fails, 1)
        await queue.wait(timeout=SOON)
        assert len(await queue.find(state="failed")) == 1


async def test_tasks_of_the_future_do_not_count(queue: workq.Queue) -> None:
    await queue.enqueue(None, note, 1, delay=3600)
    async with workq.Executor(queue, [note], **QUICK):
        await queue.wait(timeout=SOON)
        await queue.wait(note, timeout=SOON)
    assert len(await queue.find()) == 1


async def test_tasks_between_two_runs_do_not_count(queue: workq.Queue) -> None:
    @workq.handler("again", retry=workq.linear(retries=3, delay=3600))
    async def again(task: workq.Task[int]) -> None:
        raise ValueError("boom")

    async with workq.Executor(queue, [again], **QUICK):
        await queue.enqueue(None, again, 1)
        await queue.wait(timeout=SOON)
        (row,) = await queue.find()
        assert (row.state, row.attempt) == ("waiting", 1)


async def test_a_task_put_off_by_later_does_not_count(queue: workq.Queue) -> None:
    @workq.handler("later")
    async def later(task: workq.Task[int]) -> workq.Result:
        return workq.Later(3600)

    async with workq.Executor(queue, [later], **QUICK):
        await queue.enqueue(None, later, 1)
        await queue.wait(timeout=SOON)
        assert len(await queue.find()) == 1


async def test_what_is_not_committed_does_not_count(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        await queue.enqueue(app.tx, note, 1)
        await queue.wait(timeout=SOON)
        await app.commit()
    assert "'note'" in await runs_out(queue)


async def test_a_task_that_a_handler_enqueues_is_waited_for_too(queue: workq.Queue) -> None:
    @workq.handler("chain")
    async def chain(task: workq.Task[int]) -> None:
        if task.payload:
            await queue.enqueue(None, "chain", task.payload - 1)

    async with workq.Executor(queue, [chain], **QUICK):
        await queue.enqueue(None, chain, 20)
        await queue.wait(timeout=SOON)
        assert await queue.find() == []


async def test_what_a_hook_enqueues_soon_is_waited_for_too(database: Database) -> None:
    ran: list[int] = []
    async with database.open() as db:

        def follow(event: workq.Event) -> None:
            if event.kind == "completed" and event.name == "note":
                queue.enqueue_soon("other", event.id)

        queue = workq.Queue(db, on_event=[follow])
        await queue.migrate()

        @workq.handler("other")
        async def remember(task: workq.Task[int]) -> None:
            ran.append(task.payload)

        async with workq.Executor(queue, [note, remember], **QUICK):
            for _ in range(20):
                id = await queue.enqueue(None, note, 1)
                await queue.wait(timeout=SOON)
                assert ran[-1] == id


async def test_a_schedule_that_is_due_and_served_here_counts(database: Database) -> None:
    runs = Runs()
    async with hooked(database) as queue:

        @workq.handler("tick")
        async def slow(task: workq.Task) -> None:
            await runs.hold("tick")

        schedules = [workq.Schedule(slow, workq.every(hours=1))]
        async with workq.Executor(queue, [slow], schedules=schedules, **QUICK):
            await queue.wait(timeout=SOON)  # it is not due
            (row,) = await queue.find()
            await queue.reschedule(None, row.id)
            assert "'tick'" in await runs_out(queue)
            runs.go.set()
            await queue.wait(timeout=SOON)
            (row,) = await queue.find()
            assert row.finished_at is not None


async def test_a_schedule_that_nobody_here_serves_does_not_count(database: Database, queue: workq.Queue) -> None:
    async with workq.Executor(queue, [tick], schedules=[workq.Schedule(tick, workq.every(hours=1))], **QUICK):
        (row,) = await queue.find()
    await database.age(row.id, 86_400)
    await queue.wait(timeout=SOON)
    await queue.wait("tick", timeout=SOON)
    # Nor does it where only its name is served; but an ordinary task of that name does.
    async with workq.Executor(queue, [tick], **QUICK):
        await queue.enqueue(None, tick)
        await queue.wait(timeout=SOON)
    assert [left.id for left in await queue.find()] == [row.id]


async def test_the_hooks_have_run_when_it_returns(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue, workq.Executor(queue, [note, fails], **QUICK):
        for number in range(1, 30):
            await queue.enqueue(None, note, number)
            await queue.enqueue(None, fails, number)
            await queue.wait(timeout=SOON)
            assert events.count("completed") == number
            assert events.count("failed") == number


async def test_the_hooks_have_run_also_for_what_is_put_off_or_handed_back(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("later")
        async def later(task: workq.Task[int]) -> workq.Result:
            return workq.Later(3600) if task.payload % 2 else workq.Retry("again", after=3600)

        async with workq.Executor(queue, [later], **QUICK):
            for number in range(1, 21):
                await queue.enqueue(None, later, number)
                await queue.wait(timeout=SOON)
                assert events.count("released") + events.count("failed") == number


async def test_what_is_deleted_but_not_yet_told_is_waited_for(database: Database) -> None:
    """The row is gone for everybody, and the reply that says so is on its way."""
    events = Events()
    async with wired_queue(database, events) as (wire, queue):
        reply = wire.replies[wire.sql.succeed] = HeldReply()
        async with workq.Executor(queue, [note], **QUICK):
            await queue.enqueue(None, note, 1)
            await reply.sent.wait()
            assert await queue.find() == []
            assert "in the hands of this process" in await runs_out(queue)
            await queue.wait("other", timeout=SOON)
            waiting = asyncio.create_task(queue.wait(note, timeout=SOON))
            reply.go.set()
            await waiting
            assert events.count("completed") == 1


async def test_a_producer_that_never_rests_keeps_nobody_waiting(queue: workq.Queue) -> None:
    """For tasks of other kinds; nor does it use up the patience of stop()."""
    runs = Runs()
    runs.go.set()

    async def produce() -> None:
        while True:
            await queue.enqueue(None, "of nobody here", 1, queue="elsewhere")

    async with workq.Executor(queue, [holding(runs)], poll_interval=0.05, stop_timeout=60) as executor:
        producing = asyncio.create_task(produce())
        await queue.enqueue(None, "held", 1)
        await queue.wait("held", timeout=SOON)
        async with asyncio.timeout(SOON):
            await executor.stop()
        assert not producing.done()
        producing.cancel()


async def test_the_error_says_what_is_left_and_whether_an_executor_here_serves_it(queue: workq.Queue) -> None:
    runs = Runs()
    async with workq.Executor(queue, [holding(runs)], workers=2, **QUICK):
        await queue.enqueue_many(None, [workq.NewTask("held", number) for number in range(5)])
        await queue.enqueue_many(None, [workq.NewTask("nobodys", number, queue="far") for number in range(3)])
        await queue.enqueue(None, "held", 9, queue="far")
        await runs.until(lambda: len(runs.running) == 2)
        text = await runs_out(queue)
        assert f"{BRIEF:g} s" in text
        assert "5 'held' in queue '', 2 of them running, served by an executor here" in text
        assert "3 'nobodys' in queue 'far', 0 of them running, which no executor here serves" in text
        assert "1 'held' in queue 'far', 0 of them running, which no executor here serves" in text
        only = await runs_out(queue, "nobodys")
        assert "held" not in only
        runs.go.set()


async def test_without_a_timeout_it_waits_until_it_is_cancelled(queue: workq.Queue) -> None:
    await queue.enqueue(None, "nobodys", 1)
    waiting = asyncio.create_task(queue.wait())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(BRIEF):
            await asyncio.shield(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    # And the queue is as usable as before.
    assert len(await queue.find()) == 1


async def test_it_waits_for_executors_elsewhere_too(database: Database) -> None:
    """A process without any executor can wait for what others run."""
    runs = Runs()
    async with database.open() as db:
        here, elsewhere = workq.Queue(db), workq.Queue(db)
        await here.migrate()
        await here.enqueue(None, "held", 1)
        assert "which no executor here serves" in await runs_out(here)
        async with workq.Executor(elsewhere, [holding(runs)], **QUICK):
            await runs.until(lambda: bool(runs.running))
            assert "1 of them running, which no executor here serves" in await runs_out(here)
            waiting = asyncio.create_task(here.wait(timeout=SOON))
            runs.go.set()
            await waiting
        assert await here.find() == []


async def test_it_waits_for_tasks_of_several_executors_here(queue: workq.Queue) -> None:
    first, second = Runs(), Runs()
    async with (
        workq.Executor(queue, [holding(first, "a")], **QUICK),
        workq.Executor(queue, [holding(second, "b")], queue_name="two", **QUICK),
    ):
        await queue.enqueue(None, "a", 1)
        await queue.enqueue(None, "b", 1, queue="two")
        await first.until(lambda: bool(first.running))
        await second.until(lambda: bool(second.running))
        waiting = asyncio.create_task(queue.wait(timeout=SOON))
        first.go.set()
        await queue.wait("a", timeout=SOON)
        assert not waiting.done()
        second.go.set()
        await waiting


async def test_many_may_wait_at_once(queue: workq.Queue) -> None:
    async with workq.Executor(queue, [note, other], **QUICK):
        await queue.enqueue_many(None, [workq.NewTask(name, 1) for name in ("note", "other") for _ in range(20)])
        await asyncio.gather(*(queue.wait(*kind, timeout=SOON) for kind in [(), (note,), (other,), (note, other)] * 5))
        assert await queue.find() == []


async def test_a_task_that_was_lost_is_not_waited_for_here(queue: workq.Queue) -> None:
    """Deleted while it runs: its handler may go on for long, but nothing is left."""
    free, started = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @workq.handler("stuck")
    def stuck(task: workq.Task[int]) -> None:
        loop.call_soon_threadsafe(started.set)
        free.wait(SOON)

    try:
        async with workq.Executor(queue, [stuck], lease=0.6, **QUICK):
            id = await queue.enqueue(None, stuck, 1)
            assert id is not None
            await started.wait()
            assert await queue.delete(None, id)
            await queue.wait(timeout=SOON / 2)
            assert not free.is_set()
            free.set()
    finally:
        free.set()


async def test_from_another_event_loop_it_is_an_error(queue: workq.Queue) -> None:
    await queue.enqueue(None, note, 1)

    def in_another_loop() -> None:
        asyncio.run(queue.wait(timeout=1))

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(in_another_loop)


@pytest.mark.parametrize("target", [5, None, b"note", ValueError])
async def test_a_target_is_a_handler_a_spec_or_a_name(target: Any, queue: workq.Queue) -> None:
    with pytest.raises(TypeError, match="name"):
        await queue.wait(target, timeout=1)
