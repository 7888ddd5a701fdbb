"""Producers: what can be enqueued and how, and what is refused before anything is sent."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, NamedTuple

import aiosqlite
import asyncpg
import pytest

import workq
import workq_aiosqlite._connection
import workq_asyncpg
from support import SOON, Database, Events, PostgresDatabase, SQLiteDatabase, hooked
from workq import NewTask

INDIA = timezone(timedelta(hours=5, minutes=30))


@dataclass
class Email:
    to: str
    subject: str = "hello"


NOTE = workq.Spec("note", str)
PLAIN = workq.Spec("plain")
EMAIL = workq.Spec("email", Email, queue="mail", priority=-5, key=lambda email: email.to if email.to else None)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


async def row_of(queue: workq.Queue, id: int | None) -> workq.TaskRow:
    """The row of a task that was stored."""
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    return row


# What can be enqueued


async def test_a_spec_says_name_queue_priority_and_key(queue: workq.Queue) -> None:
    row = await row_of(queue, await queue.enqueue(None, EMAIL, Email("ann@example.org")))
    assert (row.name, row.queue, row.priority, row.key) == ("email", "mail", -5, "ann@example.org")
    assert row.payload == {"to": "ann@example.org", "subject": "hello"}
    assert row.state == "waiting"
    assert (row.attempt, row.lost, row.scheduled, row.headers) == (0, 0, False, {})
    assert row.node is row.locked_until is row.failed_at is row.finished_at is row.error is None


async def test_a_handler_is_enqueued_as_its_spec(queue: workq.Queue) -> None:
    @workq.handler(EMAIL)
    async def send(task: workq.Task[Email]) -> None: ...

    @workq.handler("tidy", queue="night", priority=7)
    async def tidy(task: workq.Task) -> None: ...

    mail = await row_of(queue, await queue.enqueue(None, send, Email("bob@example.org")))
    assert (mail.name, mail.queue, mail.priority, mail.key) == ("email", "mail", -5, "bob@example.org")
    night = await row_of(queue, await queue.enqueue(None, tidy))
    assert (night.name, night.queue, night.priority, night.payload) == ("tidy", "night", 7, None)


async def test_a_bare_name_is_enqueued_without_anything_else_known(queue: workq.Queue) -> None:
    row = await row_of(queue, await queue.enqueue(None, "email", {"to": "ann@example.org"}))
    assert (row.name, row.queue, row.priority, row.key) == ("email", "", 0, None)
    assert row.payload == {"to": "ann@example.org"}
    assert (await row_of(queue, await queue.enqueue(None, "email"))).payload is None


async def test_a_bare_name_reaches_a_typed_handler(queue: workq.Queue) -> None:
    """The producer and the handler may share nothing but the name, the queue and the JSON."""
    got: list[Email] = []

    @workq.handler(EMAIL)
    async def send(task: workq.Task[Email]) -> None:
        got.append(task.payload)

    await queue.enqueue(None, "email", {"to": "ann@example.org", "subject": "hi"}, queue="mail")
    async with workq.Executor(queue, [send], poll_interval=0.1):
        await queue.wait("email", timeout=SOON)
    assert got == [Email("ann@example.org", "hi")]


async def test_options_go_over_what_the_spec_says(queue: workq.Queue) -> None:
    row = await row_of(
        queue,
        await queue.enqueue(None, EMAIL, Email("ann"), queue="", priority=0, key="other", headers={"trace": "7"}),
    )
    assert (row.queue, row.priority, row.key, row.headers) == ("", 0, "other", {"trace": "7"})


async def test_a_key_function_may_give_no_key(queue: workq.Queue) -> None:
    ids = [await queue.enqueue(None, EMAIL, Email("")) for _ in range(2)]
    assert [(await row_of(queue, id)).key for id in ids] == [None, None]


async def test_an_empty_key_is_a_key(queue: workq.Queue) -> None:
    row = await row_of(queue, await queue.enqueue(None, NOTE, "first", key=""))
    assert row.key == ""
    assert await queue.enqueue(None, NOTE, "second", key="") is None
    assert await queue.enqueue_many(None, [NewTask(NOTE, "third", key=""), NewTask(NOTE, "fourth")]) != [None, None]


@pytest.mark.parametrize("priority", [-100, 100])
async def test_priorities_reach_from_minus_to_plus_a_hundred(queue: workq.Queue, priority: int) -> None:
    assert (await row_of(queue, await queue.enqueue(None, NOTE, "x", priority=priority))).priority == priority


async def test_a_delay_counts_from_the_enqueue(queue: workq.Queue) -> None:
    for delay in (0.25, 60, 86400 * 365 * 100):
        row = await row_of(queue, await queue.enqueue(None, NOTE, "x", delay=delay))
        waits = row.run_at - row.created_at
        assert timedelta(seconds=delay - 5) <= waits <= timedelta(seconds=delay)


async def test_a_task_without_a_time_is_due_at_once(queue: workq.Queue) -> None:
    for options in ({}, {"delay": 0}):
        row = await row_of(queue, await queue.enqueue(None, "note", "x", **options))  # type: ignore[arg-type]
        assert row.run_at <= row.created_at


async def test_a_time_comes_back_to_the_microsecond_and_in_utc(queue: workq.Queue) -> None:
    """F49: given in any zone, results are always aware UTC."""
    for at in (
        datetime(2031, 5, 6, 7, 8, 9, 123456, INDIA),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(9999, 1, 1, tzinfo=UTC),
    ):
        row = await row_of(queue, await queue.enqueue(None, NOTE, "x", run_at=at))
        assert row.run_at == at
        for moment in (row.run_at, row.created_at):
            assert moment.utcoffset() == timedelta(0)


async def test_headers_travel_beside_the_payload_and_are_read_only(queue: workq.Queue) -> None:
    headers = {"trace": "\u00e9\u8868\U0001f600", "control": 'a\n\x1b\x7f"\\', "": ""}
    row = await row_of(queue, await queue.enqueue(None, NOTE, "x", headers=headers))
    assert row.headers == headers
    with pytest.raises(TypeError):
        row.headers["trace"] = "other"  # type: ignore[index]


async def test_the_queues_own_headers_are_asked_at_every_enqueue(database: Database) -> None:
    """One given with the task goes over one of the same name."""
    traces = iter(range(10))
    async with database.open() as db:
        queue = workq.Queue(db, headers=lambda: {"trace": str(next(traces)), "app": "shop"})
        await queue.migrate()
        first = await row_of(queue, await queue.enqueue(None, NOTE, "x"))
        second = await row_of(queue, await queue.enqueue(None, NOTE, "x", headers={"app": "mine"}))
        (third,) = await queue.enqueue_many(None, [NewTask(NOTE, "x")])
        assert first.headers == {"trace": "0", "app": "shop"}
        assert second.headers == {"trace": "1", "app": "mine"}
        assert (await row_of(queue, third)).headers == {"trace": "2", "app": "shop"}


async def test_the_longest_names_and_keys_are_taken(queue: workq.Queue) -> None:
    """F44: together they still fit an index entry, in the widest characters there are."""
    # No repetition: PostgreSQL compresses index entries, and a repetitive one would always fit.
    wide = [chr(0x20000 + n * 89) for n in range(450)]
    name, queue_name, key = "".join(wide[:200]), "".join(wide[200:400]), "".join(wide[150:400])
    assert name.isprintable()
    assert queue_name.isprintable()
    assert len(key.encode()) == 1000
    row = await row_of(queue, await queue.enqueue(None, name, 1, queue=queue_name, key=key))
    assert (row.name, row.queue, row.key) == (name, queue_name, key)
    assert await queue.enqueue(None, name, 1, queue=queue_name, key=key) is None


async def test_keys_and_names_of_any_script_are_told_apart(queue: workq.Queue) -> None:
    """F42, F43: what is taken comes back, and nothing is taken for something else."""
    keys = ["a", "A", "\u00e1", "a\u0301", "a ", " a", "a\n", "a\x1b", "a\x7f", "\u8868", "\U0001f600"]
    keys += ["%", "\\", "'", '"', "$1", ":key", "?"]
    for key in keys:
        row = await row_of(queue, await queue.enqueue(None, NOTE, key, key=key))
        assert row.key == key
        assert [found.payload for found in await queue.find(key=key)] == [key]
    for name in ("caf\u00e9", "cafe\u0301", "CAF\u00c9", "a b", "a'b\"c", "\u8868"):
        await queue.enqueue(None, name, name, queue=name)
        assert [found.payload for found in await queue.find(target=name, queue=name)] == [name]


# Many at once


async def test_many_get_their_ids_in_order(queue: workq.Queue) -> None:
    ids = await queue.enqueue_many(None, [NewTask(NOTE, str(n)) for n in range(2500)])
    assert ids == sorted(id for id in set(ids) if id is not None)
    rows = await queue.find(limit=3000)
    assert {row.id: row.payload for row in rows} == {id: str(n) for n, id in enumerate(ids)}


async def test_many_of_all_kinds_each_get_their_own_id(queue: workq.Queue) -> None:
    """Keyed and unkeyed, of several names and queues, in no order."""
    tasks = [
        NewTask(NOTE, "0", key="z"),
        NewTask(NOTE, "1"),
        NewTask(EMAIL, Email("b", "2")),
        NewTask("note", "3", key="a", queue="mail"),
        NewTask(NOTE, "4"),
        NewTask(EMAIL, Email("", "5")),
        NewTask(NOTE, "6", key="a"),
        NewTask("other", "7", key=""),
        NewTask("other", "8"),
        NewTask(EMAIL, Email("a", "9")),
        NewTask("note", "10", key="\u00e9", delay=60, headers={"n": "10"}),
    ]
    ids = await queue.enqueue_many(None, tasks)
    rows = [await row_of(queue, id) for id in ids]
    payloads = [row.payload["subject"] if row.name == "email" else row.payload for row in rows]
    assert payloads == [str(n) for n in range(len(tasks))]
    assert [row.key for row in rows] == ["z", None, "b", "a", None, None, "a", "", None, "a", "\u00e9"]
    assert rows[10].headers == {"n": "10"}
    assert await queue.enqueue_many(None, tasks[:1]) == [None]


async def test_of_doubles_within_one_call_the_first_is_stored(queue: workq.Queue) -> None:
    await queue.enqueue(None, NOTE, "before", key="taken")
    payloads = ["a", "b", "c", "d", "e", "f"]
    keys = ["k", None, "k", "taken", "k", None]
    tasks = [
        NewTask(NOTE, payload) if key is None else NewTask(NOTE, payload, key=key)
        for payload, key in zip(payloads, keys, strict=True)
    ]
    ids = await queue.enqueue_many(None, tasks)
    assert [id is None for id in ids] == [False, False, True, True, True, False]
    for payload, id in zip(payloads, ids, strict=True):
        if id is not None:
            assert (await row_of(queue, id)).payload == payload
    assert sorted(row.payload for row in await queue.find()) == ["a", "b", "before", "f"]


async def test_none_at_all_is_none(queue: workq.Queue) -> None:
    assert await queue.enqueue_many(None, []) == []
    assert await queue.enqueue_many(None, iter(())) == []


async def test_many_may_come_from_a_generator(queue: workq.Queue) -> None:
    assert len(await queue.enqueue_many(None, (NewTask(NOTE, str(n)) for n in range(3)))) == 3


async def test_callers_that_share_an_insert_each_get_their_own_id(queue: workq.Queue) -> None:
    """Concurrent enqueues without a transaction go out together; nobody gets another's id."""
    payloads = [str(n) for n in range(300)]
    ids = await asyncio.gather(
        *(
            queue.enqueue(None, NOTE, payload, key=payload)
            if n % 7 == 0
            else queue.enqueue(None, NOTE, payload, delay=n)
            for n, payload in enumerate(payloads)
        )
    )
    rows = await queue.find(limit=1000)
    assert {row.id: row.payload for row in rows} == dict(zip(ids, payloads, strict=True))


