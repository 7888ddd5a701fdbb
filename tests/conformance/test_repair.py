"""Operators: retry, reschedule, disable and delete, and what `get` and `find` show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from typing import Any, TypedDict

import pytest

import workq
from support import SOON, Caller, Database, Events, PostgresDatabase, Runs, eventually, hooked
from workq import NewTask

NOTE = workq.Spec("note", str)
KEYED = workq.Spec("keyed", str, key=lambda text: text)
LATER = datetime(2031, 5, 6, 7, 8, 9, 123456, timezone(timedelta(hours=5, minutes=30)))
NEVER = 2**63 - 1
"""The id of no task."""


@dataclass
class Email:
    to: str
    subject: str = "hello"


async def stored(queue: workq.Queue, /, **options: Any) -> int:
    """A new task."""
    id = await queue.enqueue(None, NOTE, "x", **options)
    assert id is not None
    return id


async def look(queue: workq.Queue, id: int) -> workq.TaskRow:
    """The row of a task that is there."""
    row = await queue.get(id)
    assert row is not None
    return row


async def fail(database: Database, queue: workq.Queue, id: int, error: str) -> None:
    """Have a task failed with this error."""
    assert await queue.disable(None, id)
    await database.rows(f"update {{table}} set error = '{error}' where id = {id}")


async def failed_with(database: Database, queue: workq.Queue, error: str, /, **options: Any) -> int:
    """A new task that has failed with this error."""
    id = await stored(queue, **options)
    await fail(database, queue, id, error)
    return id


@asynccontextmanager
async def running(queue: workq.Queue, runs: Runs, *ids: int) -> AsyncGenerator[None]:
    """While these tasks run here, by a handler that waits for `runs.go`. There is no place for another one."""

    @workq.handler(NOTE)
    async def hold(task: workq.Task[str]) -> None:
        await runs.hold(task.id)

    async with workq.Executor(queue, [hold], workers=max(len(ids), 1), poll_interval=0.1, lease=30):
        await runs.until(lambda: runs.running >= set(ids))
        yield


@pytest.fixture
def runs() -> Iterable[Runs]:
    runs = Runs()
    yield runs
    runs.go.set()


# retry


async def test_retry_sets_a_failed_task_free_with_a_clean_slate(database: Database) -> None:
    """W: Retry. Error, attempts and the count of lost holders are cleared; it is told once."""
    events = Events()

    @workq.handler(NOTE, retry=workq.linear(retries=1, delay=0))
    async def fail(task: workq.Task[str]) -> None:
        raise ValueError("no such user")

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        id = await stored(queue, key="k", headers={"trace": "7"}, priority=3)
        async with workq.Executor(queue, [fail], poll_interval=0.05):
            await events.until("failed", 2)
            await queue.wait(NOTE, timeout=SOON)
        await database.rows(f"update {{table}} set lost = 4 where id = {id}")
        before = await look(queue, id)
        assert (before.state, before.attempt, before.lost) == ("failed", 2, 4)
        assert before.error is not None
        assert "ValueError: no such user" in before.error
        assert before.failed_at is not None

        assert await queue.retry(None, id) is True
        row = await look(queue, id)
        assert (row.state, row.attempt, row.lost, row.error, row.failed_at) == ("waiting", 0, 0, None, None)
        assert (row.payload, row.key, row.priority, row.headers) == ("x", "k", 3, {"trace": "7"})
        assert row.created_at == before.created_at
        assert before.failed_at <= row.run_at
        event = events[-1]
        assert (event.kind, event.id, event.name, event.key, event.attempt) == ("retried", id, "note", "k", 1)
        assert (event.headers, event.in_tx) == ({"trace": "7"}, False)
        assert events.count("retried") == 1


async def test_a_retried_task_runs_as_if_new(queue: workq.Queue) -> None:
    """Its attempts count from the beginning again, and its policy too."""
    attempts = list[int]()

    @workq.handler(NOTE, retry=workq.linear(retries=1, delay=0))
    async def flaky(task: workq.Task[str]) -> None:
        attempts.append(task.attempt)
        if len(attempts) < 4:
            raise ValueError

    id = await stored(queue)
    async with workq.Executor(queue, [flaky], poll_interval=0.05):
        await eventually(lambda: queue.find(state="failed"))
        assert await queue.retry(None, id)
        await eventually(lambda: empty(queue))
    assert attempts == [1, 2, 1, 2]


async def empty(queue: workq.Queue) -> bool:
    return await queue.find() == []


async def test_retry_may_say_when_and_with_what(queue: workq.Queue) -> None:
    """Q: Enable, Requeue, ReplacePayloadJSON in one."""
    id = await stored(queue)
    await queue.disable(None, id)
    assert await queue.retry(None, id, run_at=LATER, payload={"to": "ann", "n": [1, 2.5, None]})
    row = await look(queue, id)
    assert row.run_at == LATER
    assert row.run_at.utcoffset() == timedelta(0)
    assert row.payload == {"to": "ann", "n": [1, 2.5, None]}
    await queue.disable(None, id)
    assert await queue.retry(None, id)
    assert (await look(queue, id)).payload == row.payload


async def test_retry_takes_a_typed_payload_and_none(queue: workq.Queue) -> None:
    id = await stored(queue)
    for payload, shown in ((Email("ann"), {"to": "ann", "subject": "hello"}), (None, None)):
        await queue.disable(None, id)
        assert await queue.retry(None, id, payload=payload)
        assert (await look(queue, id)).payload == shown


async def test_retry_has_nothing_to_do_unless_a_task_has_failed(queue: workq.Queue, runs: Runs) -> None:
    """False for no task, a waiting one, one of the future, a running one; and nothing has changed."""
    held = await stored(queue)
    async with running(queue, runs, held):
        waiting = await stored(queue, delay=3600)
        before = await queue.find()
        for id in (NEVER, 0, -1, held, waiting):
            assert await queue.retry(None, id, run_at=LATER, payload="other") is False
        after = await queue.find()
        assert [(row.id, row.run_at, row.payload) for row in after] == [
            (row.id, row.run_at, row.payload) for row in before
        ]
        runs.go.set()
    assert [row.id for row in await queue.find()] == [waiting]


async def test_retry_twice_is_once(queue: workq.Queue) -> None:
    id = await stored(queue)
    await queue.disable(None, id)
    results = await asyncio.gather(*(queue.retry(None, id) for _ in range(10)))
    assert sorted(results) == [False] * 9 + [True]


class Route:
    """Nothing but its own codec can encode it."""

    def __init__(self, *stops: str) -> None:
        self.stops = stops


class RouteCodec:
    def dumps(self, payload: Route, /) -> str:
        return json.dumps(payload.stops)

    def loads(self, text: str, /) -> Route:
        return Route(*json.loads(text))


class Appointment(TypedDict):
    at: datetime


@pytest.mark.parametrize(
    ("spec", "value", "shown"),
    [
        (workq.Spec("route", Route, codec=RouteCodec()), Route("a", "b"), ["a", "b"]),
        (workq.Spec("mails", list[Email]), [Email("ann")], [{"to": "ann", "subject": "hello"}]),
        (workq.Spec("mails", dict[str, Email]), {"a": Email("ann")}, {"a": {"to": "ann", "subject": "hello"}}),
        (workq.Spec("visit", Appointment), {"at": datetime(2026, 5, 6, tzinfo=UTC)}, {"at": "2026-05-06T00:00:00Z"}),
    ],
    ids=["codec of its own", "list of dataclasses", "dict of dataclasses", "TypedDict"],
)
async def test_a_payload_that_only_its_spec_can_encode_is_refused_with_the_remedy(
    spec: workq.Spec[Any], value: Any, shown: Any, queue: workq.Queue
) -> None:
    """`retry` is not given the Spec."""
    id = await stored(queue)
    await queue.disable(None, id)
    with pytest.raises((TypeError, workq.PayloadError)) as refused:
        await queue.retry(None, id, payload=value)
    assert "json.loads(spec.codec().dumps(value))" in str(refused.value)
    assert "declare the type" not in str(refused.value)
    assert await queue.retry(None, id, payload=json.loads(spec.codec().dumps(value)))
    assert (await look(queue, id)).payload == shown


async def test_retry_refuses_what_enqueue_refuses(database: Database) -> None:
    """F42, F43, F49: before anything is sent."""
    async with database.open() as db:
        queue = workq.Queue(db, max_payload=100)
        await queue.migrate()
        id = await stored(queue)
        await queue.disable(None, id)
        before = await look(queue, id)
        for payload in (float("nan"), "\ud800", "x" * 100, {1: 2}, Email("\ud800"), [(1,)], object()):
            with pytest.raises(workq.PayloadError):
                await queue.retry(None, id, payload=payload)
        await refuses_odd_times(partial(queue.retry, None, id))
        assert await look(queue, id) == before


async def refuses_odd_times(attempt: Any) -> None:
    """Does a method refuse every `run_at` that is no point in time?"""
    with pytest.raises(ValueError, match="naive"):
        await attempt(run_at=datetime(2031, 1, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="1970"):
        await attempt(run_at=datetime(1969, 1, 1, tzinfo=UTC))
    for wrong in (date(2031, 1, 1), "2031-01-01", 60):
        with pytest.raises(TypeError, match="datetime"):
            await attempt(run_at=wrong)


async def test_an_id_is_a_number_of_sixty_four_bits(queue: workq.Queue) -> None:
    """And the None that enqueue returned for a double is named as such."""

    async def find(id: int) -> None:
        await queue.find(after=id)

    methods: list[Any] = [queue.retry, queue.reschedule, queue.disable, queue.delete]
    calls: list[Any] = [partial(method, None) for method in methods]
    calls += [queue.get, find]
    for call in calls:
        with pytest.raises(TypeError, match="enqueue returned None because a live task has the key"):
            await call(None)
        for wrong in ("7", True, 7.0):
            with pytest.raises(TypeError, match="id of a task is an int"):
                await call(wrong)
        for far in (2**63, -(2**63) - 1):
            with pytest.raises(ValueError, match="64 bits"):
                await call(far)


# retry_all


async def test_retry_all_sets_free_what_matches(database: Database, queue: workq.Queue) -> None:
    """By target, by queue, by error (a SQL pattern, whatever the case), and all of them together."""
    errors = {
        "mail": "TimeoutError: Mail down",
        "queue": "timeouterror: mail",
        "percent": "ValueError: 50% off_",
        "lines": 'ValueError\n\n  File "x"\nTimeout\n',
        "name": "disabled",
    }
    ids: dict[str, int] = {}
    for label, error in errors.items():
        target, options = "other" if label == "name" else "note", {"queue": "other" if label == "queue" else ""}
        ids[label] = await queue.enqueue(None, target, label, queue=options["queue"]) or 0
        await fail(database, queue, ids[label], error)
    live = await stored(queue)

    async def freed(**filters: Any) -> set[str]:
        number = await queue.retry_all(None, **filters)
        rows = [row for row in await queue.find(state="waiting") if row.id != live]
        assert len(rows) == number
        for row in rows:
            assert (row.attempt, row.lost, row.failed_at, row.error) == (0, 0, None, None)
            await fail(database, queue, row.id, errors[row.payload])
        return {row.payload for row in rows}

    assert await freed() == {"mail", "queue", "percent", "lines", "name"}
    assert await freed(target=NOTE) == {"mail", "queue", "percent", "lines"}
    assert await freed(target="other") == {"name"}
    assert await freed(target="nothing") == set()
    assert await freed(queue="other") == {"queue"}
    assert await freed(queue="") == {"mail", "percent", "lines", "name"}
    assert await freed(error_like="%timeout%") == {"mail", "queue", "lines"}
    assert await freed(error_like="TIMEOUTERROR: MAIL") == {"queue"}
    assert await freed(error_like="timeout") == set()
    assert await freed(error_like="%50\\% off\\_") == {"percent"}
    assert await freed(error_like="%50_ off_") == {"percent"}
    assert await freed(error_like="valueerror%") == {"percent", "lines"}
    assert await freed(error_like="") == set()
    assert await freed(target=NOTE, queue="", error_like="%time%") == {"mail", "lines"}
    assert (await look(queue, live)).state == "waiting"


async def test_retry_all_takes_the_longest_failed_first_and_no_more_than_its_limit(queue: workq.Queue) -> None:
    ids = [await stored(queue) for _ in range(5)]
    for id in (ids[3], ids[1], ids[4], ids[0], ids[2]):
        assert await queue.disable(None, id)
    assert await queue.retry_all(None, limit=2) == 2
    assert {row.id for row in await queue.find(state="waiting")} == {ids[3], ids[1]}
    assert await queue.retry_all(None, limit=2) == 2
    assert {row.id for row in await queue.find(state="failed")} == {ids[2]}
    assert await queue.retry_all(None) == 1
    assert await queue.retry_all(None) == 0


async def test_retry_all_sets_free_one_of_each_key(database: Database) -> None:
    """The oldest of those that match, and none whose key a live task has; the rest stays failed."""
    events = Events()
    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        a1 = await failed_with(database, queue, "other", key="a")
        a2 = await failed_with(database, queue, "this", key="a")
        a3 = await failed_with(database, queue, "this", key="a")
        b1 = await failed_with(database, queue, "this", key="b")
        b2 = await stored(queue, key="b")
        c1 = await failed_with(database, queue, "this", key="c", queue="other")
        c2 = await failed_with(database, queue, "this", key="c")
        n1, n2 = [await failed_with(database, queue, "this") for _ in range(2)]

        assert await queue.retry_all(None, error_like="this") == 5
        assert {row.id for row in await queue.find(state="waiting")} == {a2, b2, c1, c2, n1, n2}
        assert {row.id for row in await queue.find(state="failed")} == {a1, a3, b1}
        assert sorted(event.id for event in events if event.kind == "retried") == sorted([a2, c1, c2, n1, n2])
        assert await queue.retry_all(None) == 0
        assert await queue.delete(None, a2)
        assert await queue.delete(None, b2)
        assert await queue.retry_all(None) == 2
        assert {row.id for row in await queue.find(state="failed")} == {a3}


async def test_a_limit_is_not_spent_on_tasks_whose_key_is_taken(database: Database, queue: workq.Queue) -> None:
    for _ in range(3):
        await failed_with(database, queue, "this", key="a")
    await stored(queue, key="a")
    last = await failed_with(database, queue, "this", key="b")
    assert await queue.retry_all(None, limit=1) == 1
    assert (await look(queue, last)).state == "waiting"


async def test_retry_all_beside_enqueues_of_the_same_keys_sets_free_each_key_once(
    database: Database, queue: workq.Queue
) -> None:
    """F14, F26: no error, and never two live tasks of one key."""
    keys = [str(n) for n in range(30)]
    for key in keys:
        await failed_with(database, queue, "this", key=key)
    async with database.open() as db:
        other = workq.Queue(db)
        await asyncio.gather(
            *(queue.retry_all(None, limit=10) for _ in range(5)),
            *(other.enqueue(None, NOTE, "again", key=key) for key in keys),
        )
        await queue.retry_all(None)
    assert sorted(row.key or "" for row in await queue.find(state="waiting")) == sorted(keys)


async def test_retry_all_goes_on_however_often_its_keys_are_enqueued_meanwhile(postgres: PostgresDatabase) -> None:
    """F14, F26: of twelve keys one after the other is committed just after the statement has looked for them."""
    blockers = "select unnest(pg_blocking_pids(pid)) from pg_stat_activity where wait_event = 'transactionid'"
    async with hooked(postgres) as queue, AsyncExitStack() as transactions:
        hot = [await failed_with(postgres, queue, "this", key=f"hot {n}") for n in range(12)]
        free = [await failed_with(postgres, queue, "this", key=f"free {n}") for n in range(40)]
        others: dict[int, Caller] = {}
        for n in range(12):
            caller = await transactions.enter_async_context(postgres.caller())
            assert await queue.enqueue(caller.tx, NOTE, "live", key=f"hot {n}") is not None
            asked: Any = caller.tx
            others[await asked.fetchval("select pg_backend_pid()")] = caller
        async with postgres.caller() as app:
            retried = asyncio.create_task(queue.retry_all(app.tx))
            async with asyncio.timeout(SOON):
                while not retried.done():
                    for (pid,) in await postgres.rows(blockers):
                        if pid in others:
                            await others.pop(pid).commit()
            assert await retried == len(free)
            assert not others
            await app.commit()
        assert {row.id for row in await queue.find(state="failed")} == set(hot)
        assert {row.id for row in await queue.find(state="waiting") if row.payload == "x"} == set(free)


async def test_retry_all_refuses_what_cannot_be_meant(queue: workq.Queue) -> None:
    anything: Any = queue
    for wrong in (0, -1, 10**9):
        with pytest.raises(ValueError, match="limit"):
            await queue.retry_all(None, limit=wrong)
        with pytest.raises(ValueError, match="limit"):
            await queue.find(limit=wrong)
    for wrong in (True, 1.5, "10", None):
        with pytest.raises(TypeError, match="limit"):
            await anything.retry_all(None, limit=wrong)
    for options in ({"target": "a\0"}, {"queue": "a\0"}, {"error_like": "a\0"}, {"error_like": "a\ud800"}):
        with pytest.raises(ValueError, match=r"NUL|printed|surrogate"):
            await anything.retry_all(None, **options)


async def test_a_pattern_that_ends_in_its_escape_is_answered_alike(database: Database, queue: workq.Queue) -> None:
    """A pattern that PostgreSQL calls wrong is refused on both, and the caller's transaction stays usable."""
    await failed_with(database, queue, "100%")
    async with database.caller() as app:
        with pytest.raises(ValueError, match="error_like"):
            await queue.retry_all(app.tx, error_like="%\\")
        await queue.enqueue(app.tx, NOTE, "x")
        await app.commit()


