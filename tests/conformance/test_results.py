"""How a run ends, and what becomes of its task: results, retry policies, timeouts, payloads that persist."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

import workq
from support import SOON, Database, Events, Runs, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.1, "stop_timeout": 2}
EVERY = workq.every(minutes=10)
PAUSE = 600
"""What EVERY is, in the seconds of `due_in`."""

Make = Callable[[], "workq.Outcome | None"]


@dataclass
class Cursor:
    """A payload that handlers move on."""

    at: int


class Left(NamedTuple):
    """What a run has left of its task."""

    state: str
    at: int
    attempt: int
    error: str | None
    due_in: int | None = None


def due_in(row: workq.TaskRow) -> int:
    """Seconds from the end of the last run to the next, to the half minute."""
    assert row.finished_at is not None
    return round((row.run_at - row.finished_at).total_seconds() / 30) * 30


async def row_of(queue: workq.Queue, id: int | None) -> workq.TaskRow:
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    return row


async def left(queue: workq.Queue, id: int) -> Left | None:
    row = await queue.get(id)
    if row is None:
        return None
    due = due_in(row) if row.state == "waiting" else None
    return Left(row.state, row.payload["at"], row.attempt, row.error, due)


async def the_row(queue: workq.Queue, target: workq.Target) -> workq.TaskRow:
    """The only task of its kind."""
    (row,) = await queue.find(target=target)
    return row


async def make_due(queue: workq.Queue, target: workq.Target) -> int:
    """Let the time of a schedule come. Returns its id."""
    id = (await the_row(queue, target)).id
    assert await queue.reschedule(None, id)
    return id


async def stored(queue: workq.Queue, target: workq.Handler[Any, Any], payload: object) -> int:
    id = await queue.enqueue(None, target, payload)
    assert id is not None
    return id


@dataclass
class Ways:
    """Handlers that move their cursor on, and then end with the same outcome in every way there is."""

    make: Make
    handlers: list[workq.Handler[Cursor, Any]] = field(init=False)

    def __post_init__(self) -> None:
        functions: list[Callable[[workq.Task[Cursor]], Any]] = [
            self.returned,
            self.raised,
            self.raised_in_a_task_group,
            self.raised_in_nested_task_groups,
            self.returned_by_a_def,
            self.raised_by_a_def,
        ]
        self.handlers = [workq.handler(workq.Spec(function.__name__, Cursor))(function) for function in functions]

    def _raise(self) -> None:
        outcome = self.make()
        if outcome is not None:
            raise outcome

    async def _raise_later(self) -> None:
        await asyncio.sleep(0)
        self._raise()

    async def returned(self, task: workq.Task[Cursor]) -> workq.Outcome | None:
        task.payload.at += 1
        return self.make()

    async def raised(self, task: workq.Task[Cursor]) -> None:
        task.payload.at += 1
        self._raise()

    async def raised_in_a_task_group(self, task: workq.Task[Cursor]) -> None:
        task.payload.at += 1
        async with asyncio.TaskGroup() as group:
            sibling = group.create_task(asyncio.sleep(SOON if self.make() is not None else 0))
            group.create_task(self._raise_later())
        assert sibling.done()

    async def raised_in_nested_task_groups(self, task: workq.Task[Cursor]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.raised_in_a_task_group(task))

    def returned_by_a_def(self, task: workq.Task[Cursor]) -> workq.Outcome | None:
        task.payload.at += 1
        return self.make()

    def raised_by_a_def(self, task: workq.Task[Cursor]) -> None:
        task.payload.at += 1
        self._raise()


ONE_SHOT: dict[str, tuple[Make, str, Left | None]] = {
    "None": (lambda: None, "completed", None),
    "Done": (workq.Done, "completed", None),
    "Retry": (lambda: workq.Retry("not yet"), "failed", Left("waiting", 0, 1, "not yet", 30)),
    "Fail": (lambda: workq.Fail("never"), "failed", Left("failed", 0, 1, "never")),
    "Skip": (lambda: workq.Skip("not this time"), "failed", Left("failed", 0, 1, "not this time")),
    "Later": (lambda: workq.Later(120), "released", Left("waiting", 1, 0, None, 120)),
}
TICKER: dict[str, tuple[Make, str, Left | None]] = {
    "None": (lambda: None, "completed", Left("waiting", 1, 0, None, PAUSE)),
    "Done": (workq.Done, "completed", Left("waiting", 1, 0, None, PAUSE)),
    "Retry": (lambda: workq.Retry("not yet"), "failed", Left("waiting", 0, 1, "not yet", 30)),
    "Fail": (lambda: workq.Fail("never"), "failed", Left("failed", 0, 1, "never")),
    "Skip": (lambda: workq.Skip("not this time"), "completed", Left("waiting", 1, 0, None, PAUSE)),
    "Later": (lambda: workq.Later(120), "released", Left("waiting", 1, 0, None, 120)),
}


@pytest.mark.parametrize("result", ONE_SHOT)
async def test_what_a_result_makes_of_a_one_shot_task_however_it_is_given(result: str, database: Database) -> None:
    """Q, Result Actions, Jobs: completed, retried with backoff, failed for good, Skip as Fail; and Later."""
    make, kind, expected = ONE_SHOT[result]
    events, ways = Events(), Ways(make)
    async with hooked(database, events) as queue:
        ids = {handler.name: await stored(queue, handler, Cursor(0)) for handler in ways.handlers}
        async with workq.Executor(queue, ways.handlers, **QUICK):
            await events.until(kind, len(ids))
        assert {name: await left(queue, id) for name, id in ids.items()} == dict.fromkeys(ids, expected)
        assert events.count("started") == len(ids)


@pytest.mark.parametrize("result", TICKER)
async def test_what_a_result_makes_of_a_ticker_however_it_is_given(result: str, database: Database) -> None:
    """Q, Result Actions, Tickers and "Payload persisted?": Done and Skip go on with the payload as it was left, Retry
    and Fail keep the old one; and Later."""
    make, kind, expected = TICKER[result]
    events, ways = Events(), Ways(make)
    schedules = [workq.Schedule(handler, EVERY, Cursor(0)) for handler in ways.handlers]
    async with hooked(database, events) as queue:
        async with workq.Executor(queue, ways.handlers, schedules=schedules, **QUICK):
            ids = {handler.name: await make_due(queue, handler) for handler in ways.handlers}
            await events.until(kind, len(ids))
        assert {name: await left(queue, id) for name, id in ids.items()} == dict.fromkeys(ids, expected)
        assert events.count("started") == len(ids)


async def test_a_replaced_payload_persists_like_a_changed_one(database: Database) -> None:
    """Q, Result Actions: "Payload persisted?"."""
    events, seen = Events(), list[int]()

    @workq.handler("sync")
    async def sync(task: workq.Task[Cursor]) -> None:
        seen.append(task.payload.at)
        task.payload = Cursor(task.payload.at + 100)

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, Cursor(1))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            for number in (1, 2, 3):
                await make_due(queue, sync)
                await events.until("completed", number)
        assert seen == [1, 101, 201]
        assert (await the_row(queue, sync)).payload == {"at": 301}


async def test_later_persists_the_payload_for_the_next_run_of_a_one_shot_task(database: Database) -> None:
    """It goes through its work in slices, and the attempt stays the first."""
    events, seen = Events(), list[tuple[int, int]]()

    @workq.handler("sliced")
    async def sliced(task: workq.Task[Cursor]) -> workq.Result:
        seen.append((task.payload.at, task.attempt))
        task.payload.at += 1
        return workq.Later(0) if task.payload.at < 4 else workq.Done()

    async with hooked(database, events) as queue:
        await stored(queue, sliced, Cursor(0))
        async with workq.Executor(queue, [sliced], **QUICK):
            await events.until("completed")
        assert seen == [(0, 1), (1, 1), (2, 1), (3, 1)]
        assert events.count("released") == 3
        assert events.count("failed") == 0


@pytest.mark.parametrize("value", ["text", 0, {"ok": True}], ids=repr)
async def test_any_other_return_value_of_a_ticker_counts_as_done_with_one_warning(
    value: object, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()

    def tick(task: workq.Task[Cursor]) -> Any:
        task.payload.at += 1
        return value

    handler: workq.Handler[Cursor, Any] = workq.handler("tick")(tick)
    async with hooked(database, events) as queue:
        schedule = workq.Schedule(handler, EVERY, Cursor(0))
        async with workq.Executor(queue, [handler], schedules=[schedule], **QUICK):
            for number in (1, 2):
                id = await make_due(queue, handler)
                await events.until("completed", number)
        assert await left(queue, id) == Left("waiting", 2, 0, None, PAUSE)
    assert sum("counts as success" in record.getMessage() for record in caplog.records) == 1


async def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "others",
    [[ValueError("broken")], [workq.Done()], [workq.Retry("again")], [workq.Skip(), KeyError("lost")]],
    ids=["another error", "another outcome", "the same outcome twice", "both"],
)
async def test_a_group_with_an_outcome_and_anything_else_is_a_failed_run(
    others: list[Exception], queue: workq.Queue
) -> None:
    """An outcome never hides an error that was raised beside it."""

    @workq.handler("groups")
    async def groups(task: workq.Task) -> None:
        raise ExceptionGroup("of several subtasks", [workq.Retry("again"), *others])

    id = await queue.enqueue(None, groups)
    async with workq.Executor(queue, [groups], **QUICK):
        await queue.wait(timeout=SOON)
    row = await row_of(queue, id)
    assert (row.state, row.attempt) == ("failed", 1)
    text = row.error or ""
    assert text.startswith("ExceptionGroup: of several subtasks")
    for other in others:
        assert type(other).__name__ in text


async def test_a_failing_subtask_beside_one_that_raises_an_outcome_is_a_failed_run(queue: workq.Queue) -> None:
    """From a real TaskGroup, in which both had raised before the other could be cancelled."""

    @workq.handler("groups")
    async def groups(task: workq.Task) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raises(workq.Done()))
            group.create_task(raises(ValueError("broken")))

    id = await queue.enqueue(None, groups)
    async with workq.Executor(queue, [groups], **QUICK):
        await queue.wait(timeout=SOON)
    row = await row_of(queue, id)
    assert row.state == "failed"
    assert "ValueError: broken" in (row.error or "")


class Step(NamedTuple):
    """A failed run: its number, and seconds to the next one (None: it was the last)."""

    attempt: int
    due_in: int | None


async def steps(queue: workq.Queue, events: Events, id: int) -> list[Step]:
    """Let the time of each retry come at once, to the end."""
    found: list[Step] = []
    while True:
        failed = await events.until("failed", len(found) + 1)
        row = await row_of(queue, id)
        assert failed.attempt == row.attempt
        assert (failed.retry_at is None) == (row.state == "failed")
        if row.state == "failed":
            return [*found, Step(row.attempt, None)]
        assert failed.retry_at == row.run_at
        found.append(Step(row.attempt, due_in(row)))
        assert await queue.reschedule(None, id)


def of_its_own(failed: int, error: BaseException) -> float | None:
    return [90, 30, None][failed - 1]


@pytest.mark.parametrize("raised", [True, False], ids=["an error", "Retry"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (workq.linear(), [(1, 30), (2, 60), (3, 90), (4, None)]),
        (workq.linear(retries=2, delay=300), [(1, 300), (2, 600), (3, None)]),
        (workq.linear(retries=0), [(1, None)]),
        (workq.linear(retries=-1, delay=60), [(1, 60), (2, 120), (3, 180), (4, None)]),
        (
            workq.exponential(retries=4, delay=60, factor=3, cap=600, jitter=0),
            [(1, 60), (2, 180), (3, 540), (4, 600), (5, None)],
        ),
        (workq.exponential(retries=0), [(1, None)]),
        (of_its_own, [(1, 90), (2, 30), (3, None)]),
    ],
    ids=["linear", "linear of its own", "linear 0", "linear negative", "exponential", "exponential 0", "a function"],
)
async def test_a_policy_says_how_often_and_when_a_failed_run_is_repeated(
    policy: workq.RetryPolicy, raised: bool, expected: list[tuple[int, int | None]], database: Database
) -> None:
    """Q, Result Actions: "try * RetryDelay"; 0 is none, negative the default."""
    events = Events()

    @workq.handler("fails", retry=policy)
    async def fails(task: workq.Task) -> workq.Result:
        if raised:
            raise ValueError("boom")
        return workq.Retry("boom")

    async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
        id = await queue.enqueue(None, fails)
        assert id is not None
        assert await steps(queue, events, id) == [Step(*step) for step in expected]
        assert "boom" in ((await row_of(queue, id)).error or "")
        assert events.count("started") == len(expected)


async def test_retry_without_a_policy_uses_linear(database: Database) -> None:
    """Q, Result Actions: Retry(err) is retried with backoff, 3 times after 30, 60, 90 seconds."""
    events = Events()

    @workq.handler("asks")
    async def asks(task: workq.Task) -> workq.Result:
        return workq.Retry(ConnectionError("not yet"))

    async with hooked(database, events) as queue, workq.Executor(queue, [asks], **QUICK):
        id = await queue.enqueue(None, asks)
        assert id is not None
        assert await steps(queue, events, id) == [Step(1, 30), Step(2, 60), Step(3, 90), Step(4, None)]
        assert (await row_of(queue, id)).error == "ConnectionError: not yet"


async def test_after_says_when_and_the_policy_whether(database: Database) -> None:
    events = Events()

    @workq.handler("asks", retry=workq.linear(retries=2, delay=30))
    async def asks(task: workq.Task) -> workq.Result:
        return workq.Retry("not yet", after=600 * task.attempt)

    async with hooked(database, events) as queue, workq.Executor(queue, [asks], **QUICK):
        id = await queue.enqueue(None, asks)
        assert id is not None
        assert await steps(queue, events, id) == [Step(1, 600), Step(2, 1200), Step(3, None)]


async def test_a_policy_that_gives_up_is_not_overruled_by_after(queue: workq.Queue) -> None:
    runs: list[int] = []

    @workq.handler("asks", retry=workq.linear(retries=0))
    async def asks(task: workq.Task) -> None:
        runs.append(task.attempt)
        raise workq.Retry("not yet", after=0)

    id = await queue.enqueue(None, asks)
    async with workq.Executor(queue, [asks], **QUICK):
        await queue.wait(timeout=SOON)
    assert (await row_of(queue, id)).state == "failed"
    assert runs == [1]


async def test_a_retry_after_no_time_runs_at_once(database: Database) -> None:
    """No reschedule, no waiting: the policy's day is not waited for."""
    events = Events()

    @workq.handler("asks", retry=workq.linear(retries=3, delay=86400))
    async def asks(task: workq.Task) -> workq.Result:
        return workq.Retry(after=0) if task.attempt < 3 else workq.Done()

    async with hooked(database, events) as queue, workq.Executor(queue, [asks], **QUICK):
        await queue.enqueue(None, asks)
        assert (await events.until("completed")).attempt == 3


