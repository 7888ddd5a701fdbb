"""Every feature, setting and promise in the description of system Q (pgqueue for Go), by the words used there.

Its "Result Actions" are in test_results.py. Where Q has another name for something, the test shows ours.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import workq
from support import SOON, Database, Events, Runs, eventually, hooked

QUICK: dict[str, Any] = {"poll_interval": 0.1, "stop_timeout": 2}


@dataclass
class SendEmailPayload:
    to: str
    subject: str
    body: str = ""


SEND_EMAIL = workq.Spec("send-email", SendEmailPayload, key=lambda email: f"{email.to}:{email.subject}")
WELCOME = SendEmailPayload("user@example.com", "Welcome", "Hello!")


@dataclass
class SyncPayload:
    last_synced_id: int


@asynccontextmanager
async def pods(database: Database, number: int) -> AsyncGenerator[list[workq.Queue]]:
    """Queues that share nothing but the database."""
    async with AsyncExitStack() as stack:
        queues = [workq.Queue(await stack.enter_async_context(database.open())) for _ in range(number)]
        await queues[0].migrate()
        yield queues


async def stored(queue: workq.Queue, target: workq.Spec[Any], payload: object = None, **options: Any) -> int:
    id = await queue.enqueue(None, target, payload, **options)
    assert id is not None
    return id


async def row_of(queue: workq.Queue, id: int) -> workq.TaskRow:
    row = await queue.get(id)
    assert row is not None
    return row


async def test_jobs(queue: workq.Queue) -> None:
    """Q, Features: "Jobs — one-shot tasks: enqueue, process, complete or fail"."""
    sent: list[SendEmailPayload] = []

    @workq.handler(SEND_EMAIL)
    async def send_email(task: workq.Task[SendEmailPayload]) -> workq.Result:
        if task.payload.to == "nobody":
            return workq.Fail("no such mailbox")
        sent.append(task.payload)
        return workq.Done()

    done = await stored(queue, SEND_EMAIL, WELCOME)
    broken = await stored(queue, SEND_EMAIL, SendEmailPayload("nobody", "Welcome"))
    async with workq.Executor(queue, [send_email], **QUICK):
        await queue.wait(timeout=SOON)
    assert sent == [WELCOME]
    assert await queue.get(done) is None
    assert (await row_of(queue, broken)).error == "no such mailbox"


async def test_tickers(queue: workq.Queue) -> None:
    """Q, Features: "Tickers — recurring tasks: auto-created at startup, reschedule after each run, payload persists
    state between runs"."""
    seen: list[int] = []

    @workq.handler("data-sync")
    async def sync(task: workq.Task[SyncPayload]) -> None:
        seen.append(task.payload.last_synced_id)
        task.payload.last_synced_id += 100

    schedule = workq.Schedule(sync, workq.every(seconds=0.01), SyncPayload(0), key="main-sync")
    async with workq.Executor(queue, [sync], schedules=[schedule], poll_interval=0.02):
        assert len(await queue.find(target=sync)) == 1
        await eventually(lambda: longer_than(seen, 3))
    assert seen == [100 * number for number in range(len(seen))]
    (row,) = await queue.find()
    assert row.payload == {"last_synced_id": 100 * len(seen)}


async def longer_than(values: list[Any], number: int) -> bool:
    return len(values) > number


async def test_generic_handlers(queue: workq.Queue) -> None:
    """Q, Features: "Generic handlers — Job[P] with typed payloads, zero boilerplate"."""
    seen: list[SendEmailPayload] = []

    @workq.handler("send-email")
    async def send_email(task: workq.Task[SendEmailPayload]) -> None:
        seen.append(task.payload)

    await stored(queue, send_email, WELCOME)
    async with workq.Executor(queue, [send_email], **QUICK):
        await queue.wait(timeout=SOON)
    assert seen == [WELCOME]
    assert type(seen[0]) is SendEmailPayload