# reschedule


async def test_reschedule_moves_a_waiting_task(queue: workq.Queue) -> None:
    id = await stored(queue, key="k")
    before = await look(queue, id)
    assert await queue.reschedule(None, id, run_at=LATER) is True
    row = await look(queue, id)
    assert row.run_at == LATER
    assert (row.state, row.key, row.payload, row.created_at) == ("waiting", "k", "x", before.created_at)
    assert await queue.reschedule(None, id) is True
    assert (await look(queue, id)).run_at < datetime.now(UTC) + timedelta(minutes=5)
    await refuses_odd_times(partial(queue.reschedule, None, id))


async def test_a_task_that_is_moved_to_now_runs(queue: workq.Queue, runs: Runs) -> None:
    """Also on an executor that would not look for a long time."""
    runs.go.set()
    ran = list[int]()

    @workq.handler(NOTE)
    async def note(task: workq.Task[str]) -> None:
        ran.append(task.id)

    id = await stored(queue, delay=3600)
    async with workq.Executor(queue, [note], poll_interval=60):
        assert await queue.reschedule(None, id)
        await queue.wait(NOTE, timeout=SOON)
    assert ran == [id]


async def test_a_backing_off_task_can_be_moved_and_keeps_its_attempts(database: Database) -> None:
    events = Events()

    @workq.handler(NOTE, retry=workq.linear(retries=1, delay=3600))
    async def fail(task: workq.Task[str]) -> None:
        raise ValueError

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        id = await stored(queue)
        async with workq.Executor(queue, [fail], poll_interval=0.1):
            await events.until("failed")
            assert (await look(queue, id)).state == "waiting"
            assert await queue.reschedule(None, id)
            await events.until("failed", 2)
        assert [event.attempt for event in events if event.kind == "failed"] == [1, 2]