async def test_fail_is_never_retried(queue: workq.Queue) -> None:
    """Q, Result Actions: Fail(err) is a permanent failure, whatever the policy."""

    @workq.handler("fails", retry=workq.linear(retries=9, delay=0))
    async def fails(task: workq.Task[str]) -> workq.Result:
        if task.payload == "raised":
            raise workq.Fail(ValueError("no use"))
        return workq.Fail("no use")

    ids = [await stored(queue, fails, payload) for payload in ("raised", "returned")]
    async with workq.Executor(queue, [fails], **QUICK):
        await queue.wait(timeout=SOON)
    rows = [await row_of(queue, id) for id in ids]
    assert [(row.state, row.attempt, row.error) for row in rows] == [
        ("failed", 1, "ValueError: no use"),
        ("failed", 1, "no use"),
    ]


async def test_a_policy_is_told_the_failed_runs_and_the_error(database: Database) -> None:
    events, told = Events(), list[tuple[int, BaseException]]()
    boom, broken = ValueError("boom"), KeyError("broken")

    def policy(failed: int, error: BaseException) -> float | None:
        told.append((failed, error))
        return 0 if failed < 4 else None

    @workq.handler("fails", retry=policy)
    async def fails(task: workq.Task) -> workq.Result:
        match task.attempt:
            case 1:
                raise boom
            case 2:
                return workq.Retry(broken)
            case 3:
                raise workq.Retry("in words")
            case _:
                raise ExceptionGroup("group", [boom])

    async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
        await queue.enqueue(None, fails)
        await events.until("failed", 4)
    assert [failed for failed, _ in told] == [1, 2, 3, 4]
    errors = [error for _, error in told]
    assert errors[0] is boom
    assert errors[1] is broken
    assert str(errors[2]) == "in words"
    assert isinstance(errors[3], ExceptionGroup)