async def test_at_least_once_delivery(database: Database) -> None:
    """Q, Features: "At-least-once delivery — fenced finalization with claim tokens prevents stale workers from
    clobbering results"; the fence compares id, version and token."""
    events, runs = Events(), Runs()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with hooked(database, events) as queue:
        id = await stored(queue, work, "x")
        async with workq.Executor(queue, [work], **QUICK):
            await runs.until(lambda: bool(runs.running))
            # As another worker's claim leaves it: the same version, even, but its own token.
            await database.rows(f"update {{table}} set locked_by = locked_by + 1 where id = {id}")
            runs.go.set()
            await events.until("lost")
        assert (await row_of(queue, id)).state == "running"
    assert events.kinds() == ["enqueued", "started", "lost"]


async def test_deduplication(queue: workq.Queue) -> None:
    """Q, Features: "Deduplication — optional hash-based dedup via ON CONFLICT DO NOTHING"."""
    first = await queue.enqueue(None, SEND_EMAIL, WELCOME)
    assert await queue.enqueue(None, SEND_EMAIL, WELCOME) is None
    assert [row.id for row in await queue.find()] == [first]


async def test_lease_based_crash_recovery(database: Database) -> None:
    """Q, Features: "Lease-based crash recovery — reaper reclaims tasks from dead workers"; no reaper here: every claim
    takes what is due, locked by nobody or no longer."""
    ran: list[int] = []

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        ran.append(task.payload)

    async with pods(database, 1) as (queue,):
        ids = [await stored(queue, work, number) for number in range(3)]
        await database.rows(
            "update {table} set locked_by = 1, version = version + 1, node = 'dead:1', locked_until = run_at"
        )
        async with workq.Executor(queue, [work], **QUICK):
            await queue.wait(timeout=SOON)
        assert sorted(ran) == [0, 1, 2]
        assert [await queue.get(id) for id in ids] == [None] * 3


async def test_graceful_shutdown(database: Database) -> None:
    """Q, Features: "Graceful shutdown — drain in-flight work with timeout"."""
    events, runs = Events(), Runs()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        if task.payload == "quick":
            await runs.hold("quick")
        else:
            runs.running.add("slow")
            await asyncio.Event().wait()

    async with hooked(database, events) as queue:
        await stored(queue, work, "quick")
        slow = await stored(queue, work, "slow")
        executor = workq.Executor(queue, [work], poll_interval=0.1)
        await executor.start()
        await events.until("started", 2)
        stopping = asyncio.create_task(executor.stop(0.5))
        await asyncio.sleep(0)
        runs.go.set()
        await stopping
        (row,) = await queue.find()
        assert (row.id, row.state, row.attempt) == (slow, "waiting", 0)
    assert [event.kind for event in events][4:] == ["completed", "released"]


async def test_schema_by_program_or_by_migration_tool(database: Database) -> None:
    """Q, Schema: "Run the migration programmatically or use the embedded SQL with goose"."""

    @workq.handler("work")
    async def work(task: workq.Task) -> None: ...

    async with database.open() as db:
        queue = workq.Queue(db)
        for statement in queue.schema_sql().split(";\n"):
            if statement.strip():
                await database.rows(statement)
        await stored(queue, work)
        async with workq.Executor(queue, [work], **QUICK):
            await queue.wait(timeout=SOON)
        await queue.migrate()
        assert await queue.find() == []


async def test_enqueue_returns_the_id(queue: workq.Queue) -> None:
    """Q, Enqueue and Process: `id, err := pgqueue.Enqueue(ctx, q, sendEmailSpec, SendEmailPayload{...})`."""
    id = await queue.enqueue(None, SEND_EMAIL, WELCOME)
    assert id is not None
    assert (await row_of(queue, id)).payload == {"to": WELCOME.to, "subject": "Welcome", "body": "Hello!"}


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
async def test_start_blocks_until_cancelled_or_stopped(how: str, queue: workq.Queue) -> None:
    """Q, Enqueue and Process: "blocks until ctx cancelled or Stop called"; that is `run()`."""
    runs = Runs()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    executor = workq.Executor(queue, [work], **QUICK)
    running = asyncio.create_task(executor.run())
    await stored(queue, work, "x")
    await runs.until(lambda: bool(runs.running))
    assert not running.done()
    if how == "cancelled":
        running.cancel()
    stopping = asyncio.create_task(executor.stop(SOON)) if how == "stopped" else None
    await asyncio.sleep(0)
    runs.go.set()
    await asyncio.wait([running], timeout=SOON)
    if stopping is not None:
        await stopping
    assert running.cancelled() == (how == "cancelled")
    assert await queue.find() == []