async def test_reschedule_has_nothing_to_do_unless_a_task_waits(queue: workq.Queue, runs: Runs) -> None:
    """False for no task, a failed one, a running one."""
    held = await stored(queue)
    async with running(queue, runs, held):
        failed = await stored(queue, delay=3600)
        assert await queue.disable(None, failed)
        before = await look(queue, failed)
        for id in (NEVER, held, failed):
            assert await queue.reschedule(None, id, run_at=LATER) is False
        assert await look(queue, failed) == before
        assert (await look(queue, held)).state == "running"
        runs.go.set()
    assert [row.id for row in await queue.find()] == [failed]


# disable


async def test_disable_parks_a_waiting_task_until_retry(database: Database, runs: Runs) -> None:
    """Q: a disabled task. No event, since nothing failed."""
    events = Events()
    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        id = await stored(queue, key="k")
        assert await queue.disable(None, id) is True
        row = await look(queue, id)
        assert (row.state, row.error, row.key, row.payload) == ("failed", "disabled", "k", "x")
        assert row.failed_at is not None
        assert row.failed_at.utcoffset() == timedelta(0)
        assert events.kinds() == ["enqueued"]
        runs.go.set()
        async with running(queue, runs):
            await queue.wait(NOTE, timeout=SOON)
            assert runs.started == {}
            assert await queue.retry(None, id)
            await queue.wait(NOTE, timeout=SOON)
        assert runs.started == {id: 1}