class Odd(BaseException):
    """Of no kind that anybody expects."""


def raising(error: BaseException) -> workq.RetryPolicy:
    def policy(failed: int, error_of_the_run: BaseException) -> float | None:
        raise error

    return policy


def answering(answer: Any) -> workq.RetryPolicy:
    return lambda failed, error: answer


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (raising(LookupError("no plan")), "LookupError: no plan"),
        (raising(asyncio.CancelledError("no plan")), "CancelledError: no plan"),
        (raising(Odd("no plan")), "Odd: no plan"),
        (raising(workq.Retry("no plan")), "Retry: no plan"),
        (answering("soon"), "'soon'"),
        (answering(math.nan), "nan"),
        (answering(True), "True"),
        (answering(datetime(2030, 1, 1, tzinfo=UTC)), "2030"),
        (answering([1]), r"[1]"),
    ],
    ids=["error", "CancelledError", "BaseException", "outcome", "str", "nan", "bool", "datetime", "list"],
)
async def test_a_policy_that_fails_or_answers_nonsense_fails_its_task_and_no_other(
    policy: Any, says: str, queue: workq.Queue
) -> None:
    """isolation: the row says what the policy did, and what it was asked about."""
    runs: list[str] = []

    @workq.handler("fails", retry=policy)
    async def fails(task: workq.Task) -> None:
        raise ValueError("by the handler")

    @workq.handler("bystander")
    async def bystander(task: workq.Task) -> None:
        runs.append(task.name)

    id = await queue.enqueue(None, fails)
    async with workq.Executor(queue, [fails, bystander], workers=1, **QUICK) as executor:
        await queue.wait(timeout=SOON)
        await queue.enqueue(None, bystander)
        await queue.wait(timeout=SOON)
        assert executor.health().ok
    row = await row_of(queue, id)
    assert (row.state, row.attempt) == ("failed", 1)
    assert says in (row.error or "")
    assert "by the handler" in (row.error or "")
    assert runs == ["bystander"]


