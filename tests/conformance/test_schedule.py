"""one schedule: one row for each, never doubled, never lost unless deleted, and after a pause one catch-up run."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast

import pytest

import workq
from support import SOON, Database, Events, Runs, eventually, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 2}
HOURLY = workq.every(hours=1)
HOUR = timedelta(hours=1)


async def rows_of(queue: workq.Queue, name: str = "tick") -> list[workq.TaskRow]:
    return [row for row in await queue.find(target=name) if row.scheduled]


async def row_of(queue: workq.Queue, name: str = "tick") -> workq.TaskRow:
    """The one row of a schedule."""
    (row,) = await rows_of(queue, name)
    return row


async def settled(queue: workq.Queue, state: str) -> workq.TaskRow:
    """The one row of the schedule, when its run has ended that way."""

    async def ended() -> bool:
        row = await row_of(queue)
        return row.state == state and row.finished_at is not None

    await eventually(ended)
    return await row_of(queue)


async def run_now(queue: workq.Queue) -> None:
    """Bring the next run forward."""
    assert await queue.reschedule(None, (await row_of(queue)).id)


def close(found: datetime | None, wanted: datetime) -> bool:
    """The same but for the seconds a test takes. (Schedules here are hours apart.)"""
    return found is not None and abs(found - wanted) < timedelta(seconds=SOON)


@workq.handler("tick")
async def tick(task: workq.Task) -> None: ...


@workq.handler("other")
async def other(task: workq.Task[int]) -> None: ...


@dataclass
class Times:
    """A schedule that remembers what it was asked."""

    pause: timedelta = HOUR
    asked: list[datetime] = field(default_factory=list[datetime])

    def __call__(self, last: datetime) -> datetime:
        self.asked.append(last)
        return last + self.pause


async def test_the_first_run_is_the_schedule_of_now(queue: workq.Queue) -> None:
    times = Times()
    async with workq.Executor(queue, [tick], schedules=[workq.Schedule(tick, times)], **QUICK):
        row = await row_of(queue)
    (asked,) = times.asked
    assert asked.tzinfo is UTC
    assert close(asked, datetime.now(UTC))
    assert row.run_at == asked + HOUR
    assert (row.queue, row.name, row.key, row.state, row.scheduled) == ("", "tick", "", "waiting", True)
    assert (row.attempt, row.lost, row.error, row.finished_at) == (0, 0, None, None)


async def test_eight_executors_that_start_at_once_make_one_row(database: Database) -> None:
    """F16: as if one node had registered, and none fails to start."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(database.open()) for _ in range(4)]
        queue = workq.Queue(opened[0])
        await queue.migrate()
        for name in ("first", "second", "third"):

            @workq.handler(name)
            async def handle(task: workq.Task[str]) -> None: ...

            schedules = [workq.Schedule(handle, HOURLY, key, key=key) for key in ("", "a", "b")]
            executors = [workq.Executor(workq.Queue(db), [handle], schedules=schedules, **QUICK) for db in opened * 2]
            before = datetime.now(UTC)
            await asyncio.gather(*(executor.start() for executor in executors))
            after = datetime.now(UTC)
            rows = await rows_of(queue, name)
            assert sorted((row.key, row.payload) for row in rows) == [("", ""), ("a", "a"), ("b", "b")]
            for row in rows:
                assert before + HOUR - timedelta(seconds=1) <= row.run_at <= after + HOUR + timedelta(seconds=1)
            await asyncio.gather(*(executor.stop() for executor in executors))


async def test_a_restart_does_not_move_it(queue: workq.Queue) -> None:
    """W: restarts don't reset it; neither the time nor the payload."""

    @workq.handler("tick")
    async def counting(task: workq.Task[int]) -> None: ...

    async with workq.Executor(queue, [counting], schedules=[workq.Schedule(counting, HOURLY, 1)], **QUICK):
        first = await row_of(queue)
    changed = workq.Schedule(counting, workq.every(seconds=1), 2)
    for _ in range(2):
        async with workq.Executor(queue, [counting], schedules=[changed], **QUICK):
            assert await row_of(queue) == first