async def test_job_spec_queue(queue: workq.Queue) -> None:
    """Q, JobSpec: Queue, "required"; it is what routes a task to its handler, and our Spec's name."""
    with pytest.raises(TypeError):
        workq.Spec()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="must not be empty"):
        workq.Spec("")
    ran: list[str] = []

    @workq.handler(workq.Spec("one"))
    async def one(task: workq.Task) -> None:
        ran.append(task.name)

    await queue.enqueue(None, "one")
    two = await queue.enqueue(None, "two")
    async with workq.Executor(queue, [one], **QUICK):
        await queue.wait("one", timeout=SOON)
    assert ran == ["one"]
    assert [row.id for row in await queue.find()] == [two]


async def test_job_spec_hash_fn(queue: workq.Queue) -> None:
    """Q, JobSpec: HashFn, "Dedup key function. nil = no dedup"; our `key`, which may also return None."""
    plain = workq.Spec("plain", SendEmailPayload)
    some = workq.Spec("some", SendEmailPayload, key=lambda email: email.subject or None)
    other = SendEmailPayload("user@example.com", "Goodbye")
    new = [
        await queue.enqueue(None, spec, payload) is not None
        for spec, payload in [
            (SEND_EMAIL, WELCOME),
            (SEND_EMAIL, WELCOME),
            (SEND_EMAIL, other),
            (plain, WELCOME),
            (plain, WELCOME),
            (some, SendEmailPayload("a", "")),
            (some, SendEmailPayload("a", "")),
        ]
    ]
    assert new == [True, False, True, True, True, True, True]
    assert [row.key for row in await queue.find(target=SEND_EMAIL)] == [
        "user@example.com:Welcome",
        "user@example.com:Goodbye",
    ]


async def test_job_spec_poll_interval(database: Database) -> None:
    """Q, JobSpec: PollInterval, "How often to check for pending tasks"; our Executor's, and a ring comes sooner."""
    events = Events()

    @workq.handler("work")
    async def work(task: workq.Task) -> None: ...

    async with hooked(database, events) as queue:
        id = await stored(queue, work, delay=3600)
        async with workq.Executor(queue, [work], poll_interval=0.1):
            # Behind everybody's back: nothing rings.
            await database.age(id, 7200)
            await events.until("completed")


async def test_job_spec_max_retries(database: Database) -> None:
    """Q, JobSpec: MaxRetries, 3, "Max retry attempts. 0 = no retries, negative = use default"; `linear(retries=)`."""
    runs: dict[str, int] = {}
    for name, policy in {
        "default": workq.linear(delay=0),
        "2": workq.linear(retries=2, delay=0),
        "0": workq.linear(retries=0, delay=0),
        "negative": workq.linear(retries=-1, delay=0),
    }.items():
        events = Events()

        @workq.handler(name, retry=policy)
        async def fails(task: workq.Task) -> None:
            raise ValueError

        async with hooked(database, events) as queue, workq.Executor(queue, [fails], **QUICK):
            await stored(queue, fails)
            await queue.wait(fails, timeout=SOON)
            await eventually(lambda: has_failed(queue, fails))
        runs[name] = events.count("started")
    assert runs == {"default": 4, "2": 3, "0": 1, "negative": 4}


async def has_failed(queue: workq.Queue, target: workq.Target) -> bool:
    return await queue.find(target=target, state="failed") != []


async def test_job_spec_retry_delay(database: Database) -> None:
    """Q, JobSpec: RetryDelay, 30s, "Base delay for linear backoff"; `linear(delay=)`."""
    events = Events()

    @workq.handler("default", retry=workq.linear())
    async def default(task: workq.Task) -> None:
        raise ValueError

    @workq.handler("longer", retry=workq.linear(delay=600))
    async def longer(task: workq.Task) -> None:
        raise ValueError

    async with hooked(database, events) as queue:
        ids = [await stored(queue, handler) for handler in (default, longer)]
        async with workq.Executor(queue, [default, longer], **QUICK):
            await events.until("failed", 2)
            first = [await pause(queue, id) for id in ids]
            for id in ids:
                await queue.reschedule(None, id)
            await events.until("failed", 4)
            second = [await pause(queue, id) for id in ids]
    assert (first, second) == ([30, 600], [60, 1200])