async def test_disable_has_nothing_to_do_unless_a_task_waits(queue: workq.Queue, runs: Runs) -> None:
    """False for no task, a failed one, a running one, which ends as it would have."""
    held = await stored(queue)
    async with running(queue, runs, held):
        failed = await stored(queue, delay=3600)
        assert await queue.disable(None, failed)
        before = await look(queue, failed)
        for id in (NEVER, held, failed):
            assert await queue.disable(None, id) is False
        assert await look(queue, failed) == before
        runs.go.set()
    assert [row.id for row in await queue.find()] == [failed]


# delete


async def test_delete_takes_a_task_in_any_state(queue: workq.Queue, runs: Runs) -> None:
    """W: Delete. False when there is none."""
    held = await stored(queue)
    async with running(queue, runs, held):
        waiting, failed = await stored(queue, delay=3600), await stored(queue, delay=3600)
        await queue.disable(None, failed)
        for id in (waiting, failed, held):
            assert await queue.delete(None, id) is True
            assert await queue.get(id) is None
            assert await queue.delete(None, id) is False
        assert await queue.delete(None, NEVER) is False
        runs.go.set()


@pytest.mark.parametrize("ends", ["well", "badly"])
async def test_the_late_end_of_a_deleted_task_changes_nothing(database: Database, runs: Runs, ends: str) -> None:
    """fence: neither the row that has its key now, nor any other; and it is told as lost, not as completed."""
    events = Events()

    @workq.handler(KEYED, retry=workq.linear(retries=5, delay=0))
    async def hold(task: workq.Task[str]) -> None:
        await runs.hold(task.id)
        if ends == "badly":
            raise ValueError

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        first = await queue.enqueue(None, KEYED, "k")
        assert first is not None
        async with workq.Executor(queue, [hold], poll_interval=0.1, lease=30):
            await runs.until(lambda: first in runs.running)
            assert await queue.delete(None, first)
            second = await queue.enqueue(None, KEYED, "k", delay=3600)
            assert second is not None
            assert second > first
            before = await look(queue, second)
            runs.go.set()
            event = await events.until("lost")
            assert event.id == first
        assert await queue.find() == [before]
        assert events.count("completed") == events.count("failed") == 0