@pytest.mark.parametrize("wait", [-5, -math.inf, 0], ids=str)
async def test_a_wait_that_is_over_already_is_none(wait: float, database: Database) -> None:
    """F45: clamped."""
    events = Events()

    @workq.handler("fails", retry=lambda failed, error: wait)
    async def fails(task: workq.Task) -> None:
        if task.attempt == 1:
            raise ValueError

    async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
        await queue.enqueue(None, fails)
        assert (await events.until("completed")).attempt == 2


@pytest.mark.parametrize("wait", [math.inf, 1e300], ids=str)
async def test_a_wait_without_end_is_a_time_that_can_be_stored(wait: float, database: Database) -> None:
    """F45: clamped, so the row waits and can be rescheduled."""
    events = Events()

    @workq.handler("fails", retry=lambda failed, error: wait)
    async def fails(task: workq.Task) -> None:
        if task.attempt == 1:
            raise ValueError

    async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
        id = await queue.enqueue(None, fails)
        failed = await events.until("failed")
        row = await row_of(queue, id)
        assert row.state == "waiting"
        assert row.run_at == failed.retry_at
        assert row.run_at.year > datetime.now(UTC).year + 90
        assert await queue.reschedule(None, row.id)
        await events.until("completed")


async def test_the_error_is_readable_on_the_row_between_retries_and_while_the_next_one_runs(
    database: Database,
) -> None:
    events, runs = Events(), Runs()

    @workq.handler("fails", retry=workq.linear(retries=3, delay=60))
    async def fails(task: workq.Task) -> workq.Result:
        if task.attempt == 1:
            raise ConnectionError("refused")
        if task.attempt == 2:
            await runs.hold("second")
            return workq.Later(120)
        raise ConnectionError("again")

    async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
        id = await queue.enqueue(None, fails)
        await events.until("failed")
        row = await row_of(queue, id)
        assert (row.state, row.failed_at) == ("waiting", None)
        error = row.error or ""
        assert error.startswith("ConnectionError: refused")
        assert "in fails" in error
        assert [found.error for found in await queue.find(state="waiting")] == [error]

        await queue.reschedule(None, row.id)
        await runs.until(lambda: "second" in runs.running)
        row = await row_of(queue, id)
        assert (row.state, row.error, row.attempt) == ("running", error, 1)

        runs.go.set()
        await events.until("released")
        row = await row_of(queue, id)
        assert (row.state, row.error, row.attempt) == ("waiting", error, 1)