async def pause(queue: workq.Queue, id: int) -> int:
    row = await row_of(queue, id)
    assert row.finished_at is not None
    return round((row.run_at - row.finished_at).total_seconds())


async def test_job_spec_lease_duration(queue: workq.Queue) -> None:
    """Q, JobSpec: LeaseDuration, "Claim lease for crash recovery"; our Executor's `lease`."""
    runs = Runs()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    id = await stored(queue, work, "x")
    async with workq.Executor(queue, [work], lease=3600, **QUICK):
        await runs.until(lambda: bool(runs.running))
        row = await row_of(queue, id)
        assert row.state == "running"
        assert row.locked_until is not None
        assert timedelta(seconds=3600) <= row.locked_until - row.created_at < timedelta(seconds=3660)
        runs.go.set()


async def test_job_spec_finalize_buffer(database: Database) -> None:
    """Q, JobSpec: FinalizeBuffer, "Reserved time for finalization after handler"; ours is `timeout`, what the handler
    may take: a slow run ends as a failed one, written by its holder, however short the lease."""
    events = Events()

    @workq.handler("slow", timeout=0.5)
    async def slow(task: workq.Task) -> None:
        await asyncio.Event().wait()

    async with hooked(database, events) as queue:
        id = await stored(queue, slow)
        async with workq.Executor(queue, [slow], lease=0.6, **QUICK):
            await events.until("failed")
        row = await row_of(queue, id)
        assert (row.state, row.attempt, row.lost) == ("failed", 1, 0)
    assert events.kinds() == ["enqueued", "started", "failed"]


async def test_ticker_spec_has_all_fields_of_a_job_spec(database: Database) -> None:
    """Q, TickerSpec: "All fields from JobSpec plus": a Schedule has those of its handler."""
    events = Events()

    @workq.handler("sync", queue="data", priority=7, retry=workq.linear(retries=1, delay=0), timeout=0.05)
    async def sync(task: workq.Task) -> None:
        await asyncio.Event().wait()

    async with hooked(database, events) as queue:
        async with workq.Executor(queue, [sync], schedules=[workq.Schedule(sync, workq.every(hours=1))], **QUICK):
            (row,) = await queue.find()
            assert (row.queue, row.name, row.priority) == ("data", "sync", 7)
            await queue.reschedule(None, row.id)
            await events.until("failed", 2)
        (row,) = await queue.find()
        assert "its timeout of 0.05 s" in (row.error or "")
    assert events.count("started") == 2


async def test_ticker_spec_key(queue: workq.Queue) -> None:
    """Q, TickerSpec: Key, "Stable identity for upsert (unique per queue)"."""

    @workq.handler("sync")
    async def sync(task: workq.Task) -> None: ...

    schedules = [workq.Schedule(sync, workq.every(hours=1), key=key) for key in ("a", "b")]
    for _ in range(2):
        async with workq.Executor(queue, [sync], schedules=schedules, **QUICK):
            pass
    rows = await queue.find(target=sync)
    assert [(row.key, row.scheduled) for row in rows] == [("a", True), ("b", True)]
    with pytest.raises(ValueError, match="'a'"):
        workq.Executor(queue, [sync], schedules=[*schedules, workq.Schedule(sync, workq.every(days=1), key="a")])


async def test_ticker_spec_initial_payload(queue: workq.Queue) -> None:
    """Q, TickerSpec: InitialPayload, "Payload for first-ever creation"."""

    @workq.handler("data-sync")
    async def sync(task: workq.Task[SyncPayload]) -> None: ...

    for initial in (1, 2):
        schedule = workq.Schedule(sync, workq.every(minutes=5), SyncPayload(initial), key="main-sync")
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            (row,) = await queue.find()
            assert row.payload == {"last_synced_id": 1}