async def test_the_handler_of_a_deleted_task_is_cancelled_at_the_next_beat(database: Database, runs: Runs) -> None:
    events = Events()

    @workq.handler(NOTE)
    async def hold(task: workq.Task[str]) -> None:
        await runs.hold(task.id)

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        id = await stored(queue)
        async with workq.Executor(queue, [hold], poll_interval=0.1, lease=0.6):
            await runs.until(lambda: id in runs.running)
            assert await queue.delete(None, id)
            await runs.until(lambda: not runs.running)
            await events.until("lost")
        assert events.kinds() == ["enqueued", "started", "lost"]


async def test_ids_are_never_used_again(queue: workq.Queue) -> None:
    """fence: a person's late delete(id) hits no new task."""
    first = await stored(queue)
    assert await queue.delete(None, first)
    assert await stored(queue) > first


# A task whose lease is over


async def test_a_task_whose_lease_is_over_waits(database: Database, runs: Runs) -> None:
    """States are derived: it can be moved or parked, and its late holder changes nothing."""
    async with database.open() as db:
        events = Events()
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        moved, parked = await stored(queue), await stored(queue)
        async with running(queue, runs, moved, parked):
            for id in (moved, parked):
                row = await look(queue, id)
                assert row.state == "running"
                assert row.node is not None
                assert row.locked_until is not None
                await database.age(id, 60)
                assert (await look(queue, id)).state == "waiting"
            assert {row.id for row in await queue.find(state="waiting")} == {moved, parked}
            assert await queue.find(state="running") == []
            assert await queue.reschedule(None, moved, run_at=LATER)
            assert await queue.disable(None, parked)
            runs.go.set()
            await events.until("lost", 2)
        rows = await queue.find()
        assert [(row.id, row.state, row.error) for row in rows] == [
            (moved, "waiting", None), (parked, "failed", "disabled")
        ]  # fmt: skip
        assert rows[0].run_at == LATER
        assert events.count("completed") == 0