async def test_the_attempt_is_the_same_number_everywhere(database: Database) -> None:
    """Task.attempt and Event.attempt are the row's failed runs and one; retry begins again."""
    events, seen = Events(), list[int]()

    @workq.handler("fails", retry=workq.linear(retries=2, delay=0))
    async def fails(task: workq.Task) -> None:
        seen.append(task.attempt)
        if len(seen) <= 4:
            raise ValueError

    def told() -> list[tuple[str, int]]:
        return [(event.kind, event.attempt) for event in events if event.kind != "enqueued"]

    async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
        id = await queue.enqueue(None, fails)
        await events.until("failed", 3)
        row = await row_of(queue, id)
        assert (row.state, row.attempt) == ("failed", 3)
        assert seen == [1, 2, 3]
        assert told() == [(kind, number) for number in (1, 2, 3) for kind in ("started", "failed")]
        del events[:]

        assert await queue.retry(None, row.id)
        await events.until("completed")
    assert seen == [1, 2, 3, 1, 2]
    assert told() == [("retried", 1), ("started", 1), ("failed", 1), ("started", 2), ("completed", 2)]


async def test_only_failed_runs_are_counted(database: Database) -> None:
    """claim, Later, hand-back and a lost lease leave the attempt as it was."""
    events, runs = Events(), Runs()

    @workq.handler("counts", retry=workq.linear(retries=5, delay=0))
    async def counts(task: workq.Task[str]) -> workq.Result:
        runs.order.append(task.attempt)
        match len(runs.order):
            case 1:
                raise ValueError
            case 2:
                return workq.Later(0)
            case 3:
                await runs.hold("until stopped")
            case _:
                pass
        return None

    async with hooked(database, events) as queue:
        id = await stored(queue, counts, "x")
        async with workq.Executor(queue, [counts], **QUICK) as executor:
            await runs.until(lambda: "until stopped" in runs.running)
            assert (await row_of(queue, id)).attempt == 1
            await executor.stop(0)
        assert (await row_of(queue, id)).attempt == 1
        await database.rows(
            f"update {{table}} set locked_by = 1, version = version + 1, locked_until = created_at where id = {id}"
        )
        async with workq.Executor(queue, [counts], **QUICK):
            await events.until("completed")
    attempts = [attempt for attempt in runs.order if isinstance(attempt, int)]
    assert attempts == [1, 2, 2, 2]
    assert [event.attempt for event in events if event.kind == "released"] == [2, 2]