async def test_ticker_spec_every(database: Database) -> None:
    """Q, TickerSpec: Every, "Reschedule interval": from the end of a run to the next."""
    events = Events()

    @workq.handler("data-sync")
    async def sync(task: workq.Task[SyncPayload]) -> None: ...

    async with hooked(database, events) as queue:
        schedule = workq.Schedule(sync, workq.every(minutes=5), SyncPayload(0), key="main-sync")
        async with workq.Executor(queue, [sync], schedules=[schedule], **QUICK):
            (row,) = await queue.find()
            assert abs((row.run_at - row.created_at).total_seconds() - 300) < 30
            for number in (1, 2):
                await database.age(row.id, 1000 * number)
                await events.until("completed", number)
                assert abs(await pause(queue, row.id) - 300) < 30


async def test_skip_locked(database: Database) -> None:
    """Q, Multi-Pod Safety: "SKIP LOCKED prevents double-processing of the same task"."""
    ran: Counter[int] = Counter()

    @workq.handler("work")
    async def work(task: workq.Task[int]) -> None:
        ran[task.payload] += 1

    async with pods(database, 3) as queues:
        await queues[0].enqueue_many(None, [workq.NewTask(work, number) for number in range(150)])
        async with AsyncExitStack() as stack:
            for queue in queues:
                await stack.enter_async_context(workq.Executor(queue, [work], workers=4, **QUICK))
            await asyncio.gather(*(queue.wait(timeout=SOON) for queue in queues))
    assert ran == Counter(range(150))


async def test_claim_tokens(database: Database) -> None:
    """Q, Multi-Pod Safety: "Claim tokens fence finalization — a stale worker cannot overwrite a reclaimed task"."""
    slow, fast = Runs(), Runs()

    @workq.handler("work")
    async def stale(task: workq.Task[str]) -> workq.Result:
        await slow.hold(task.payload)
        return workq.Fail("from the stale worker")

    @workq.handler("work")
    async def fresh(task: workq.Task[str]) -> None:
        await fast.hold(task.payload)

    events = Events()
    async with hooked(database, events) as first, database.open() as db:
        second = workq.Queue(db)
        id = await stored(first, stale, "x")
        async with workq.Executor(first, [stale], workers=1, **QUICK):  # or it would take it over itself
            await slow.until(lambda: bool(slow.running))
            await database.age(id, 100)
            async with workq.Executor(second, [fresh], **QUICK):
                await fast.until(lambda: bool(fast.running))
                slow.go.set()
                await events.until("lost")
                row = await row_of(first, id)
                assert (row.state, row.error) == ("running", None)
                fast.go.set()
                await second.wait(timeout=SOON)
        assert await first.get(id) is None
    assert events.kinds() == ["enqueued", "started", "lost"]


CRASH = """
import asyncio, os, sys, workq

@workq.handler("work")
async def work(task: workq.Task[str]) -> None:
    os.write(1, b"done\\n")
    os._exit(3)  # after the work, before its end is written

async def main(url, schema):
    async with workq.connect(url, schema=schema or None, listen="WORKQ_TEST_POOLER" not in os.environ) as db:
        await workq.Executor(workq.Queue(db), [work], poll_interval=0.1).run()

asyncio.run(main(*sys.argv[1:]))
"""


async def crash(database: Database) -> None:
    """Have a worker of its own process start the only task of the name "work", and die when it has done it."""
    crashed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", CRASH, database.url, database.schema or ""],
        cwd=Path(workq.__file__).parents[1],
        capture_output=True,
        timeout=60,
    )
    assert (crashed.returncode, crashed.stdout) == (3, b"done\n"), crashed.stderr


async def test_lease_based_reaper(database: Database, queue: workq.Queue) -> None:
    """Q, Multi-Pod Safety: "Lease-based reaper recovers tasks from crashed workers": when the lease is over, and not
    before."""
    ran: list[str] = []

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        ran.append(task.payload)

    @workq.handler("other")
    async def other(task: workq.Task) -> None: ...

    id = await stored(queue, work, "x")
    await crash(database)
    # Short, because an executor that had to wait for SQLite's writer takes nothing over for a third of it.
    async with workq.Executor(queue, [work, other], lease=3, **QUICK):
        for _ in range(3):
            await stored(queue, other)
            await queue.wait(other, timeout=SOON)
        row = await row_of(queue, id)
        assert (row.state, row.attempt, ran) == ("running", 0, [])
        await database.age(id, 100)
        await queue.wait(timeout=SOON)
    assert ran == ["x"]
    assert await queue.find() == []