# get and find


async def test_get_of_no_task_is_none(queue: workq.Queue) -> None:
    for id in (NEVER, 0, -1, -(2**63)):
        assert await queue.get(id) is None


async def test_find_shows_what_matches_by_id(database: Database, queue: workq.Queue, runs: Runs) -> None:
    """By state, target, queue and key, and all of them together; states are derived."""
    held = await stored(queue, key="a")
    async with running(queue, runs, held):
        tasks = [
            NewTask(NOTE, "1", key="a", queue="other", delay=3600),
            NewTask(NOTE, "2", key="b", delay=3600),
            NewTask("other", 3, key="a", delay=3600),
            NewTask("other", 4, delay=3600),
            NewTask("other", 5, key="", delay=3600),
        ]
        one, two, three, four, five = [id or 0 for id in await queue.enqueue_many(None, tasks)]
        await queue.disable(None, three)

        async def found(**filters: Any) -> set[int]:
            rows = await queue.find(**filters)
            assert [row.id for row in rows] == sorted(row.id for row in rows)
            for row in rows:
                assert row == await queue.get(row.id)
            return {row.id for row in rows}

        assert await found() == {held, one, two, three, four, five}
        assert await found(state="running") == {held}
        assert await found(state="waiting") == {one, two, four, five}
        assert await found(state="failed") == {three}
        assert await found(target=NOTE) == {held, one, two}
        assert await found(target="other") == {three, four, five}
        assert await found(target="nothing") == set()
        assert await found(queue="") == {held, two, three, four, five}
        assert await found(queue="other") == {one}
        assert await found(key="a") == {held, one, three}
        assert await found(key="") == {five}
        assert await found(key="nothing") == set()
        assert await found(state="failed", target="other", queue="", key="a") == {three}
        assert await found(state="failed", target="other", queue="", key="b") == set()
        assert await found(state="failed", queue="other") == set()
        assert await found(state="failed", target=NOTE) == set()
        assert await found(state="waiting", target=NOTE, key="a") == {one}
        assert await found(state="running", queue="other") == set()
        runs.go.set()