async def test_a_handler_that_takes_too_long_is_cancelled_and_fails(queue: workq.Queue) -> None:
    cancelled: list[int] = []

    @workq.handler("slow", timeout=0.05)
    async def slow(task: workq.Task) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(task.attempt)
            raise

    id = await queue.enqueue(None, slow)
    async with workq.Executor(queue, [slow], **QUICK):
        await queue.wait(timeout=SOON)
    row = await row_of(queue, id)
    assert (row.state, row.attempt) == ("failed", 1)
    assert (row.error or "").startswith("TimeoutError: the handler did not end within its timeout of 0.05 s")
    assert cancelled == [1]


async def test_a_timeout_is_a_failed_run_like_any_other_to_the_policy(database: Database) -> None:
    events, told = Events(), list[BaseException]()

    def policy(failed: int, error: BaseException) -> float | None:
        told.append(error)
        return 0 if failed < 2 else None

    @workq.handler("slow", timeout=0.05, retry=policy)
    async def slow(task: workq.Task) -> None:
        await asyncio.Event().wait()

    async with hooked(database, events) as queue, workq.Executor(queue, [slow], **QUICK):
        id = await queue.enqueue(None, slow)
        await events.until("failed", 2)
        assert (await row_of(queue, id)).attempt == 2
    assert [type(error) for error in told] == [TimeoutError, TimeoutError]
    failures = [event for event in events if event.kind == "failed"]
    assert [event.retry_at is None for event in failures] == [False, True]
    assert all(event.duration is not None and event.duration >= 0.05 for event in failures)


@pytest.mark.parametrize("swallowed", ["returns", "Done", "Later", "another error"])
async def test_a_handler_that_swallows_its_timeout_has_failed_all_the_same(swallowed: str, queue: workq.Queue) -> None:
    @workq.handler("stubborn", timeout=0.05)
    async def stubborn(task: workq.Task) -> workq.Result:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if swallowed == "another error":
                raise LookupError("while cleaning up") from None
            if swallowed == "Later":
                return workq.Later(0)
            return workq.Done() if swallowed == "Done" else None
        return None

    id = await queue.enqueue(None, stubborn)
    async with workq.Executor(queue, [stubborn], **QUICK):
        await queue.wait(timeout=SOON)
    row = await row_of(queue, id)
    assert (row.state, row.attempt) == ("failed", 1)
    assert "its timeout of 0.05 s" in (row.error or "")


async def test_a_handler_within_its_timeout_is_left_alone(queue: workq.Queue) -> None:
    """And its alarm is off: what it does not use is nobody else's."""

    @workq.handler("quick", timeout=0.3)
    async def quick(task: workq.Task[int]) -> None:
        await asyncio.sleep(0)

    @workq.handler("long")
    async def long(task: workq.Task) -> None:
        await asyncio.sleep(0.5)

    await queue.enqueue_many(None, [workq.NewTask(quick, number) for number in range(20)])
    await queue.enqueue(None, long)
    async with workq.Executor(queue, [quick, long], **QUICK):
        await queue.wait(timeout=SOON)
    assert await queue.find() == []


@pytest.mark.parametrize("kind", [asyncio.CancelledError, TimeoutError], ids=lambda kind: kind.__name__)
async def test_what_the_handler_raises_itself_is_not_taken_for_its_timeout(
    kind: type[BaseException], queue: workq.Queue
) -> None:
    """F35."""

    @workq.handler("raises", timeout=60)
    async def raises_it(task: workq.Task) -> None:
        raise kind("of its own")

    id = await queue.enqueue(None, raises_it)
    async with workq.Executor(queue, [raises_it], **QUICK):
        await queue.wait(timeout=SOON)
    row = await row_of(queue, id)
    assert (row.state, row.attempt) == ("failed", 1)
    assert (row.error or "").startswith(f"{kind.__name__}: of its own") or f".{kind.__name__}: of its own" in (
        row.error or ""
    )
    assert "its timeout" not in (row.error or "")