async def test_each_stored_task_is_told_to_the_hooks_once(database: Database) -> None:
    """W: an `enqueued` event after the INSERT; none for a double."""
    events = Events()
    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        one = await queue.enqueue(None, NOTE, "x", key="k", headers={"h": "1"})
        assert await queue.enqueue(None, NOTE, "x", key="k") is None
        async with database.caller() as app:
            many = await queue.enqueue_many(app.tx, [NewTask(NOTE, "y", key="k"), NewTask(EMAIL, Email("e"))])
            await app.commit()
        assert [(event.kind, event.id, event.in_tx) for event in events] == [
            ("enqueued", one, False),
            ("enqueued", many[1], True),
        ]
        assert (events[0].queue, events[0].name, events[0].key, events[0].headers) == ("", "note", "k", {"h": "1"})
        assert (events[0].attempt, events[0].error, events[0].duration, events[0].retry_at) == (1, None, None, None)
        assert events[0].at.utcoffset() == timedelta(0)


# Soon


async def test_a_hook_may_enqueue_soon_and_stop_waits_for_it(database: Database) -> None:
    """W: enqueue from the OnEvent hook. What it enqueued is stored when stop() has returned."""
    events = Events()

    def follow_up(event: workq.Event) -> None:
        if event.kind == "completed" and event.name == "note":
            for n in range(3000):
                queue.enqueue_soon("follow-up", n)

    @workq.handler(NOTE)
    async def note(task: workq.Task[str]) -> None: ...

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[follow_up, events])
        await queue.migrate()
        await queue.enqueue(None, NOTE, "x")
        executor = workq.Executor(queue, [note], poll_interval=0.1)
        await executor.start()
        await events.until("started")
        await executor.stop()
        assert sum(event.kind == "enqueued" and event.name == "follow-up" for event in events) == 3000
        assert await database.rows("select count(*) from {table}") == [(3000,)]