async def test_find_goes_on_after_the_page_before(queue: workq.Queue) -> None:
    ids = [id or 0 for id in await queue.enqueue_many(None, [NewTask(NOTE, str(n), delay=60) for n in range(25)])]
    for id in ids[::3]:
        await queue.disable(None, id)
    for state, expected in (
        (None, ids),
        ("failed", ids[::3]),
        ("waiting", [id for n, id in enumerate(ids) if n % 3]),
    ):
        pages: list[int] = []
        after = 0
        while page := await queue.find(state=state, limit=4, after=after):  # type: ignore[arg-type]
            assert len(page) <= 4
            pages += [row.id for row in page]
            after = page[-1].id
        assert pages == expected
    assert len(await queue.find(limit=1)) == 1


async def test_find_shows_a_hundred_unless_told_otherwise(queue: workq.Queue) -> None:
    await queue.enqueue_many(None, [NewTask(NOTE, str(n)) for n in range(105)])
    assert len(await queue.find()) == 100
    assert len(await queue.find(limit=1000)) == 105


async def test_find_refuses_what_cannot_be_meant(queue: workq.Queue) -> None:
    anything: Any = queue
    with pytest.raises(ValueError, match="'waiting', 'running' or 'failed'"):
        await anything.find(state="done")
    for options in ({"target": ""}, {"queue": "a\0"}, {"key": "a\0"}, {"key": "\ud800"}):
        with pytest.raises(ValueError, match=r"empty|NUL|printed|surrogate"):
            await anything.find(**options)


async def test_every_moment_of_a_row_is_utc(database: Database, runs: Runs) -> None:
    """F49: results are always aware UTC."""

    @workq.handler(NOTE, retry=workq.linear(retries=1, delay=3600))
    async def fail(task: workq.Task[str]) -> None:
        raise ValueError

    events = Events()
    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        id = await stored(queue)
        async with workq.Executor(queue, [fail], poll_interval=0.1):
            await events.until("failed")
        row = await look(queue, id)
        await queue.disable(None, id)
        parked = await look(queue, id)
        moments = [row.created_at, row.run_at, row.finished_at, parked.failed_at, events[-1].at, events[-1].retry_at]
        assert [moment.tzinfo for moment in moments if moment is not None] == [UTC] * 6
        assert events[-1].retry_at == row.run_at


async def test_a_row_is_seen_from_inside_a_transaction_as_it_stands_there(
    database: Database, queue: workq.Queue
) -> None:
    id = await stored(queue)
    async with database.caller() as app:
        await queue.disable(app.tx, id)
        inside = await queue.get(id, tx=app.tx)
        assert inside is not None
        assert inside.state == "failed"
        assert [row.state for row in await queue.find(tx=app.tx)] == ["failed"]
        assert [row.state for row in await queue.find()] == ["waiting"]
        await app.rollback()