async def test_a_handler_cancelled_by_stop_has_not_timed_out(database: Database) -> None:
    events, runs = Events(), Runs()

    @workq.handler("slow", timeout=60, retry=workq.linear(delay=0))
    async def slow(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with hooked(database, events) as queue:
        id = await stored(queue, slow, "x")
        async with workq.Executor(queue, [slow], **QUICK) as executor:
            await runs.until(lambda: "x" in runs.running)
            await executor.stop(0)
        row = await row_of(queue, id)
        assert (row.state, row.attempt, row.error) == ("waiting", 0, None)
    assert events.kinds() == ["enqueued", "started", "released"]


async def test_a_handler_whose_lease_is_lost_has_not_timed_out(database: Database) -> None:
    events, runs = Events(), Runs()

    @workq.handler("slow", timeout=60, retry=workq.linear(delay=0))
    async def slow(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with hooked(database, events) as queue:
        id = await stored(queue, slow, "x")
        async with workq.Executor(queue, [slow], lease=0.6, **QUICK):
            await runs.until(lambda: "x" in runs.running)
            assert await queue.delete(None, id)
            await runs.until(lambda: not runs.running)
        assert await queue.find() == []
    assert events.kinds() == ["enqueued", "started", "lost"]


async def test_a_run_that_timed_out_stays_a_failed_one_when_stop_comes_too(database: Database) -> None:
    events, cleaning = Events(), asyncio.Event()

    @workq.handler("slow", timeout=0.05, retry=workq.linear(delay=60))
    async def slow(task: workq.Task) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.Event().wait()

    async with hooked(database, events) as queue:
        id = await queue.enqueue(None, slow)
        async with workq.Executor(queue, [slow], **QUICK) as executor:
            await asyncio.wait_for(cleaning.wait(), SOON)
            await executor.stop(0)
        row = await row_of(queue, id)
        assert (row.state, row.attempt, due_in(row)) == ("waiting", 1, 60)
        assert "its timeout of 0.05 s" in (row.error or "")
    assert events.kinds() == ["enqueued", "started", "failed"]


async def test_after_its_last_retry_a_ticker_goes_on_at_its_next_time_with_the_error_kept(database: Database) -> None:
    """Q, Result Actions: "After MaxRetries, jobs fail permanently; tickers reschedule at Every"."""
    events = Events()

    @workq.handler("sync", retry=workq.linear(retries=1, delay=30))
    async def sync(task: workq.Task[Cursor]) -> None:
        task.payload.at += 1
        if events.count("failed") < 2:
            raise ConnectionError(f"attempt {task.attempt}")

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            failed = await events.until("failed", 1)
            row = await row_of(queue, id)
            assert (row.state, row.attempt, due_in(row), row.payload) == ("waiting", 1, 30, {"at": 0})
            assert failed.retry_at == row.run_at

            await make_due(queue, sync)
            failed = await events.until("failed", 2)
            row = await row_of(queue, id)
            assert (row.state, row.attempt, due_in(row), row.payload) == ("waiting", 0, PAUSE, {"at": 0})
            assert (row.error or "").startswith("ConnectionError: attempt 2")
            assert (failed.attempt, failed.retry_at) == (2, None)

            await make_due(queue, sync)
            done = await events.until("completed")
            assert done.attempt == 1
        assert await left(queue, id) == Left("waiting", 1, 0, None, PAUSE)


async def test_a_ticker_without_a_policy_that_asks_for_a_retry_goes_on_after_the_three_of_linear(
    database: Database,
) -> None:
    """Q, Result Actions: Retry(err), Tickers."""
    events = Events()

    @workq.handler("sync")
    async def sync(task: workq.Task[Cursor]) -> workq.Result:
        return workq.Retry("not yet")

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        waits: list[int] = []
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            for number in (1, 2, 3, 4):
                id = await make_due(queue, sync)
                await events.until("failed", number)
                waits.append(due_in(await row_of(queue, id)))
        assert waits == [30, 60, 90, PAUSE]
        assert await left(queue, id) == Left("waiting", 0, 0, "not yet", PAUSE)


@pytest.mark.parametrize("end", ["Fail", "an error without a policy"])
async def test_a_ticker_that_failed_stops_until_retry_then_runs_at_once_and_returns_to_its_schedule(
    end: str, database: Database
) -> None:
    """Q, Result Actions: Fail(err), Tickers: "Permanent failure"; W: an error stops it."""
    events = Events()

    async def fail_once(task: workq.Task[Cursor]) -> None:
        task.payload.at += 1
        if events.count("failed") == 0:
            raise workq.Fail("broken") if end == "Fail" else ValueError("broken")

    @workq.handler("bystander")
    async def bystander(task: workq.Task) -> None: ...

    policy = workq.linear(retries=5, delay=0) if end == "Fail" else None
    sync = workq.handler(workq.Spec("sync", Cursor), retry=policy)(fail_once)
    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync, bystander], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
            row = await row_of(queue, id)
            assert (row.state, row.attempt, row.payload) == ("failed", 1, {"at": 0})
            assert "broken" in (row.error or "")

            await database.age(id, 3600)
            for _ in range(3):
                await queue.enqueue(None, bystander)
                await queue.wait(timeout=SOON)
            assert [event.kind for event in events if event.id == id] == ["started", "failed"]

            assert await queue.retry(None, id)
            await events.until("completed", 4)
        assert await left(queue, id) == Left("waiting", 1, 0, None, PAUSE)


async def test_a_ticker_that_timed_out_keeps_its_payload(database: Database) -> None:
    events = Events()

    @workq.handler("sync", timeout=0.05, retry=workq.linear(delay=60))
    async def sync(task: workq.Task[Cursor]) -> None:
        task.payload.at += 1
        await asyncio.Event().wait()

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, Cursor(0))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        row = await row_of(queue, id)
        assert (row.state, row.attempt, row.payload, due_in(row)) == ("waiting", 1, {"at": 0}, 60)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