async def test_ticker_upsert(database: Database) -> None:
    """Q, Multi-Pod Safety: "Ticker upsert is concurrent-safe (ON CONFLICT DO NOTHING)"."""

    @workq.handler("sync")
    async def sync(task: workq.Task) -> None: ...

    async with pods(database, 4) as queues:
        schedules = [workq.Schedule(sync, workq.every(hours=1), key=key) for key in ("a", "b", "c")]
        executors = [workq.Executor(queue, [sync], schedules=schedules, **QUICK) for queue in queues]
        await asyncio.gather(*(executor.start() for executor in executors))
        assert [row.key for row in await queues[0].find()] == ["a", "b", "c"]
        await asyncio.gather(*(executor.stop() for executor in executors))


async def test_handlers_must_be_idempotent(database: Database, queue: workq.Queue) -> None:
    """Q, Multi-Pod Safety: "at-least-once delivery means a task can be processed more than once if a worker crashes
    between execution and finalization"."""
    again: list[int] = []

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        again.append(task.attempt)

    id = await stored(queue, work, "x")
    await crash(database)
    await database.age(id, 100)
    async with workq.Executor(queue, [work], **QUICK):
        await queue.wait(timeout=SOON)
    assert again == [1]
    assert await queue.find() == []


@pytest.mark.parametrize("how", ["failed", "disabled"])
async def test_enable(how: str, queue: workq.Queue) -> None:
    """Q, Recovery: "Re-enable a failed or disabled task": `q.Enable(ctx, taskID)` is `retry(tx, id)`."""
    broken, ran = [True], list[str]()

    @workq.handler("work")
    async def work(task: workq.Task[str]) -> None:
        if broken[0]:
            raise ValueError
        ran.append(task.payload)

    id = await stored(queue, work, "x")
    if how == "disabled":
        assert await queue.disable(None, id)
    async with workq.Executor(queue, [work], **QUICK):
        await queue.wait(timeout=SOON)
        row = await row_of(queue, id)
        assert row.state == "failed"
        assert (row.error == "disabled") == (how == "disabled")
        assert ran == []
        broken[0] = False
        assert await queue.retry(None, id)
        await queue.wait(timeout=SOON)
    assert ran == ["x"]
    assert await queue.find() == []


async def test_requeue(queue: workq.Queue) -> None:
    """Q, Recovery: "Re-enable with a specific run time": `q.Requeue(ctx, taskID, at)` is `retry(tx, id, run_at=)`."""
    id = await stored(queue, SEND_EMAIL, WELCOME)
    await queue.disable(None, id)
    at = datetime.now(UTC) + timedelta(hours=1)
    assert await queue.retry(None, id, run_at=at)
    row = await row_of(queue, id)
    assert (row.state, row.run_at, row.error) == ("waiting", at, None)


@pytest.mark.parametrize("fixed", [{"last_synced_id": 7}, SyncPayload(7)], ids=["plain JSON", "typed"])
async def test_replace_payload(fixed: object, database: Database, queue: workq.Queue) -> None:
    """Q, Recovery: "Fix a poison payload": `ReplacePayloadJSON` and `Enable` are `retry(tx, id, payload=)`."""
    seen: list[int] = []

    @workq.handler("data-sync")
    async def sync(task: workq.Task[SyncPayload]) -> None:
        seen.append(task.payload.last_synced_id)

    id = await queue.enqueue(None, "data-sync", {"last_synced_id": "poison"})
    assert id is not None
    async with workq.Executor(queue, [sync], **QUICK):
        await queue.wait(timeout=SOON)
        assert "PayloadError" in ((await row_of(queue, id)).error or "")
        assert await queue.retry(None, id, payload=fixed)
        await queue.wait(timeout=SOON)
    assert seen == [7]