async def test_leaving_connect_waits_for_what_was_enqueued_soon(database: Database) -> None:
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        for n in range(5000):
            queue.enqueue_soon("note", n, delay=60)
    assert await database.rows("select count(*) from {table}") == [(5000,)]


async def test_leaving_connect_by_an_error_waits_too(database: Database) -> None:
    async def fail() -> None:
        async with database.open() as db:
            queue = workq.Queue(db)
            await queue.migrate()
            queue.enqueue_soon(NOTE, "x")
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await database.rows("select count(*) from {table}") == [(1,)]


async def test_soon_takes_what_enqueue_takes(queue: workq.Queue) -> None:
    queue.enqueue_soon(EMAIL, Email("ann"), headers={"h": "1"}, delay=60)
    queue.enqueue_soon(EMAIL, Email("ann"))
    queue.enqueue_soon(PLAIN)
    queue.enqueue_soon("bare", {"a": 1}, queue="q")
    await queue.wait("nothing", timeout=SOON)
    rows = await queue.find()
    assert [(row.name, row.queue, row.key) for row in rows] == [
        ("email", "mail", "ann"), ("plain", "", None), ("bare", "q", None)
    ]  # fmt: skip
    assert rows[0].headers == {"h": "1"}


async def test_what_could_not_be_stored_soon_is_logged_without_its_payload(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F61: there is nobody to raise it to."""
    async with database.open() as db:
        workq.Queue(db).enqueue_soon("note", "hunter2", headers={"token": "hunter3"}, key="hunter4")
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert record.name.startswith("workq")
    assert "'note'" in record.getMessage()
    assert "hunter" not in caplog.text


async def test_soon_needs_a_running_loop_in_its_thread(queue: workq.Queue) -> None:
    with pytest.raises(RuntimeError, match="loop"):
        await asyncio.to_thread(queue.enqueue_soon, NOTE, "x")
    assert await queue.find() == []


# What is refused


class Refused(NamedTuple):
    """One enqueue that cannot be."""

    error: type[Exception]
    words: str
    """A pattern of what the error says."""
    target: Any
    payload: Any = None
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.target!r:.40}, {type(self.payload).__name__}, {self.options!r:.60}"


@dataclass
class Tree:
    children: list[Any] = field(default_factory=list[Any])


NAMES = [
    Refused(ValueError, "empty", ""),
    Refused(ValueError, "NUL", "no\0te"),
    Refused(ValueError, "printed", "no\nte"),
    Refused(ValueError, "printed", "no\x1b[31mte"),
    Refused(ValueError, "printed", "no\ud800te"),
    Refused(ValueError, "at most 200", "n" * 201),
    Refused(TypeError, "a Spec, a handler, or a name", b"note"),
    Refused(TypeError, "a Spec, a handler, or a name", None),
    Refused(TypeError, "a Spec, a handler, or a name", {"to": "ann"}),
    Refused(TypeError, "a Spec, a handler, or a name", str),
    Refused(ValueError, "queue", "note", options={"queue": "q\0"}),
    Refused(ValueError, "queue", "note", options={"queue": "q\u2028"}),
    Refused(ValueError, "queue", "note", options={"queue": "q\udfff"}),
    Refused(ValueError, "queue", "note", options={"queue": "q" * 201}),
    Refused(TypeError, "queue", "note", options={"queue": 7}),
    Refused(ValueError, "NUL", "note", options={"key": "k\0"}),
    Refused(ValueError, "surrogate", "note", options={"key": "k\ud800"}),
    Refused(ValueError, "1000 bytes", "note", options={"key": "k" * 1001}),
    Refused(ValueError, "1000 bytes", "note", options={"key": "\u00e9" * 501}),
    Refused(TypeError, "key", "note", options={"key": 7}),
    Refused(TypeError, "key", workq.Spec("note", str, key=lambda text: 7), "x"),  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    Refused(ValueError, "NUL", workq.Spec("note", str, key=lambda text: "\0"), "x"),
]
TIMES = [
    *(Refused(ValueError, "delay", "note", options={"delay": delay})
      for delay in (math.nan, math.inf, -math.inf, -1, -1e-9, 1e300, 86400 * 366 * 101, 10**400)),
    *(Refused(TypeError, "delay", "note", options={"delay": delay})
      for delay in (True, "5", timedelta(seconds=5), 1j)),
    Refused(ValueError, "naive", "note", options={"run_at": datetime(2031, 1, 1)}),  # noqa: DTZ001
    Refused(ValueError, "1970", "note", options={"run_at": datetime(1969, 12, 31, tzinfo=UTC)}),
    Refused(ValueError, "9999|range", "note", options={"run_at": datetime.max.replace(tzinfo=UTC)}),
    Refused(ValueError, "1970|range", "note", options={"run_at": datetime.min.replace(tzinfo=INDIA)}),
    *(Refused(TypeError, "datetime", "note", options={"run_at": at})
      for at in ("2031-01-01T00:00:00Z", 1.9e9, date(2031, 1, 1))),
    Refused(ValueError, "not both", "note", options={"run_at": datetime(2031, 1, 1, tzinfo=UTC), "delay": 1}),
]  # fmt: skip
OPTIONS = [
    Refused(TypeError, "no option 'dealy'", "note", options={"dealy": 5}),
    *(Refused(ValueError, "-100", "note", options={"priority": priority}) for priority in (-101, 101, 10**30)),
    *(Refused(TypeError, "priority", "note", options={"priority": priority}) for priority in (True, 1.5, "1")),
    *(Refused(TypeError, "headers", "note", options={"headers": headers})
      for headers in ("a=b", [("a", "b")], {"a": 1}, {1: "a"}, {"a": None})),
    Refused(ValueError, "NUL", "note", options={"headers": {"a": "\0"}}),
    Refused(ValueError, "NUL", "note", options={"headers": {"\0": "a"}}),
    Refused(ValueError, "surrogate", "note", options={"headers": {"a": "\ud800"}}),
    Refused(ValueError, "characters in all", "note", options={"headers": {"a": "b" * 20_000}}),
]  # fmt: skip
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
PAYLOADS = [
    *(Refused(workq.PayloadError, "no such number", "note", {"x": [number]})
      for number in (math.nan, math.inf, -math.inf)),
    Refused(workq.PayloadError, "surrogate", "note", "\ud800"),
    Refused(workq.PayloadError, "surrogate", "note", {"\udfff": 1}),
    Refused(workq.PayloadError, "str keys", "note", {1: "x"}),
    Refused(workq.PayloadError, "deeper than 100", "note", nested(101)),
    Refused(workq.PayloadError, "deeper than 100", "note", CIRCLE),
    Refused(workq.PayloadError, "digits", "note", 10**5000),
    *(Refused(workq.PayloadError, "of type", "note", [value])
      for value in ((1,), {1}, b"x", datetime.now(UTC), Email("x"), 1j, object())),
    Refused(workq.PayloadError, "at most 1000 are taken", "note", "x" * 999),
    Refused(workq.PayloadError, "at most 1000 are taken", "note", "\u00e9" * 500),
    Refused(workq.PayloadError, "at most 1000 are taken", NOTE, "x" * 999),
    Refused(workq.PayloadError, "no payload", PLAIN, {"x": 1}),
    Refused(workq.PayloadError, "Email", EMAIL, {"to": "ann"}),
    Refused(workq.PayloadError, "Email", EMAIL, Email(7)),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Refused(workq.PayloadError, "Email", EMAIL, None),
    Refused(workq.PayloadError, "surrogate|Email", EMAIL, Email("\ud800")),
    *(Refused(workq.PayloadError, "Tree", workq.Spec("tree", Tree), Tree([value]))
      for value in (math.nan, "\ud800", nested(200), object())),
]  # fmt: skip
ALL = {"names": NAMES, "times": TIMES, "options": OPTIONS, "payloads": PAYLOADS}


async def complaints(refused: list[Refused], attempt: Any) -> list[str]:
    """Try each; say of which the error was not what it should be."""
    found: list[str] = []
    for one in refused:
        try:
            await attempt(one)
        except Exception as error:
            if not isinstance(error, one.error) or not re.search(one.words, str(error)):
                found.append(f"{one}: {error!r:.200}")
        else:
            found.append(f"{one}: accepted")
    return found


@pytest.mark.parametrize("kind", ALL)
async def test_what_cannot_be_stored_is_refused_and_nothing_is_stored(database: Database, kind: str) -> None:
    """F42, F43, F49: alike on both databases, by every way to enqueue, and the caller's transaction stays usable."""
    async with database.open() as db:
        queue = workq.Queue(db, max_payload=1000)
        await queue.migrate()

        async def alone(one: Refused) -> None:
            await queue.enqueue(None, one.target, one.payload, **one.options)

        async def among_many(one: Refused) -> None:
            good = NewTask(NOTE, "good")
            await queue.enqueue_many(None, [good, NewTask(one.target, one.payload, **one.options), good])

        async def soon(one: Refused) -> None:
            queue.enqueue_soon(one.target, one.payload, **one.options)

        for attempt in (alone, among_many, soon):
            assert await complaints(ALL[kind], attempt) == []

        async with database.caller() as app:

            async def inside(one: Refused) -> None:
                await queue.enqueue(app.tx, one.target, one.payload, **one.options)

            assert await complaints(ALL[kind], inside) == []
            id = await queue.enqueue(app.tx, NOTE, "good")
            await app.commit()
        assert [row.id for row in await queue.find()] == [id]


@pytest.mark.parametrize("kind", ALL)
async def test_what_cannot_be_stored_is_refused_before_anything_is_sent(database: Database, kind: str) -> None:
    """F42, F43: without a database the answer is the same."""
    async with database.open() as db:
        queue = workq.Queue(db, max_payload=1000)

    async def alone(one: Refused) -> None:
        await queue.enqueue(None, one.target, one.payload, **one.options)

    with pytest.raises(Exception, match="clos|open"):
        await queue.enqueue(None, NOTE, "good")
    assert await complaints(ALL[kind], alone) == []


async def test_what_just_fits_is_taken(database: Database) -> None:
    """The limits themselves are inside."""
    async with database.open() as db:
        queue = workq.Queue(db, max_payload=1000)
        await queue.migrate()
        deep = nested(100)
        for payload in ("x" * 998, "\u00e9" * 499, deep):
            assert (await row_of(queue, await queue.enqueue(None, "note", payload))).payload == payload
        for options in ({"key": "\u00e9" * 500}, {"queue": "\u00e9" * 200}, {"headers": {"a": "b" * 16_383}}):
            assert await queue.enqueue(None, "n" * 200, 1, **options) is not None  # type: ignore[arg-type]


async def test_a_mebibyte_is_taken_unless_told_otherwise(queue: workq.Queue) -> None:
    payload = "x" * ((1 << 20) - 2)
    assert (await row_of(queue, await queue.enqueue(None, NOTE, payload))).payload == payload
    with pytest.raises(workq.PayloadError, match="1048576"):
        await queue.enqueue(None, NOTE, payload + "x")


async def test_of_many_the_one_that_cannot_be_stored_is_named(queue: workq.Queue) -> None:
    good, bad = NewTask(NOTE, "good"), NewTask("note", [math.nan])
    with pytest.raises(workq.PayloadError, match=r"payload\[0\] is nan") as refusal:
        await queue.enqueue_many(None, [good, good, bad])
    assert refusal.value.__notes__ == ["in the task at position 2"]
    assert await queue.find() == []


async def test_only_new_tasks_are_many(queue: workq.Queue) -> None:
    for wrong in ([(NOTE, "x")], ["note"], [NOTE], [NewTask(NOTE, "x"), None]):
        with pytest.raises(TypeError, match=r"NewTask\(target, payload"):
            await queue.enqueue_many(None, wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert await queue.find() == []


async def test_an_error_of_the_key_function_is_the_callers(queue: workq.Queue) -> None:
    def broken(text: str) -> str:
        raise LookupError(text)

    with pytest.raises(LookupError, match="x"):
        await queue.enqueue(None, workq.Spec("note", str, key=broken), "x")
    assert await queue.find() == []


# What is no transaction


async def test_a_forgotten_transaction_is_named(queue: workq.Queue) -> None:
    """What stands in its place is no connection; the error says what the first argument is."""
    anything: Any = queue
    for attempt in (
        lambda: anything.enqueue(NOTE, "x"),
        lambda: anything.enqueue("note", {"to": "ann"}),
        lambda: anything.enqueue("note", "x"),
        lambda: anything.enqueue("postgresql://localhost/app", NOTE, "x"),
        lambda: anything.enqueue_many([NewTask(NOTE, "x")], []),
        lambda: anything.retry(7, 7),
        lambda: anything.delete(7, 7),
        lambda: anything.reschedule({}, 7),
        lambda: anything.disable(object(), 7),
        lambda: anything.retry_all("note"),
        lambda: anything.get(7, tx="x"),
        lambda: anything.find(tx="x"),
    ):
        with pytest.raises(TypeError, match="transaction's connection, or None to commit at once"):
            await attempt()
    assert await queue.find() == []


async def test_what_is_no_connection_of_this_database_is_refused(queue: workq.Queue) -> None:
    """A connection of the sqlite3 module, a pool, something else with an execute method: the remedy is named."""

    class Executes:
        def execute(self, *args: Any) -> None:
            raise AssertionError("it was used")

    plain = sqlite3.connect(":memory:")
    pool = asyncpg.create_pool("postgresql://nobody@localhost/nothing")
    try:
        for tx in (plain, plain.cursor(), Executes(), pool, Executes):
            wrong: Any = tx
            for attempt in (
                queue.enqueue(wrong, NOTE, "x"),
                queue.enqueue_many(wrong, [NewTask(NOTE, "x")]),
                queue.delete(wrong, 1),
                queue.get(1, tx=wrong),
            ):
                with pytest.raises(TypeError, match=r"None to commit at once|open one with aiosqlite"):
                    await attempt
    finally:
        plain.close()
    assert await queue.find() == []


async def test_a_pool_is_no_transaction(postgres: PostgresDatabase) -> None:
    async with asyncpg.create_pool(postgres.url, min_size=1, max_size=4) as pool:
        queue = workq.Queue(workq_asyncpg.Postgres(pool, schema=postgres.schema))
        await queue.migrate()
        with pytest.raises(TypeError, match=r"pool.acquire\(\).*or None to commit at once"):
            await queue.enqueue(pool, NOTE, "x")
        assert await queue.find() == []


async def test_an_asyncpg_connection_without_a_transaction_is_refused(postgres: PostgresDatabase) -> None:
    """It would commit at once, although a transaction was meant."""
    async with postgres.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        id = await queue.enqueue(None, NOTE, "x")
        assert id is not None
        conn: Any = await asyncpg.connect(postgres.url)
        try:
            for attempt in (
                queue.enqueue(conn, NOTE, "y"),
                queue.enqueue(conn, NOTE, "y", key="k"),
                queue.enqueue_many(conn, [NewTask(NOTE, "y")]),
                queue.delete(conn, id),
                queue.disable(conn, id),
                queue.reschedule(conn, id),
                queue.retry(conn, id),
                queue.retry_all(conn),
            ):
                with pytest.raises(RuntimeError, match=r"conn.transaction\(\).*None instead of the connection"):
                    await attempt
            assert await queue.get(id, tx=conn) == await queue.get(id)
            assert await queue.find(tx=conn) == await queue.find()
        finally:
            await conn.close()
        assert [row.state for row in await queue.find()] == ["waiting"]


async def test_an_aiosqlite_connection_that_commits_at_once_is_refused(sqlite: SQLiteDatabase) -> None:
    """With isolation_level=None nothing begins a transaction by itself."""
    async with sqlite.open() as db, aiosqlite.connect(sqlite.path, isolation_level=None) as conn:
        queue = workq.Queue(db)
        await queue.migrate()
        id = await queue.enqueue(None, NOTE, "x")
        assert id is not None
        for attempt in (
            queue.enqueue(conn, NOTE, "y"),
            queue.enqueue(conn, NOTE, "y", key="k"),
            queue.enqueue_many(conn, [NewTask(NOTE, "y")]),
            queue.delete(conn, id),
            queue.disable(conn, id),
            queue.reschedule(conn, id),
            queue.retry(conn, id),
            queue.retry_all(conn),
        ):
            with pytest.raises(RuntimeError, match=r"BEGIN IMMEDIATE.*None instead of the connection"):
                await attempt
        assert await queue.get(id, tx=conn) == await queue.get(id)
        assert [row.state for row in await queue.find(tx=conn)] == ["waiting"]
        await conn.execute("begin immediate")
        await queue.enqueue(conn, NOTE, "y")
        await conn.execute("commit")
        assert [row.payload for row in await queue.find()] == ["x", "y"]


async def test_a_connection_of_the_other_driver_is_refused(postgres: PostgresDatabase, sqlite: SQLiteDatabase) -> None:
    async with (
        postgres.open() as postgres_db,
        sqlite.open() as sqlite_db,
        postgres.caller() as postgres_app,
        sqlite.caller() as sqlite_app,
    ):
        with pytest.raises(TypeError, match="must be an aiosqlite connection"):
            await workq.Queue(sqlite_db).enqueue(postgres_app.tx, NOTE, "x")
        with pytest.raises(TypeError, match="must be an asyncpg connection"):
            await workq.Queue(postgres_db).enqueue(sqlite_app.tx, NOTE, "x")


async def test_memory_that_ends_after_the_insert_makes_no_second_one(
    sqlite: SQLiteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared INSERT is never sent twice: what raises when it has been carried out leaves its outcome unknown."""
    async with hooked(sqlite) as queue:
        read = workq_aiosqlite._connection.read

        def exhausted(statement: Any, rows: Any) -> Any:
            monkeypatch.setattr(workq_aiosqlite._connection, "read", read)
            raise MemoryError

        await queue.enqueue(None, "work", 0)
        monkeypatch.setattr(workq_aiosqlite._connection, "read", exhausted)
        results = await asyncio.gather(*(queue.enqueue(None, "work", n) for n in range(3)), return_exceptions=True)
        assert {type(result) for result in results} == {workq.OutcomeUnknown}
        assert len(await queue.find()) == 4