UNSTORABLE: dict[str, object] = {
    "an object": object(),
    "not a number": [math.nan],
    "a lone surrogate": "\ud800",
    "keys of another type": {1: 2},
    "too deep": nested(101),
    "too large": "x" * 2000,
}


@pytest.mark.parametrize("kind", UNSTORABLE)
async def test_a_ticker_that_leaves_what_cannot_be_stored_fails_and_keeps_the_old_payload(
    kind: str, database: Database
) -> None:
    """same value: whatever its policy; after retry it runs with the payload that it had."""
    events, seen = Events(), list[Any]()

    @workq.handler("sync", retry=workq.linear(retries=5, delay=0))
    async def sync(task: workq.Task[Any]) -> None:
        seen.append(task.payload)
        task.payload = UNSTORABLE[kind] if len(seen) == 1 else "new"

    async with hooked(database, events, max_payload=1000) as queue:
        schedule = workq.Schedule(sync, EVERY, "old")
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await queue.wait(timeout=SOON)
            row = await row_of(queue, id)
            assert (row.state, row.payload) == ("failed", "old")
            assert "PayloadError" in (row.error or "")
            assert len(seen) == 1

            assert await queue.retry(None, id)
            await events.until("completed")
        row = await row_of(queue, id)
        assert (row.state, row.payload, row.error) == ("waiting", "new", None)
    assert seen == ["old", "old"]


@pytest.mark.parametrize("end", ["Done", "Skip", "Later"])
async def test_a_typed_payload_that_is_left_as_another_type_is_not_stored(end: str, database: Database) -> None:
    """same value."""
    events = Events()
    results: dict[str, workq.Result] = {"Done": workq.Done(), "Skip": workq.Skip(), "Later": workq.Later(0)}

    @workq.handler("sync")
    async def sync(task: workq.Task[Cursor]) -> workq.Result:
        task.payload.at = "far"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        return results[end]

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, Cursor(7))
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        row = await row_of(queue, id)
        assert (row.state, row.payload) == ("failed", {"at": 7})
        assert "PayloadError" in (row.error or "")
        assert "far" in (row.error or "") or "at" in (row.error or "")


@pytest.mark.parametrize("kind", ["an object", "too large"])
async def test_a_one_shot_task_that_wants_to_run_later_with_what_cannot_be_stored_fails(
    kind: str, database: Database
) -> None:
    events = Events()

    @workq.handler("sliced")
    async def sliced(task: workq.Task[Any]) -> workq.Result:
        task.payload = UNSTORABLE[kind]
        return workq.Later(60)

    async with hooked(database, events, max_payload=1000) as queue:
        id = await stored(queue, sliced, "old")
        async with workq.Executor(queue, [sliced], **QUICK):
            await queue.wait(timeout=SOON)
        row = await row_of(queue, id)
        assert (row.state, row.payload) == ("failed", "old")
        assert "PayloadError" in (row.error or "")


@pytest.mark.parametrize("end", ["Retry", "Fail", "an error"])
async def test_what_is_not_to_be_stored_need_not_be_storable(end: str, database: Database) -> None:
    """A failed run keeps the old payload anyway, so its own error is the one that is told."""
    events = Events()

    @workq.handler("sync", retry=workq.linear(delay=60))
    async def sync(task: workq.Task[Any]) -> None:
        task.payload = object()
        raise {"Retry": workq.Retry("broken"), "Fail": workq.Fail("broken")}.get(end, ValueError("broken"))

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, EVERY, "old")
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        row = await row_of(queue, id)
        assert (row.state, row.payload) == ("failed" if end == "Fail" else "waiting", "old")
        assert "broken" in (row.error or "")
        assert "PayloadError" not in (row.error or "")


async def test_a_schedule_function_that_breaks_after_a_run_fails_the_row_with_the_payload_saved(
    database: Database,
) -> None:
    """The run itself succeeded, so what it left is kept."""
    events = Events()

    def when(last: datetime) -> datetime:
        if events.count("started"):
            raise LookupError("no calendar")
        return EVERY(last)

    @workq.handler("sync", retry=workq.linear(retries=5, delay=0))
    async def sync(task: workq.Task[Cursor]) -> None:
        task.payload.at += 1

    async with hooked(database, events) as queue:
        async with workq.Executor(queue, [sync], schedules=[workq.Schedule(sync, when, Cursor(0))], **QUICK):
            id = await make_due(queue, sync)
            await events.until("failed")
        row = await row_of(queue, id)
        assert (row.state, row.payload) == ("failed", {"at": 1})
        assert (row.error or "").startswith("LookupError: no calendar")
