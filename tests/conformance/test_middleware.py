"""What is wrapped round a run: middleware, the current task, headers, and a context of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest

import workq
from support import SOON, Caller, Database, Events, Runs, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.1, "stop_timeout": 2}
TRACE: ContextVar[str] = ContextVar("trace", default="none")
SESSION: ContextVar[Caller] = ContextVar("session")


async def row_of(queue: workq.Queue, id: int | None) -> workq.TaskRow:
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    return row


async def run_one(
    queue: workq.Queue, handler: workq.Handler[Any, Any], *middleware: workq.Middleware, payload: object = None
) -> int | None:
    """Run one task to its end, or to its first retry. Returns its id."""
    id = await queue.enqueue(None, handler, payload)
    async with workq.Executor(queue, [handler], middleware=middleware, **QUICK):
        await queue.wait(timeout=SOON)
    return id


def noting(order: list[str], name: str) -> workq.Middleware:
    async def note(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        order.append(f"{name} before")
        result = await call_next()
        order.append(f"{name} after")
        return result

    return note


def an_async_def(order: list[str]) -> workq.Handler[Any, Any]:
    @workq.handler("note")
    async def note(task: workq.Task) -> None:
        await asyncio.sleep(0)
        order.append("handler")

    return note


def a_plain_def(order: list[str]) -> workq.Handler[Any, Any]:
    @workq.handler("note")
    def note(task: workq.Task) -> None:
        order.append("handler")

    return note


@pytest.mark.parametrize("made", [an_async_def, a_plain_def], ids=["async def", "plain def"])
async def test_the_first_middleware_is_the_outermost_round_every_kind_of_handler(
    made: Callable[[list[str]], workq.Handler[Any, Any]], queue: workq.Queue
) -> None:
    order: list[str] = []
    await run_one(queue, made(order), *(noting(order, name) for name in "abc"))
    assert order == ["a before", "b before", "c before", "handler", "c after", "b after", "a after"]
    assert await queue.find() == []


async def test_a_middleware_goes_round_all_handlers_of_its_executor_and_no_others(queue: workq.Queue) -> None:
    seen: list[tuple[str, str]] = []

    def made(name: str, queue_name: str) -> workq.Handler[Any, Any]:
        @workq.handler(name, queue=queue_name)
        async def handle(task: workq.Task) -> None: ...

        return handle

    async def watch(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        seen.append((task.queue, task.name))
        return await call_next()

    here, too, elsewhere = made("here", "one"), made("too", "one"), made("here", "two")
    async with (
        workq.Executor(queue, [here, too], middleware=[watch], **QUICK),
        workq.Executor(queue, [elsewhere], **QUICK),
    ):
        await queue.enqueue_many(None, [workq.NewTask(one) for one in (here, too, elsewhere)])
        await queue.wait(timeout=SOON)
    assert sorted(seen) == [("one", "here"), ("one", "too")]


async def test_a_middleware_may_be_any_callable(queue: workq.Queue) -> None:
    order: list[str] = []

    @dataclass
    class Noting:
        name: str

        async def __call__(self, task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
            order.append(self.name)
            return await call_next()

        async def method(self, task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
            order.append(f"{self.name}'s method")
            return await call_next()

    def plain(task: workq.Task[Any], call_next: workq.Next) -> Awaitable[workq.Result]:
        order.append("plain")
        return call_next()

    await run_one(queue, an_async_def(order), Noting("object"), Noting("object").method, plain)
    assert order == ["object", "object's method", "plain", "handler"]
    assert await queue.find() == []


async def test_a_middleware_sees_the_task_that_the_handler_sees(queue: workq.Queue) -> None:
    """What it does to the payload, the handler finds."""
    seen: list[workq.Task[Any]] = []

    @workq.handler("note")
    async def note(task: workq.Task[dict[str, str]]) -> None:
        seen.append(task)

    async def change(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        seen.append(task)
        task.payload = {**task.payload, "by": "middleware"}
        return await call_next()

    await run_one(queue, note, change, payload={"to": "ann"})
    assert seen[0] is seen[1]
    assert seen[1].payload == {"to": "ann", "by": "middleware"}


OUTCOMES: dict[str, Callable[[], workq.Outcome]] = {
    "Done": workq.Done,
    "Retry": lambda: workq.Retry("not yet", after=60),
    "Fail": lambda: workq.Fail("never"),
    "Skip": lambda: workq.Skip("not this time"),
    "Later": lambda: workq.Later(60),
}
LEFT = {"Done": None, "Retry": "waiting", "Fail": "failed", "Skip": "failed", "Later": "waiting"}


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("kind", OUTCOMES)
async def test_an_outcome_passes_through_as_it_was_given(
    kind: str, raised: bool, plain: bool, queue: workq.Queue
) -> None:
    """The very object: returned ones are returned by call_next, raised ones are raised."""
    outcome = OUTCOMES[kind]()
    seen: list[tuple[str, object]] = []

    def end(task: workq.Task) -> Any:
        if raised:
            raise outcome
        return outcome

    async def end_on_the_loop(task: workq.Task) -> Any:
        return end(task)

    async def watch(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        try:
            result = await call_next()
        except BaseException as error:
            seen.append(("raised", error))
            raise
        seen.append(("returned", result))
        return result

    handler: workq.Handler[None, Any] = workq.handler("ends")(end if plain else end_on_the_loop)
    id = await run_one(queue, handler, watch, watch)
    assert seen == [("raised" if raised else "returned", outcome)] * 2
    assert id is not None
    row = await queue.get(id)
    assert (None if row is None else row.state) == LEFT[kind]


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
@pytest.mark.parametrize(
    "error",
    [ValueError("boom"), asyncio.CancelledError("boom"), ExceptionGroup("boom", [KeyError("one")])],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_passes_through_as_it_was_raised(error: BaseException, plain: bool, database: Database) -> None:
    events, seen = Events(), list[BaseException]()

    def fail(task: workq.Task) -> None:
        raise error

    async def fail_on_the_loop(task: workq.Task) -> None:
        raise error

    async def watch(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        try:
            return await call_next()
        except BaseException as error:
            seen.append(error)
            raise

    handler: workq.Handler[None, Any] = workq.handler("fails")(fail if plain else fail_on_the_loop)
    async with hooked(database, events) as queue:
        row = await row_of(queue, await run_one(queue, handler, watch))
    assert seen[0] is error
    assert (await events.until("failed")).error is error
    assert "boom" in (row.error or "")


async def test_a_middleware_may_swallow_an_error(queue: workq.Queue) -> None:
    @workq.handler("fails")
    async def fails(task: workq.Task) -> None:
        raise FileNotFoundError("gone already")

    async def forgive(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        try:
            return await call_next()
        except FileNotFoundError:
            return None

    await run_one(queue, fails, forgive)
    assert await queue.find() == []


async def test_a_middleware_that_returns_nothing_says_done(queue: workq.Queue) -> None:
    """What call_next returned is its to return."""

    @workq.handler("fails")
    async def fails(task: workq.Task) -> workq.Result:
        return workq.Fail("never")

    async def forget(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        await call_next()
        return None

    await run_one(queue, fails, forget)
    assert await queue.find() == []


@pytest.mark.parametrize("raises", [False, True], ids=["returned", "raised"])
async def test_a_middleware_may_replace_a_result(raises: bool, queue: workq.Queue) -> None:
    """An error of some kind becomes a retry after a while, for every handler."""

    @workq.handler("busy", retry=workq.linear(retries=1, delay=60))
    async def busy(task: workq.Task) -> None:
        raise ConnectionError("refused")

    async def patient(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        try:
            return await call_next()
        except ConnectionError as error:
            if raises:
                raise workq.Retry(error, after=600) from error
            return workq.Retry(error, after=600)

    row = await row_of(queue, await run_one(queue, busy, patient))
    assert (row.state, row.attempt) == ("waiting", 1)
    assert (row.error or "").startswith("ConnectionError: refused")
    assert row.finished_at is not None
    assert round((row.run_at - row.finished_at).total_seconds()) == 600


@pytest.mark.parametrize("raises", [False, True], ids=["returned", "raised"])
async def test_a_middleware_may_answer_without_calling_the_handler(raises: bool, queue: workq.Queue) -> None:
    runs: list[str] = []

    async def closed(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        if raises:
            raise workq.Later(3600)
        return workq.Later(3600)

    row = await row_of(queue, await run_one(queue, an_async_def(runs), closed))
    assert (row.state, row.attempt) == ("waiting", 0)
    assert runs == []


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_a_middleware_raises_is_a_failed_run_of_the_task(when: str, queue: workq.Queue) -> None:
    """isolation: by the handler's own policy, and the next task runs."""
    order: list[str] = []

    @workq.handler("note", retry=workq.linear(retries=1, delay=60))
    async def note(task: workq.Task[str]) -> None:
        order.append(task.payload)

    async def breaks(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        if task.payload == "breaks" and when == "before":
            raise LookupError("no session")
        result = await call_next()
        if task.payload == "breaks" and when == "after":
            raise LookupError("no session")
        return result

    async with workq.Executor(queue, [note], workers=1, middleware=[breaks], **QUICK):
        id = await queue.enqueue(None, note, "breaks")
        await queue.wait(timeout=SOON)
        await queue.enqueue(None, note, "works")
        await queue.wait(timeout=SOON)
    row = await row_of(queue, id)
    assert (row.state, row.attempt) == ("waiting", 1)
    assert (row.error or "").startswith("LookupError: no session")
    assert order == (["works"] if when == "before" else ["breaks", "works"])


async def test_a_middleware_may_call_the_handler_again(queue: workq.Queue) -> None:
    """A second try within the same run: what it returns at last counts."""
    attempts: list[int] = []

    @workq.handler("flaky")
    async def flaky(task: workq.Task) -> None:
        attempts.append(task.attempt)
        if len(attempts) < 3:
            raise ConnectionError

    async def again(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        while True:
            try:
                return await call_next()
            except ConnectionError:
                continue

    await run_one(queue, flaky, again)
    assert attempts == [1, 1, 1]
    assert await queue.find() == []


async def test_another_return_value_of_a_middleware_counts_as_done_with_one_warning(
    queue: workq.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    async def odd(task: workq.Task[Any], call_next: workq.Next) -> Any:
        await call_next()
        return "odd"

    order: list[str] = []
    note = an_async_def(order)
    async with workq.Executor(queue, [note], middleware=[odd], **QUICK):
        await queue.enqueue_many(None, [workq.NewTask(note) for _ in range(3)])
        await queue.wait(timeout=SOON)
    assert await queue.find() == []
    assert order == ["handler"] * 3
    assert sum("counts as success" in record.getMessage() for record in caplog.records) == 1


async def test_what_a_middleware_leaves_in_a_tickers_payload_persists(database: Database) -> None:
    events = Events()

    @workq.handler("sync")
    async def sync(task: workq.Task[dict[str, int]]) -> None:
        task.payload["handler"] = task.payload.get("handler", 0) + 1

    async def count(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        result = await call_next()
        task.payload["middleware"] = task.payload.get("middleware", 0) + 1
        return result

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, workq.every(hours=1), {})
        async with workq.Executor(queue, [sync], schedules=[schedule], middleware=[count], **QUICK):
            for number in (1, 2):
                (row,) = await queue.find()
                await queue.reschedule(None, row.id)
                await events.until("completed", number)
        (row,) = await queue.find()
        assert row.payload == {"handler": 2, "middleware": 2}


@pytest.mark.parametrize("why", ["stop", "timeout", "lost"])
async def test_a_middleware_can_clean_up_when_its_run_is_cancelled(why: str, database: Database) -> None:
    """It sees the handler's CancelledError, and may still wait for a moment."""
    events, runs, cleaned = Events(), Runs(), list[str]()

    @workq.handler("slow", timeout=0.3 if why == "timeout" else None)
    async def slow(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    async def session(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        try:
            return await call_next()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned.append("session")
            raise
        finally:
            await asyncio.sleep(0)
            cleaned.append("finally")

    ends = {"stop": "released", "timeout": "failed", "lost": "lost"}
    async with hooked(database, events) as queue:
        id = await queue.enqueue(None, slow, 1)
        assert id is not None
        async with workq.Executor(queue, [slow], middleware=[session], lease=0.6, **QUICK) as executor:
            await runs.until(lambda: bool(runs.running))
            if why == "stop":
                await executor.stop(0)
            if why == "lost":
                await queue.delete(None, id)
            await events.until(ends[why])
    assert cleaned == ["session", "finally"]
    assert events.kinds() == ["enqueued", "started", ends[why]]


async def test_a_middlewares_own_time_limit_is_an_error_like_any_other(queue: workq.Queue) -> None:
    """asyncio.timeout round call_next works: middleware and handler are one asyncio task."""

    @workq.handler("slow", retry=workq.linear(retries=1, delay=60))
    async def slow(task: workq.Task) -> None:
        await asyncio.Event().wait()

    async def limit(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        async with asyncio.timeout(0.05):
            return await call_next()

    row = await row_of(queue, await run_one(queue, slow, limit))
    assert (row.state, row.attempt) == ("waiting", 1)
    assert (row.error or "").startswith("TimeoutError")
    assert "its timeout" not in (row.error or "")


async def test_a_middleware_that_opens_a_transaction_ends_the_task_with_the_handlers_writes(
    database: Database,
) -> None:
    """complete(tx) in one place for all handlers: commit on success, rollback on everything else."""
    table = database.table.replace("workq", "notes")
    events = Events()

    async def session(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        async with database.caller() as app:
            SESSION.set(app)
            result = await call_next()
            if result is None:
                await task.complete(app.tx)
                await app.commit()
            return result

    @workq.handler("note", retry=workq.linear(delay=60))
    async def note(task: workq.Task[int]) -> workq.Result:
        await SESSION.get().execute(f"insert into {table} values ({task.payload})")
        if task.payload == 2:
            raise ValueError("no")
        return workq.Retry("not yet") if task.payload == 3 else None

    async with hooked(database, events) as queue:
        await database.rows(f"create table {table} (number integer)")
        await queue.enqueue_many(None, [workq.NewTask(note, number) for number in (1, 2, 3, 4)])
        async with workq.Executor(queue, [note], workers=1, middleware=[session], **QUICK):
            await queue.wait(timeout=SOON)
        assert await database.rows(f"select number from {table} order by number") == [(1,), (4,)]
        assert [(row.payload, row.state) for row in await queue.find()] == [(2, "waiting"), (3, "waiting")]
    assert (events.count("completed"), events.count("failed")) == (2, 2)


async def test_current_task_is_the_task_of_this_run_everywhere_below_it(queue: workq.Queue) -> None:
    """In middleware, handler, their subtasks and threads; and nowhere else."""
    seen: dict[str, workq.Task[Any] | None] = {}

    async def subtask() -> None:
        seen["subtask"] = workq.current_task()

    @workq.handler("look")
    async def look(task: workq.Task[int]) -> None:
        seen["itself"] = task
        seen["handler"] = workq.current_task()
        async with asyncio.TaskGroup() as group:
            group.create_task(subtask())
        seen["thread"] = await asyncio.to_thread(workq.current_task)

    async def watch(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        seen["middleware"] = workq.current_task()
        try:
            return await call_next()
        finally:
            seen["middleware, afterwards"] = workq.current_task()

    assert workq.current_task() is None
    await run_one(queue, look, watch, payload=1)
    task = seen["itself"]
    assert task is not None
    assert all(one is task for one in seen.values()), seen
    assert len(seen) == 6
    assert workq.current_task() is None


async def test_current_task_is_known_in_the_thread_of_a_plain_def(queue: workq.Queue) -> None:
    seen: list[object] = []

    @workq.handler("look")
    def look(task: workq.Task[int]) -> None:
        seen.append(threading.current_thread() is not threading.main_thread())
        seen.append(workq.current_task() is task)

    await run_one(queue, look, payload=1)
    assert seen == [True, True]


async def test_runs_at_the_same_time_each_have_their_own_current_task(queue: workq.Queue) -> None:
    runs, seen = Runs(), dict[int, tuple[int, str]]()

    def current() -> workq.Task[Any]:
        task = workq.current_task()
        assert task is not None
        return task

    @workq.handler("look")
    async def look(task: workq.Task[int]) -> None:
        TRACE.set(f"run {task.payload}")
        await runs.hold(task.payload)
        seen[task.payload] = current().payload, TRACE.get()

    await queue.enqueue_many(None, [workq.NewTask(look, number) for number in range(5)])
    async with workq.Executor(queue, [look], workers=5, **QUICK):
        await runs.until(lambda: len(runs.running) == 5)
        assert TRACE.get() == "none"
        runs.go.set()
        await queue.wait(timeout=SOON)
    assert seen == {number: (number, f"run {number}") for number in range(5)}


async def test_a_middleware_can_reset_what_it_set(queue: workq.Queue) -> None:
    """F41: before and after call_next it is in one context, whatever kind of handler ran in between."""
    seen: list[str] = []

    @workq.handler("look")
    def look(task: workq.Task) -> None:
        seen.append(TRACE.get())
        TRACE.set("by the thread")

    async def span(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        token = TRACE.set("span")
        try:
            return await call_next()
        finally:
            seen.append(TRACE.get())
            TRACE.reset(token)
            seen.append(TRACE.get())

    await run_one(queue, look, span)
    assert seen == ["span", "span", "none"]
    assert await queue.find() == []


async def test_headers_travel_to_middleware_handler_and_every_event(database: Database) -> None:
    """Those of the queue and those given with the task; through retries and retry()."""
    events, seen = Events(), list[dict[str, str]]()
    expected = {"trace": "7", "tenant": "b"}

    @workq.handler("note", retry=workq.linear(retries=1, delay=0))
    async def note(task: workq.Task) -> None:
        seen.append(dict(task.headers))
        if len(seen) < 6:
            raise ValueError

    async def watch(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        seen.append(dict(task.headers))
        return await call_next()

    async with hooked(database, events, headers=lambda: {"trace": "7", "tenant": "a"}) as queue:
        id = await queue.enqueue(None, note, headers={"tenant": "b"})
        assert id is not None
        async with workq.Executor(queue, [note], middleware=[watch], **QUICK):
            await events.until("failed", 2)
            assert await queue.retry(None, id)
            await events.until("completed")
    assert seen == [expected] * 6
    assert [dict(event.headers) for event in events] == [expected] * len(events)
    assert events.kinds() == [
        *("enqueued", "started", "failed", "started", "failed"),
        *("retried", "started", "completed"),
    ]


async def test_a_trace_goes_on_from_task_to_task(database: Database) -> None:
    """Queue(headers=) writes it, a middleware reads it, in transactions and without."""
    seen: list[tuple[str, str]] = []

    @workq.handler("chain")
    async def chain(task: workq.Task[int]) -> None:
        seen.append((f"link {task.payload}", TRACE.get()))
        if task.payload == 0:
            await queue.enqueue(None, chain, 1)
        if task.payload == 1:
            async with database.caller() as app:
                await queue.enqueue_many(app.tx, [workq.NewTask(chain, 2)])
                await app.commit()
        if task.payload == 2:
            queue.enqueue_soon(chain, 3)

    async def trace(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        TRACE.set(task.headers["trace"])
        return await call_next()

    async with (
        hooked(database, headers=lambda: {"trace": TRACE.get()}) as queue,
        workq.Executor(queue, [chain], middleware=[trace], **QUICK),
    ):
        TRACE.set("request 1")
        await queue.enqueue(None, chain, 0)
        TRACE.set("request 2")
        await queue.wait(timeout=SOON)
    assert seen == [(f"link {number}", "request 1") for number in range(4)]


async def test_a_task_without_headers_has_none_and_nobody_can_change_them(queue: workq.Queue) -> None:
    seen: list[workq.Task[int]] = []

    @workq.handler("look")
    async def look(task: workq.Task[int]) -> None:
        seen.append(task)
        with pytest.raises(TypeError):
            task.headers["a"] = "b"  # type: ignore[index]  # pyright: ignore[reportIndexIssue]

    await queue.enqueue(None, look, 1, headers={"a": "a"})
    await queue.enqueue(None, look, 2)
    async with workq.Executor(queue, [look], workers=1, **QUICK):
        await queue.wait(timeout=SOON)
    assert [dict(task.headers) for task in seen] == [{"a": "a"}, {}]
    assert await queue.find() == []


async def test_what_the_queues_headers_raise_is_the_callers_and_nothing_is_stored(database: Database) -> None:
    def headers() -> dict[str, str]:
        raise LookupError("no trace")

    async with hooked(database, headers=headers) as queue:
        with pytest.raises(LookupError, match="no trace"):
            await queue.enqueue(None, "note")
        with pytest.raises(LookupError, match="no trace"):
            await queue.enqueue_many(None, [workq.NewTask("note")])
        with pytest.raises(LookupError, match="no trace"):
            queue.enqueue_soon("note")
        assert await queue.find() == []