async def test_new_code_takes_effect_after_the_next_run(database: Database) -> None:
    """W: a schedule change in code takes effect after the task's next run."""
    events = Events()
    async with hooked(database, events) as queue:
        async with workq.Executor(queue, [tick], schedules=[workq.Schedule(tick, HOURLY)], **QUICK):
            first = await row_of(queue)
        daily = workq.Schedule(tick, workq.every(days=1))
        async with workq.Executor(queue, [tick], schedules=[daily], **QUICK):
            assert (await row_of(queue)).run_at == first.run_at
            await run_now(queue)
            await events.until("completed")
            assert close((await row_of(queue)).run_at, datetime.now(UTC) + timedelta(days=1))


async def test_one_handler_may_have_many_schedules_each_with_a_key(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        seen: list[tuple[str | None, str]] = []

        @workq.handler(workq.Spec("report", str, priority=7))
        async def report(task: workq.Task[str]) -> None:
            seen.append((task.key, task.payload))

        schedules = [
            workq.Schedule(report, workq.every(hours=hours), f"every {hours}", key=key)
            for key, hours in (("", 1), ("a", 2), ("b", 3))
        ]
        async with workq.Executor(queue, [report], schedules=schedules, **QUICK):
            for row in await rows_of(queue, "report"):
                assert row.priority == 7
                await queue.reschedule(None, row.id)
            await events.until("completed", 3)
            rows = {row.key: row.run_at for row in await rows_of(queue, "report")}
        assert sorted(seen, key=str) == [("", "every 1"), ("a", "every 2"), ("b", "every 3")]
        for key, hours in (("", 1), ("a", 2), ("b", 3)):
            assert close(rows[key], datetime.now(UTC) + timedelta(hours=hours))


async def test_a_schedule_belongs_to_the_queue_of_its_executor(queue: workq.Queue) -> None:
    schedules = [workq.Schedule(tick, HOURLY)]
    async with (
        workq.Executor(queue, [tick], schedules=schedules, queue_name="one", **QUICK),
        workq.Executor(queue, [tick], schedules=schedules, queue_name="two", **QUICK),
    ):
        assert sorted(row.queue for row in await rows_of(queue)) == ["one", "two"]


async def test_its_key_is_apart_from_the_keys_of_tasks(queue: workq.Queue) -> None:
    keys = ["", "a"]
    ids = [await queue.enqueue(None, "tick", key=key, delay=3600) for key in keys]
    schedules = [workq.Schedule(tick, HOURLY, key=key) for key in keys]
    async with workq.Executor(queue, [tick], schedules=schedules, **QUICK):
        assert sorted(row.key or "" for row in await rows_of(queue)) == keys
        assert len(await queue.find()) == 4
        assert [await queue.enqueue(None, "tick", key=key) for key in keys] == [None, None]
    assert None not in ids


async def test_enqueue_of_a_scheduled_name_adds_an_ordinary_task(database: Database) -> None:
    events, schedules = Events(), [workq.Schedule(tick, HOURLY)]
    async with hooked(database, events) as queue, workq.Executor(queue, [tick], schedules=schedules, **QUICK):
        first = await row_of(queue)
        id = await queue.enqueue(None, tick)
        completed = await events.until("completed")
        assert completed.id == id
        assert await queue.find() == [first]


def raises(last: datetime) -> datetime:
    raise LookupError("no calendar")


def naive(last: datetime) -> datetime:
    return last.replace(tzinfo=None)


def nonsense(answer: object) -> workq.When:
    return lambda last: cast(Any, answer)


@pytest.mark.parametrize(
    ("when", "kind", "says"),
    [
        (raises, LookupError, "no calendar"),
        (naive, ValueError, "naive"),
        (nonsense(None), ValueError, "None"),
        (nonsense("2026-01-01"), ValueError, "2026-01-01"),
        (nonsense(date(2026, 1, 1)), ValueError, "2026"),
        (nonsense(3600), ValueError, "3600"),
        (nonsense(datetime(2500, 1, 1, tzinfo=UTC)), ValueError, "100 years"),
    ],
    ids=["raises", "naive", "None", "str", "date", "number", "far"],
)
async def test_a_schedule_function_that_goes_wrong_at_start_makes_start_raise_and_leaves_no_row(
    when: workq.When, kind: type[Exception], says: str, queue: workq.Queue
) -> None:
    """F49 among others: every schedule gets its row, or start() raises and there is none."""
    schedules = [workq.Schedule(tick, HOURLY, key="good"), workq.Schedule(tick, when, key="bad")]
    executor = workq.Executor(queue, [tick], schedules=schedules, **QUICK)
    with pytest.raises(kind, match=says):
        await executor.start()
    assert await queue.find() == []


async def test_a_payload_that_was_spoiled_meanwhile_makes_start_raise_and_leaves_no_row(queue: workq.Queue) -> None:
    @workq.handler("tick")
    async def takes(task: workq.Task[list[float]]) -> None: ...

    payload = [1.0]
    schedules = [workq.Schedule(takes, HOURLY, [1.0], key="good"), workq.Schedule(takes, HOURLY, payload, key="bad")]
    executor = workq.Executor(queue, [takes], schedules=schedules, **QUICK)
    payload[0] = float("nan")
    with pytest.raises(workq.PayloadError):
        await executor.start()
    assert await queue.find() == []


async def test_after_success_the_next_run_is_the_schedule_of_the_finish(database: Database) -> None:
    events, runs, times = Events(), Runs(), Times()
    async with hooked(database, events) as queue:

        @workq.handler("tick")
        async def slow(task: workq.Task) -> None:
            await runs.hold("tick")

        async with workq.Executor(queue, [slow], schedules=[workq.Schedule(slow, times)], **QUICK):
            await run_now(queue)
            await runs.until(lambda: bool(runs.running))
            released = datetime.now(UTC)
            runs.go.set()
            completed = await events.until("completed")
            row = await row_of(queue)
        finish = times.asked[-1]
        assert len(times.asked) == 2
        # To the accuracy with which the database's clock at the claim is known here.
        assert released - timedelta(seconds=0.5) <= finish <= completed.at + timedelta(seconds=0.5)
        assert row.run_at == finish + HOUR
        assert (row.state, row.attempt, row.lost, row.error, row.locked_until) == ("waiting", 0, 0, None, None)
        assert row.finished_at is not None


async def test_after_a_pause_of_any_length_there_is_one_catch_up_run(database: Database) -> None:
    """F47: ten days of missed minutes are made up for by one run, and the next is a minute after it."""
    events = Events()
    async with hooked(database, events) as queue:
        schedules = [workq.Schedule(tick, workq.every(minutes=1))]
        async with workq.Executor(queue, [tick], schedules=schedules, **QUICK):
            pass
        await database.age((await row_of(queue)).id, 10 * 86_400)
        async with workq.Executor(queue, [tick, other], schedules=schedules, **QUICK):
            completed = await events.until("completed")
            row = await row_of(queue)
            assert close(row.run_at, completed.at + timedelta(minutes=1))
            assert row.run_at > completed.at + timedelta(seconds=50)
            for number in range(3):
                await queue.enqueue(None, other, number)
                await queue.wait(timeout=SOON)
        assert [event.kind for event in events if event.name == "tick"] == ["started", "completed"]


@pytest.mark.parametrize("back", [timedelta(0), timedelta(days=1)], ids=["now", "yesterday"])
async def test_the_next_run_is_never_before_the_finish_and_a_millisecond(back: timedelta, database: Database) -> None:
    events, times = Events(), Times(pause=-back)
    async with hooked(database, events) as queue:
        async with workq.Executor(queue, [tick], schedules=[workq.Schedule(tick, times)], **QUICK):
            await events.until("completed", 5)
        gaps = [later - earlier for earlier, later in zip(times.asked, times.asked[1:], strict=False)]
        assert all(gap >= timedelta(milliseconds=1) for gap in gaps)
        row = await row_of(queue)
        assert row.run_at == times.asked[-1] + timedelta(milliseconds=1)


@pytest.mark.parametrize("occurrences", [100, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_two_nodes_run_each_occurrence_once_and_never_two_at_a_time(database: Database, occurrences: int) -> None:
    """F17, one holder."""
    ran = 0
    running = most = 0
    times = Times(pause=timedelta(milliseconds=1))

    @workq.handler("tick")
    async def count(task: workq.Task[int]) -> None:
        nonlocal ran, running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ran += 1
        # Each run finds what the one before it has left, so none was lost or doubled.
        assert task.payload + 1 == ran
        task.payload += 1

    events = Events()
    async with hooked(database, events) as queue:
        schedules = [workq.Schedule(count, times, 0)]
        quick: dict[str, Any] = QUICK | {"poll_interval": 0.005}
        async with (
            workq.Executor(queue, [count], schedules=schedules, **quick),
            workq.Executor(queue, [count], schedules=schedules, **quick),
        ):
            await events.until("completed", occurrences, timeout=SOON * occurrences / 100)
        assert most == 1
        assert events.count("failed") == 0
        assert (await row_of(queue)).payload == ran == events.count("completed")


@dataclass
class Cursor:
    """What a schedule may carry from run to run."""

    page: int
    seen: list[str] = field(default_factory=list[str])


@pytest.mark.parametrize("ends", ["Done", "Skip"])
@pytest.mark.parametrize("how", ["mutated", "replaced"])
async def test_the_payload_as_the_handler_left_it_is_there_at_the_next_run(
    how: str, ends: str, database: Database
) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        found: list[Cursor] = []

        @workq.handler("tick")
        async def walk(task: workq.Task[Cursor]) -> workq.Result:
            found.append(Cursor(task.payload.page, list(task.payload.seen)))
            if how == "mutated":
                task.payload.page += 1
                task.payload.seen.append("x")
            else:
                task.payload = Cursor(task.payload.page + 1, [*task.payload.seen, "x"])
            return workq.Done() if ends == "Done" else workq.Skip("nothing there")

        schedules = [workq.Schedule(walk, HOURLY, Cursor(1))]
        async with workq.Executor(queue, [walk], schedules=schedules, **QUICK):
            for number in (1, 2, 3):
                await run_now(queue)
                await events.until("completed", number)
            row = await row_of(queue)
        assert found == [Cursor(1), Cursor(2, ["x"]), Cursor(3, ["x", "x"])]
        assert row.payload == {"page": 4, "seen": ["x", "x", "x"]}
        # And a restart does not bring the first one back.
        async with workq.Executor(queue, [walk], schedules=schedules, **QUICK):
            assert (await row_of(queue)).payload["page"] == 4


@pytest.mark.parametrize("policy", [None, workq.linear(retries=1, delay=0), workq.linear(retries=0)],
                         ids=["failure", "retry", "after the last retry"])  # fmt: skip
async def test_a_failed_run_does_not_save_the_payload(policy: workq.RetryPolicy | None, database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        found: list[int] = []

        @workq.handler("tick", retry=policy)
        async def fails(task: workq.Task[Cursor]) -> None:
            found.append(task.payload.page)
            task.payload.page += 100
            raise ValueError("boom")

        async with workq.Executor(queue, [fails], schedules=[workq.Schedule(fails, HOURLY, Cursor(1))], **QUICK):
            await run_now(queue)
            await eventually(lambda: final(events))
        assert set(found) == {1}
        assert (await row_of(queue)).payload == {"page": 1, "seen": []}


async def final(events: Events) -> bool:
    """Has a run failed that its policy does not repeat?"""
    return any(event.kind == "failed" and event.retry_at is None for event in events)


async def test_a_payload_that_cannot_be_stored_fails_the_row_and_leaves_the_old_one(queue: workq.Queue) -> None:
    @workq.handler("tick", retry=workq.linear(retries=5, delay=0))
    async def breaks(task: workq.Task[dict[str, Any]]) -> None:
        task.payload["broken"] = float("inf")

    async with workq.Executor(queue, [breaks], schedules=[workq.Schedule(breaks, HOURLY, {"old": 1})], **QUICK):
        await run_now(queue)
        row = await settled(queue, "failed")
    assert row.payload == {"old": 1}
    assert "PayloadError" in (row.error or "")


async def test_without_a_policy_a_failed_schedule_stops_until_retry_then_runs_at_once_and_returns(
    database: Database,
) -> None:
    """W."""
    events = Events()
    async with hooked(database, events) as queue:
        broken = True

        @workq.handler("tick")
        async def flaky(task: workq.Task) -> None:
            if broken:
                raise ValueError("boom")

        schedules = [workq.Schedule(flaky, HOURLY)]
        async with workq.Executor(queue, [flaky, other], schedules=schedules, **QUICK):
            await run_now(queue)
            row = await settled(queue, "failed")
            assert (row.attempt, row.scheduled) == (1, True)
            assert (row.error or "").startswith("ValueError: boom")
            await database.age(row.id, 86_400)
            for number in range(3):
                await queue.enqueue(None, other, number)
                await queue.wait(timeout=SOON)
            assert Counter(event.kind for event in events if event.name == "tick") == Counter(started=1, failed=1)
        # Another start changes nothing: it is the one row, failed as it is.
        async with workq.Executor(queue, [flaky, other], schedules=schedules, **QUICK):
            assert (await row_of(queue)).state == "failed"
            broken = False
            assert await queue.retry(None, row.id)
            completed = await events.until("completed", 4)
            assert (completed.name, completed.attempt) == ("tick", 1)
            row = await row_of(queue)
            assert (row.state, row.attempt, row.error) == ("waiting", 0, None)
            assert close(row.run_at, completed.at + HOUR)


async def test_with_a_policy_it_goes_on_after_the_last_retry_and_the_error_stays(database: Database) -> None:
    """Q."""
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("tick", retry=workq.linear(retries=2, delay=0))
        async def fails(task: workq.Task) -> None:
            raise ValueError(f"boom {task.attempt}")

        async with workq.Executor(queue, [fails], schedules=[workq.Schedule(fails, HOURLY)], **QUICK):
            await run_now(queue)
            last = await events.until("failed", 3)
            row = await row_of(queue)
        assert [event.attempt for event in events if event.kind == "failed"] == [1, 2, 3]
        assert [event.retry_at is None for event in events if event.kind == "failed"] == [False, False, True]
        assert (row.state, row.attempt) == ("waiting", 0)
        assert (row.error or "").startswith("ValueError: boom 3")
        assert close(row.run_at, last.at + HOUR)


async def test_between_retries_the_error_can_be_read(queue: workq.Queue) -> None:
    @workq.handler("tick", retry=workq.linear(retries=2, delay=3600))
    async def fails(task: workq.Task) -> None:
        raise ValueError("boom")

    async with workq.Executor(queue, [fails], schedules=[workq.Schedule(fails, workq.every(days=9))], **QUICK):
        await run_now(queue)
        row = await settled(queue, "waiting")
    assert row.attempt == 1
    assert (row.error or "").startswith("ValueError: boom")
    assert close(row.run_at, datetime.now(UTC) + HOUR)


async def test_a_success_clears_attempts_and_error(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("tick", retry=workq.linear(retries=5, delay=0))
        async def flaky(task: workq.Task) -> None:
            if task.attempt < 3:
                raise ValueError("boom")

        async with workq.Executor(queue, [flaky], schedules=[workq.Schedule(flaky, HOURLY)], **QUICK):
            await run_now(queue)
            completed = await events.until("completed")
            row = await row_of(queue)
        assert completed.attempt == 3
        assert (row.state, row.attempt, row.error) == ("waiting", 0, None)


async def test_fail_stops_it_whatever_the_policy(queue: workq.Queue) -> None:
    @workq.handler("tick", retry=workq.linear(retries=5, delay=0))
    async def gives_up(task: workq.Task) -> workq.Result:
        return workq.Fail("no more")

    async with workq.Executor(queue, [gives_up], schedules=[workq.Schedule(gives_up, HOURLY)], **QUICK):
        await run_now(queue)
        row = await settled(queue, "failed")
    assert row.error == "no more"


async def test_later_runs_it_again_without_spending_an_attempt_and_saves_the_payload(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("tick")
        async def in_steps(task: workq.Task[Cursor]) -> workq.Result:
            task.payload.page += 1
            return workq.Later(0) if task.payload.page < 4 else None

        schedules = [workq.Schedule(in_steps, HOURLY, Cursor(1))]
        async with workq.Executor(queue, [in_steps], schedules=schedules, **QUICK):
            await run_now(queue)
            completed = await events.until("completed")
            row = await row_of(queue)
        assert completed.attempt == 1
        assert events.count("released") == 2
        assert row.payload["page"] == 4
        assert close(row.run_at, completed.at + HOUR)


@pytest.mark.parametrize(
    ("when", "says"),
    [(raises, "no calendar"), (naive, "naive"), (nonsense("tomorrow"), "tomorrow"), (nonsense(None), "None")],
    ids=["raises", "naive", "str", "None"],
)
async def test_a_schedule_function_that_goes_wrong_after_a_run_fails_the_row_with_that_error_and_saves_the_payload(
    when: workq.When, says: str, database: Database
) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        working = True

        def breaks_later(last: datetime) -> datetime:
            return HOURLY(last) if working else when(last)

        @workq.handler("tick", retry=workq.linear(retries=5, delay=0))
        async def count(task: workq.Task[Cursor]) -> None:
            task.payload.page += 1

        schedules = [workq.Schedule(count, breaks_later, Cursor(1))]
        async with workq.Executor(queue, [count], schedules=schedules, **QUICK):
            working = False
            await run_now(queue)
            failed = await events.until("failed")
            row = await row_of(queue)
            assert row.state == "failed"
            assert says in (row.error or "")
            assert row.payload["page"] == 2
            assert failed.retry_at is None
            # Mended: retry runs it at once, and it returns to its schedule.
            working = True
            assert await queue.retry(None, row.id)
            await events.until("completed")
            row = await row_of(queue)
        assert (row.state, row.payload["page"], row.error) == ("waiting", 3, None)
        assert close(row.run_at, datetime.now(UTC) + HOUR)
        assert Counter(events.kinds()) == Counter(started=2, failed=1, retried=1, completed=1)


async def test_a_deleted_row_is_made_anew_by_the_next_start_and_not_before(database: Database) -> None:
    events = Events()
    async with hooked(database, events) as queue:
        schedules = [workq.Schedule(tick, HOURLY)]
        async with workq.Executor(queue, [tick, other], schedules=schedules, **QUICK):
            first = await row_of(queue)
            assert await queue.delete(None, first.id)
            await queue.enqueue(None, other, 1)
            await queue.wait(timeout=SOON)
            assert await queue.find() == []
        async with workq.Executor(queue, [tick, other], schedules=schedules, **QUICK):
            again = await row_of(queue)
        assert again.id != first.id
        assert close(again.run_at, datetime.now(UTC) + HOUR)


async def test_one_that_is_deleted_while_it_runs_stays_deleted(database: Database) -> None:
    """fence: its late finish does not bring the row back."""
    events, runs = Events(), Runs()
    async with hooked(database, events) as queue:

        @workq.handler("tick")
        async def slow(task: workq.Task) -> None:
            await runs.hold("tick")

        schedules = [workq.Schedule(slow, HOURLY)]
        async with workq.Executor(queue, [slow], schedules=schedules, **QUICK):
            await run_now(queue)
            await runs.until(lambda: bool(runs.running))
            assert await queue.delete(None, (await row_of(queue)).id)
            runs.go.set()
            await events.until("lost")
            assert await queue.find() == []
        async with workq.Executor(queue, [slow], schedules=schedules, **QUICK):
            assert (await row_of(queue)).state == "waiting"


async def test_a_disabled_one_stays_disabled_over_a_restart_until_retry(database: Database) -> None:
    """Q: a ticker is disabled and enabled."""
    events = Events()
    async with hooked(database, events) as queue:
        schedules = [workq.Schedule(tick, HOURLY)]
        async with workq.Executor(queue, [tick], schedules=schedules, **QUICK):
            id = (await row_of(queue)).id
            assert await queue.disable(None, id)
        async with workq.Executor(queue, [tick], schedules=schedules, **QUICK):
            row = await row_of(queue)
            assert (row.id, row.state, row.error) == (id, "failed", "disabled")
            assert await queue.retry(None, id)
            await events.until("completed")
        assert Counter(events.kinds()) == Counter(retried=1, started=1, completed=1)


async def test_a_row_that_is_not_scheduled_here_rests(database: Database) -> None:
    """A node that serves the name but not this (name, key) has no function to say when it runs next."""
    events = Events()
    async with hooked(database, events) as queue:
        schedules = [workq.Schedule(tick, HOURLY, key=key) for key in ("kept", "dropped")]
        async with workq.Executor(queue, [tick], schedules=schedules, **QUICK):
            pass
        rows = {row.key: row for row in await rows_of(queue)}
        for row in rows.values():
            await database.age(row.id, 86_400)
        for served, expected in (([], set[str]()), ([workq.Schedule(tick, HOURLY, key="kept")], {"kept"})):
            events.clear()
            async with workq.Executor(queue, [tick], schedules=served, **QUICK):
                await queue.enqueue(None, tick)
                await queue.wait(timeout=SOON)
            ran = {event.key for event in events if event.kind == "completed"}
            assert ran == {None} | expected
        dropped = await queue.get(rows["dropped"].id)
        assert dropped is not None
        assert (dropped.state, dropped.attempt, dropped.lost, dropped.node) == ("waiting", 0, 0, None)
        # Scheduled again, it makes up for all that with one run.
        async with workq.Executor(queue, [tick], schedules=schedules, **QUICK):
            await eventually(lambda: moved_on(queue, rows["dropped"].id))


async def moved_on(queue: workq.Queue, id: int) -> bool:
    row = await queue.get(id)
    return row is not None and row.run_at > datetime.now(UTC) + timedelta(minutes=50)


async def test_one_that_is_interrupted_by_stop_runs_again_at_the_next_start(database: Database) -> None:
    """clean stop: a hand-back leaves it due, with its payload as it was."""
    events, runs = Events(), Runs()
    async with hooked(database, events) as queue:

        @workq.handler("tick")
        async def slow(task: workq.Task[Cursor]) -> None:
            task.payload.page += 1
            await runs.hold("tick")

        schedules = [workq.Schedule(slow, HOURLY, Cursor(1))]
        async with workq.Executor(queue, [slow], schedules=schedules, **QUICK) as executor:
            await run_now(queue)
            await runs.until(lambda: bool(runs.running))
            await executor.stop(0)
            row = await row_of(queue)
            assert (row.state, row.attempt, row.payload) == ("waiting", 0, {"page": 1, "seen": []})
        runs.go.set()
        async with workq.Executor(queue, [slow], schedules=schedules, **QUICK):
            await events.until("completed")
            assert (await row_of(queue)).payload["page"] == 2
