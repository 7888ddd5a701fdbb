"""isolation, and how a task meets its handler: routing, order, kinds of functions, contexts, what they may raise."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest

import workq
from support import SOON, Database, Events, Runs, eventually, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 2}
MEANWHILE: ContextVar[str] = ContextVar("meanwhile", default="unset")


@workq.handler("bystander")
async def bystander(task: workq.Task[int]) -> None: ...


async def failed_row(queue: workq.Queue, id: int | None) -> workq.TaskRow:
    """The row of a task, once it is kept as failed."""
    assert id is not None
    async with asyncio.timeout(SOON):
        while True:
            row = await queue.get(id)
            assert row is not None
            if row.state == "failed":
                return row
            await asyncio.sleep(0.01)


async def test_a_name_that_nobody_registered_here_is_left_alone(queue: workq.Queue) -> None:
    """F08: it is neither claimed nor failed, however often an executor looks."""
    runs = Runs()

    @workq.handler("known")
    async def known(task: workq.Task[int]) -> None:
        runs.started[task.payload] += 1

    unknown = await queue.enqueue(None, "unknown", 1)
    assert unknown is not None
    async with workq.Executor(queue, [known], **QUICK):
        for number in range(20):
            await queue.enqueue(None, known, number)
            await queue.wait(known, timeout=SOON)
    row = await queue.get(unknown)
    assert row is not None
    assert (row.state, row.attempt, row.lost, row.node, row.error) == ("waiting", 0, 0, None, None)
    assert len(runs.started) == 20


async def test_old_and_new_nodes_side_by_side_fail_nothing(database: Database) -> None:
    """F08: during a rolling deploy each node takes only what it knows."""
    events = Events()
    async with hooked(database, events) as queue:
        ran: Counter[tuple[str, str]] = Counter()

        def node(name: str, *kinds: str) -> workq.Executor:
            def made(kind: str) -> workq.Handler:
                @workq.handler(kind)
                async def handle(task: workq.Task[Any]) -> None:
                    ran[name, task.name] += 1

                return handle

            return workq.Executor(queue, [made(kind) for kind in kinds], **QUICK)

        async with node("old", "renamed", "both"), node("new", "added", "both"):
            await queue.enqueue_many(
                None, [workq.NewTask(kind, number) for number in range(40) for kind in ("renamed", "added", "both")]
            )
            await queue.wait(timeout=SOON)
        assert ran["old", "renamed"] == 40
        assert ran["new", "added"] == 40
        assert ran["old", "both"] + ran["new", "both"] == 40
        assert ran.total() == 120
        assert events.count("failed") == 0


async def test_a_task_goes_to_the_executor_of_its_queue(queue: workq.Queue) -> None:
    seen: list[tuple[str, str, int]] = []

    def made(queue_name: str) -> workq.Handler:
        @workq.handler("note", queue=queue_name)
        async def note(task: workq.Task[int]) -> None:
            seen.append((queue_name, task.queue, task.payload))

        return note

    mail, sms = made("mail"), made("sms")
    async with workq.Executor(queue, [mail], **QUICK), workq.Executor(queue, [sms], **QUICK):
        await queue.enqueue(None, mail, 1)
        await queue.enqueue(None, sms, 2)
        await queue.enqueue(None, mail, 3, queue="sms")
        nobodys = await queue.enqueue(None, mail, 4, queue="fax")
        await eventually(lambda: counted(lambda: len(seen) == 3))
    assert sorted(seen) == [("mail", "mail", 1), ("sms", "sms", 2), ("sms", "sms", 3)]
    assert [row.id for row in await queue.find()] == [nobodys]


async def counted(fact: Callable[[], bool]) -> bool:
    return fact()


async def test_queue_name_makes_an_executor_serve_another_queue_with_any_handlers(queue: workq.Queue) -> None:
    seen: list[tuple[str, str]] = []

    @workq.handler("a", queue="one")
    async def a(task: workq.Task) -> None:
        seen.append((task.name, task.queue))

    @workq.handler("b", queue="two")
    async def b(task: workq.Task) -> None:
        seen.append((task.name, task.queue))

    kept = await queue.enqueue(None, a)
    async with workq.Executor(queue, [a, b], queue_name="three", **QUICK):
        await queue.enqueue(None, a, queue="three")
        await queue.enqueue(None, b, queue="three")
        await eventually(lambda: counted(lambda: len(seen) == 2))
    assert sorted(seen) == [("a", "three"), ("b", "three")]
    assert [row.id for row in await queue.find()] == [kept]


async def test_two_executors_of_one_queue_run_each_task_once(queue: workq.Queue) -> None:
    """one holder."""
    runs: Counter[int] = Counter()

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        runs[task.payload] += 1
        await asyncio.sleep(0)

    async with workq.Executor(queue, [note], workers=3, **QUICK), workq.Executor(queue, [note], workers=3, **QUICK):
        await queue.enqueue_many(None, [workq.NewTask(note, number) for number in range(200)])
        await queue.wait(timeout=SOON)
    assert runs == Counter(range(200))


@pytest.mark.parametrize("claim_ahead", [True, False])
@pytest.mark.parametrize("workers", [1, 7, 50])
async def test_an_executor_starts_by_priority_then_due_time_then_id(
    queue: workq.Queue, claim_ahead: bool, workers: int
) -> None:
    order: list[int] = []

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        order.append(task.payload)

    past = datetime.now(UTC) - timedelta(hours=1)
    wanted = [(priority, second) for second in (3, 1, 2, 1) for priority in (0, 5, -100, 100, -1)]
    ids = await queue.enqueue_many(
        None,
        [
            workq.NewTask(note, number, priority=priority, run_at=past + timedelta(seconds=second))
            for number, (priority, second) in enumerate(wanted)
        ],
    )
    assert ids == sorted(id for id in ids if id is not None)
    async with workq.Executor(queue, [note], workers=workers, claim_ahead=claim_ahead, **QUICK):
        await queue.wait(timeout=SOON)
    assert order == sorted(range(len(wanted)), key=lambda number: (*wanted[number], number))


async def test_the_order_runs_across_names(queue: workq.Queue) -> None:
    order: list[int] = []

    def made(name: str) -> workq.Handler:
        @workq.handler(name)
        async def note(task: workq.Task[int]) -> None:
            order.append(task.payload)

        return note

    handlers = [made(name) for name in "cab"]
    past = datetime.now(UTC) - timedelta(hours=1)
    wanted = [(number % 2, (number * 7) % 5) for number in range(30)]
    await queue.enqueue_many(
        None,
        [
            workq.NewTask("abc"[number % 3], number, priority=priority, run_at=past + timedelta(seconds=second))
            for number, (priority, second) in enumerate(wanted)
        ],
    )
    async with workq.Executor(queue, handlers, workers=1, claim_ahead=False, **QUICK):
        await queue.wait(timeout=SOON)
    assert order == sorted(range(30), key=lambda number: (*wanted[number], number))


async def test_recovered_work_takes_its_place_by_due_time_beside_fresh_work(
    database: Database, queue: workq.Queue
) -> None:
    """F57: fresh work does not starve what was left behind by a vanished holder."""
    order: list[int] = []

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        order.append(task.payload)

    ids = await queue.enqueue_many(None, [workq.NewTask(note, number) for number in range(20)])
    await vanish(database, ids[7])
    async with workq.Executor(queue, [note], workers=1, **QUICK):
        await queue.wait(timeout=SOON)
    assert order == list(range(20))


async def vanish(database: Database, id: int | None) -> None:
    """Leave a task as a holder leaves it that died a while ago: locked, the lease over."""
    assert id is not None
    await database.rows(
        f"update {{table}} set locked_by = 1, version = version + 1, locked_until = created_at where id = {id}"
    )


async def test_no_more_run_at_once_than_there_are_workers(queue: workq.Queue) -> None:
    running = most = 0

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(task.payload % 7 + 1):
            await asyncio.sleep(0)
        running -= 1

    async with workq.Executor(queue, [note], workers=3, **QUICK):
        await queue.enqueue_many(None, [workq.NewTask(note, number) for number in range(300)])
        await queue.wait(timeout=SOON)
    assert most == 3


async def test_a_place_is_filled_again_as_soon_as_its_handler_has_returned(queue: workq.Queue) -> None:
    runs = Runs()

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        if task.payload < 2:
            await runs.hold(task.payload)

    await queue.enqueue_many(None, [workq.NewTask(note, number) for number in range(30)])
    async with workq.Executor(queue, [note], workers=3, **QUICK) as executor:
        # Two places are taken for long; everything else goes through the third.
        await eventually(lambda: counted(lambda: len(runs.running) == 2))
        await until_left(queue, 2)
        assert executor.health().running == 2
        runs.go.set()
        await queue.wait(timeout=SOON)


async def until_left(queue: workq.Queue, number: int) -> None:
    async def few() -> bool:
        return len(await queue.find()) == number

    await eventually(few)


@dataclass
class Seen:
    """What a handler of some kind noticed."""

    payload: object = None
    thread: int = 0
    current: object = None

    def note(self, task: workq.Task[str]) -> None:
        self.payload = task.payload
        self.thread = threading.get_ident()
        self.current = workq.current_task()


def an_async_def(seen: Seen) -> Any:
    async def handle(task: workq.Task[str]) -> None:
        await asyncio.sleep(0)
        seen.note(task)

    return handle


def a_plain_def(seen: Seen) -> Any:
    def handle(task: workq.Task[str]) -> None:
        seen.note(task)

    return handle


class Service:
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    async def work(self, task: workq.Task[str]) -> None:
        await asyncio.sleep(0)
        self.seen.note(task)

    def plain_work(self, task: workq.Task[str]) -> None:
        self.seen.note(task)


class AsyncCallee(Service):
    async def __call__(self, task: workq.Task[str]) -> None:
        await self.work(task)


class PlainCallee(Service):
    def __call__(self, task: workq.Task[str]) -> None:
        self.plain_work(task)


async def with_service(service: Service, task: workq.Task[str]) -> None:
    await service.work(task)


def plain_with_service(service: Service, task: workq.Task[str]) -> None:
    service.plain_work(task)


def wrapped(seen: Seen) -> Any:
    inner = an_async_def(seen)

    @functools.wraps(inner)
    def handle(*args: Any) -> Coroutine[Any, Any, None]:
        return inner(*args)

    return handle


def thinly_wrapped(seen: Seen) -> Any:
    inner = an_async_def(seen)

    def handle(task: workq.Task[str]) -> Awaitable[None]:
        return inner(task)

    return handle


ON_THE_LOOP: dict[str, Callable[[Seen], Any]] = {
    "async def, a closure": an_async_def,
    "bound method": lambda seen: Service(seen).work,
    "functools.partial": lambda seen: functools.partial(with_service, Service(seen)),
    "callable object": AsyncCallee,
    "plain wrapper with functools.wraps": wrapped,
    "plain wrapper without functools.wraps": thinly_wrapped,
}
IN_A_THREAD: dict[str, Callable[[Seen], Any]] = {
    "plain def, a closure": a_plain_def,
    "bound plain method": lambda seen: Service(seen).plain_work,
    "functools.partial of a plain def": lambda seen: functools.partial(plain_with_service, Service(seen)),
    "plain callable object": PlainCallee,
}


@pytest.mark.parametrize("kind", [*ON_THE_LOOP, *IN_A_THREAD])
async def test_a_handler_may_be(kind: str, queue: workq.Queue) -> None:
    seen = Seen()
    function = (ON_THE_LOOP | IN_A_THREAD)[kind](seen)
    handler: workq.Handler[Any, Any] = workq.handler("note")(function)
    async with workq.Executor(queue, [handler], **QUICK):
        await queue.enqueue(None, "note", "hello")
        await queue.wait(timeout=SOON)
    assert seen.payload == "hello"
    assert isinstance(seen.current, workq.Task)
    assert (seen.thread == threading.get_ident()) == (kind in ON_THE_LOOP)
    assert await queue.find() == []
    assert workq.current_task() is None


@pytest.mark.parametrize("kind", [*ON_THE_LOOP, *IN_A_THREAD])
async def test_the_payload_type_is_read_through(kind: str, queue: workq.Queue) -> None:
    """same value: a payload of another type fails that task before the handler sees it."""
    seen = Seen()
    handler: workq.Handler[Any, Any] = workq.handler("note")((ON_THE_LOOP | IN_A_THREAD)[kind](seen))
    async with workq.Executor(queue, [handler], **QUICK):
        row = await failed_row(queue, await queue.enqueue(None, "note", 5))
    assert "PayloadError" in (row.error or "")
    assert row.payload == 5
    assert seen.payload is None


async def test_as_many_plain_defs_run_at_once_as_there_are_workers(queue: workq.Queue) -> None:
    """They have threads of their own: more than the 40 that anyio lends everybody, also while those are all lent."""
    met = threading.Barrier(50)
    lent = asyncio.Event()
    free = threading.Event()

    @workq.handler("meet")
    def meet(task: workq.Task[int]) -> None:
        met.wait(SOON)

    async def borrow() -> None:
        async with asyncio.TaskGroup() as borrowers:
            limiter = anyio.to_thread.current_default_thread_limiter()
            for _ in range(int(limiter.total_tokens)):
                borrowers.create_task(anyio.to_thread.run_sync(free.wait, SOON))
            await eventually(lambda: counted(lambda: not limiter.available_tokens))
            lent.set()

    borrowed = asyncio.create_task(borrow())
    await lent.wait()
    try:
        async with workq.Executor(queue, [meet], workers=50, **QUICK):
            await queue.enqueue_many(None, [workq.NewTask(meet, number) for number in range(50)])
            await queue.wait(timeout=SOON)
    finally:
        free.set()
        await borrowed
    assert await queue.find() == []
    assert not met.broken


async def test_a_plain_def_that_blocks_holds_up_nobody(queue: workq.Queue) -> None:
    """F11: blocking code runs in a thread, and the loop goes on."""
    blocked, free = threading.Event(), threading.Event()

    @workq.handler("block")
    def block(task: workq.Task) -> None:
        blocked.set()
        free.wait(SOON)

    async with workq.Executor(queue, [block, bystander], workers=2, **QUICK):
        await queue.enqueue(None, block)
        await eventually(lambda: counted(blocked.is_set))
        await queue.enqueue(None, bystander, 1)
        await queue.wait(bystander, timeout=SOON)
        assert len(await queue.find(state="running")) == 1
        free.set()
        await queue.wait(timeout=SOON)


@pytest.mark.parametrize("value", ["text", 0, False, {"ok": True}], ids=repr)
async def test_any_other_return_value_counts_as_done_with_one_warning(
    value: object, queue: workq.Queue, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    name = f"returns {request.node.name}"

    async def handle(task: workq.Task[int]) -> Any:
        return value

    handler = workq.handler(name)(handle)
    async with workq.Executor(queue, [handler], **QUICK):
        await queue.enqueue_many(None, [workq.NewTask(name, number) for number in range(3)])
        await queue.wait(timeout=SOON)
    assert await queue.find() == []
    warnings = [record for record in caplog.records if "counts as success" in record.getMessage()]
    assert len(warnings) == 1


async def raise_in_a_subtask() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


async def cancel_oneself() -> None:
    own = asyncio.current_task()
    assert own is not None
    own.cancel()
    await asyncio.sleep(60)


async def raise_it() -> None:
    raise asyncio.CancelledError("by the handler")


@pytest.mark.parametrize("how", [raise_it, raise_in_a_subtask, cancel_oneself], ids=lambda how: how.__name__)
async def test_a_cancellation_from_inside_a_handler_is_a_failed_run_and_the_slot_goes_on(
    how: Callable[[], Awaitable[None]], queue: workq.Queue
) -> None:
    """F35: only a cancellation that workq requested counts as one."""

    @workq.handler("cancelled")
    async def cancelled(task: workq.Task) -> None:
        await how()

    async with workq.Executor(queue, [cancelled, bystander], workers=1, **QUICK) as executor:
        ids = [await queue.enqueue(None, cancelled) for _ in range(3)]
        for id in ids:
            row = await failed_row(queue, id)
            assert "CancelledError" in (row.error or "")
            assert row.attempt == 1
        await queue.enqueue(None, bystander, 1)
        await queue.wait(timeout=SOON)
        assert executor.health().ok
        assert executor.health().running == 0


async def test_a_cancellation_from_inside_a_handler_follows_its_policy(database: Database) -> None:
    """F35."""
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("cancelled", retry=workq.linear(retries=2, delay=0))
        async def cancelled(task: workq.Task) -> None:
            if task.attempt < 3:
                raise asyncio.CancelledError

        async with workq.Executor(queue, [cancelled], **QUICK):
            await queue.enqueue(None, cancelled)
            await events.until("completed")
        assert [event.kind for event in events if event.kind != "enqueued"] == [
            "started", "failed", "started", "failed", "started", "completed"
        ]  # fmt: skip


class Odd(BaseException):
    """Of no kind that anybody expects."""


class Garbled(ValueError):
    """With a message that no database takes as it is."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit("leaving"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("pressed"),
    "GeneratorExit": lambda: GeneratorExit("closing"),
    "CancelledError": lambda: asyncio.CancelledError("by itself"),
    "Odd": lambda: Odd("odd"),
    "MemoryError": lambda: MemoryError("full"),
    "TimeoutError": lambda: TimeoutError("slow"),
    "StopAsyncIteration": lambda: StopAsyncIteration("over"),
    "StopIteration": lambda: StopIteration("over"),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [Odd("one"), asyncio.CancelledError()]),
    "Unspeakable": Unspeakable,
    "Garbled": lambda: Garbled("\ud800 and \0 and \x1b[31m"),
}


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
async def test_whatever_a_handler_raises_the_others_run(
    plain: bool, queue: workq.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """F07, isolation: every kind of error fails its own task, in readable words, and no other."""

    def raise_it(task: workq.Task[str]) -> None:
        raise RAISED[task.payload]()

    async def raise_on_the_loop(task: workq.Task[str]) -> None:
        raise RAISED[task.payload]()

    handler: workq.Handler[str, Any] = workq.handler("raises")(raise_it if plain else raise_on_the_loop)
    async with workq.Executor(queue, [handler, bystander], workers=2, **QUICK) as executor:
        ids: dict[str, int | None] = {}
        for kind in RAISED:
            ids[kind] = await queue.enqueue(None, handler, kind)
            await queue.enqueue(None, bystander, 1)
        for kind, id in ids.items():
            row = await failed_row(queue, id)
            assert kind in (row.error or ""), row.error
            assert "raise_it" in (row.error or "") or "raise_on_the_loop" in (row.error or "")
            assert row.attempt == 1
            assert row.payload == kind
        await queue.wait(timeout=SOON)
        assert executor.health().ok
        assert len(await queue.find()) == len(RAISED)
    assert [record for record in caplog.records if "of workq's own" in record.getMessage()] == []


async def test_a_generator_exit_that_comes_out_of_an_awaited_task_is_a_failed_run(queue: workq.Queue) -> None:
    """isolation: Python throws it into the outermost coroutine, past every `except` of the inner ones."""

    async def close() -> None:
        raise GeneratorExit("closing")

    @workq.handler("closes")
    async def closes(task: workq.Task) -> None:
        await asyncio.create_task(close())

    async with workq.Executor(queue, [closes, bystander], workers=1, **QUICK):
        row = await failed_row(queue, await queue.enqueue(None, closes))
        assert "GeneratorExit" in (row.error or "")
        await queue.enqueue(None, bystander, 1)
        await queue.wait(timeout=SOON)


async def test_without_a_policy_nothing_is_retried(database: Database) -> None:
    """W: there is no automatic retry; the row stays until retry or delete."""
    events = Events()
    async with hooked(database, events) as queue:

        @workq.handler("fails")
        async def fails(task: workq.Task) -> None:
            raise ValueError("boom")

        async with workq.Executor(queue, [fails, bystander], **QUICK):
            id = await queue.enqueue(None, fails)
            await failed_row(queue, id)
            assert id is not None
            await database.age(id, 1000)
            for number in range(5):
                await queue.enqueue(None, bystander, number)
                await queue.wait(timeout=SOON)
        assert [event.kind for event in events if event.id == id] == ["enqueued", "started", "failed"]
        failed = await events.until("failed")
        assert failed.retry_at is None
        row = await queue.get(id)
        assert row is not None
        assert (row.state, row.attempt) == ("failed", 1)
        assert (row.error or "").startswith("ValueError: boom")


async def test_a_failed_task_is_kept_with_type_message_and_traceback_but_no_locals(queue: workq.Queue) -> None:
    """F61: what the frames held is not written anywhere."""

    @workq.handler("fails")
    async def fails(task: workq.Task[str]) -> None:
        password = "hunter2 " + task.payload
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise LookupError("outer") from error
        finally:
            del password

    async with workq.Executor(queue, [fails], **QUICK):
        row = await failed_row(queue, await queue.enqueue(None, fails, "secret payload"))
    text = row.error or ""
    assert text.startswith("LookupError: outer")
    assert "inner" in text
    assert __file__ in text
    assert "in fails" in text
    assert "secret payload" not in text


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
async def test_a_huge_error_is_cut_between_characters_and_keeps_head_and_tail(plain: bool, queue: workq.Queue) -> None:
    """F44: message and traceback are capped."""

    def deep(levels: int) -> None:
        if levels:
            return deep(levels - 1)
        raise ValueError("head " + "ä€𝄞" * 200_000 + " tail")

    def fails(task: workq.Task) -> None:
        deep(300)

    async def fails_on_the_loop(task: workq.Task) -> None:
        deep(300)

    handler: workq.Handler[None, Any] = workq.handler("fails")(fails if plain else fails_on_the_loop)
    async with workq.Executor(queue, [handler], **QUICK):
        row = await failed_row(queue, await queue.enqueue(None, handler))
    text = row.error or ""
    assert text.startswith("ValueError: head ä€𝄞")
    assert " tail" in text
    assert "deep" in text
    assert "\ufffd" not in text
    assert len(text.encode()) < (8 + 32 + 1) * 1024


async def test_a_payload_that_does_not_decode_fails_alone_and_keeps_its_text(queue: workq.Queue) -> None:
    """F07: the rest of the page it was claimed with runs, and no policy repeats what cannot change."""
    ran: list[str] = []

    @workq.handler(workq.Spec("note", str), retry=workq.linear(retries=5, delay=0))
    async def note(task: workq.Task[str]) -> None:
        ran.append(task.payload)

    ids = await queue.enqueue_many(
        None, [workq.NewTask("note", {"no": "str"} if number == 7 else str(number)) for number in range(20)]
    )
    async with workq.Executor(queue, [note], workers=20, **QUICK):
        row = await failed_row(queue, ids[7])
        await queue.wait(timeout=SOON)
    assert sorted(ran, key=int) == [str(number) for number in range(20) if number != 7]
    assert row.payload == {"no": "str"}
    assert row.attempt == 1
    assert "PayloadError" in (row.error or "")


@pytest.mark.parametrize(
    "kind", [ValueError, asyncio.CancelledError, GeneratorExit, StopIteration], ids=lambda kind: kind.__name__
)
async def test_a_hook_that_raises_on_every_event_changes_nothing(
    kind: type[BaseException], database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F40: 200 of 200 tasks finish, the other hooks are told, and the log says what was raised."""
    told = Events()

    def breaks(event: workq.Event) -> None:
        raise kind("by the hook")

    async with hooked(database, breaks, told) as queue:
        # Without claim_ahead: on a busy machine some of what was claimed ahead would be handed back and tell of it.
        async with workq.Executor(queue, [bystander], claim_ahead=False, **QUICK):
            await queue.enqueue_many(None, [workq.NewTask(bystander, number) for number in range(200)])
            await queue.wait(timeout=SOON)
        assert await queue.find() == []
    assert Counter(told.kinds()) == Counter(enqueued=200, started=200, completed=200)
    logged = [record for record in caplog.records if "event hook" in record.getMessage()]
    assert len(logged) == 600
    assert all(record.exc_info is not None and record.exc_info[0] is kind for record in logged)


async def test_a_hook_that_raises_on_a_failure_leaves_the_row_failed(database: Database) -> None:
    """F40."""

    def breaks(event: workq.Event) -> None:
        raise LookupError("by the hook")

    @workq.handler("fails")
    async def fails(task: workq.Task) -> None:
        raise ValueError("by the handler")

    async with hooked(database, breaks) as queue, workq.Executor(queue, [fails, bystander], **QUICK):
        row = await failed_row(queue, await queue.enqueue(None, fails))
        assert "by the handler" in (row.error or "")
        await queue.enqueue(None, bystander, 1)
        await queue.wait(timeout=SOON)


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
async def test_each_run_has_a_context_of_its_own_copied_from_the_executors_construction(
    plain: bool, queue: workq.Queue
) -> None:
    """F41: what a handler sets is seen by no later run, nor what others set after the executor was made."""
    seen: list[str] = []

    def look(task: workq.Task[int]) -> None:
        seen.append(MEANWHILE.get())
        MEANWHILE.set(f"set by run {task.payload}")

    async def look_on_the_loop(task: workq.Task[int]) -> None:
        look(task)

    handler: workq.Handler[int, Any] = workq.handler("look")(look if plain else look_on_the_loop)
    MEANWHILE.set("at construction")
    executor = workq.Executor(queue, [handler], workers=1, **QUICK)
    MEANWHILE.set("at start")
    async with executor:
        MEANWHILE.set("at enqueue")
        for number in range(3):
            await queue.enqueue(None, handler, number)
            await queue.wait(timeout=SOON)
    assert seen == ["at construction"] * 3
    assert MEANWHILE.get() == "at enqueue"


async def test_a_middleware_and_its_handler_share_the_context_of_the_run(queue: workq.Queue) -> None:
    """F41: a tracing middleware can hand a span to the handler, and the next run does not see it."""
    seen: list[str] = []

    async def trace(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
        seen.append(MEANWHILE.get())
        MEANWHILE.set("span")
        return await call_next()

    @workq.handler("look")
    async def look(task: workq.Task) -> None:
        seen.append(MEANWHILE.get())

    async with workq.Executor(queue, [look], middleware=[trace], **QUICK):
        for _ in range(2):
            await queue.enqueue(None, look)
            await queue.wait(timeout=SOON)
    assert seen == ["unset", "span", "unset", "span"]


async def test_a_handler_that_only_its_own_future_knows_is_not_collected(queue: workq.Queue) -> None:
    """F39: the loop keeps only weak references, so a run must be held by somebody else."""
    waiting: list[weakref.ref[asyncio.Future[None]]] = []

    @workq.handler("waits")
    async def waits(task: workq.Task) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(weakref.ref(future))
        await future

    async with workq.Executor(queue, [waits], **QUICK):
        await queue.enqueue(None, waits)
        await eventually(lambda: counted(lambda: len(waiting) == 1))
        for _ in range(5):
            gc.collect()
            await asyncio.sleep(0)
        future = waiting[0]()
        assert future is not None
        future.set_result(None)
        del future
        await queue.wait(timeout=SOON)


async def test_no_background_task_is_collected_while_it_works(
    queue: workq.Queue, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """F39: loops, senders and rings survive a collection at any moment, and nothing is destroyed while pending."""
    runs = Runs()
    gc.collect()
    gc.freeze()  # or each of a hundred collections would look at everything that the tests before this one have left
    request.addfinalizer(gc.unfreeze)

    @workq.handler("note")
    async def note(task: workq.Task[int]) -> None:
        gc.collect()
        runs.started[task.payload] += 1

    with caplog.at_level(logging.DEBUG, "asyncio"):
        async with workq.Executor(queue, [note], workers=2, **QUICK):
            for number in range(0, 40, 2):
                queue.enqueue_soon(note, number)
                gc.collect()
                await queue.enqueue(None, note, number + 1)
                gc.collect()
                await asyncio.sleep(0.005)
            await queue.wait(timeout=SOON)
    assert runs.started == Counter(range(40))
    assert [record.getMessage() for record in caplog.records if "destroyed" in record.getMessage()] == []
