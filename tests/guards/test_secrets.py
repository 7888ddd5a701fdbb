"""F61, F62: a canary in payloads, passwords and locals is in no log line, event or stored error; a line for each."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import UUID

import pydantic
import pytest

import workq
import workq_asyncpg
from faults.proxy import proxy_to
from support import (
    SOON,
    Database,
    DroppedReply,
    Events,
    PostgresDatabase,
    SQLiteDatabase,
    eventually,
    wired_queue,
)
from workq import _life
from workq.dialect import Interrupted, Rows

CANARY = "hunter2-canary"
QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 2}


class Ear(logging.Handler):
    """Everything that is logged, as a file would show it, with whatever else a record carries."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.records: list[logging.LogRecord] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        shown = {key: value for key, value in vars(record).items() if key not in ("exc_info", "exc_text")}
        self.texts.append(f"{self.format(record)} {shown!r}")


class Watch:
    """What came out of a story."""

    def __init__(self, ear: Ear, database: Database) -> None:
        self._ear = ear
        self._database = database
        self.events = Events()

    def lines(self) -> list[str]:
        """The lines of workq's log."""
        return [text for record, text in zip(self._ear.records, self._ear.texts, strict=True) if record.name == "workq"]

    async def nothing_shows(self) -> None:
        """The canary is nowhere but where it was put: in the payload's column."""
        assert [text for text in self._ear.texts if CANARY in text] == []
        for record in self._ear.records:
            assert record.getMessage().isprintable(), record.getMessage()
        assert [event for event in self.events if CANARY in repr(event)] == []
        rows = await self._database.rows("select error, name, node, queue, key from {table}")
        assert [row for row in rows if CANARY in repr(row)] == []


@asynccontextmanager
async def watched(database: Database) -> AsyncGenerator[Watch]:
    """With the log at its most talkative, and asyncio's too."""
    ear = Ear()
    loggers = [logging.getLogger("workq"), logging.getLogger("asyncio"), logging.getLogger("asyncpg")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(ear)
        logger.setLevel(logging.DEBUG)
    try:
        watch = Watch(ear, database)
        yield watch
        await watch.nothing_shows()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(ear)
            logger.setLevel(level)


def with_password(database: Database) -> str:
    """The database's URL, with the canary as its password (which the test's server does not ask for)."""
    if isinstance(database, SQLiteDatabase):
        return database.url
    parts = urlsplit(database.url)
    return parts._replace(netloc=f"{parts.username}:{CANARY}@{parts.hostname}:{parts.port}").geturl()


@asynccontextmanager
async def queue_on(database: Database, watch: Watch, **options: Any) -> AsyncGenerator[workq.Queue]:
    async with workq.connect(with_password(database), schema=database.schema) as db:
        queue = workq.Queue(db, on_event=[watch.events], **options)
        await queue.migrate()
        yield queue


@dataclass
class Login:
    user: str
    password: str


async def test_runs_of_every_end(database: Database) -> None:
    """Success, failure, retry, Fail, Skip, Later, timeout, a nonsense result; a secret in every frame."""

    @workq.handler("ends", retry=workq.linear(retries=1, delay=0), timeout=0.3)
    async def ends(task: workq.Task[Login]) -> Any:
        password = task.payload.password
        match task.payload.user:
            case "raises":
                raise ValueError(f"{len(password)} characters")
            case "fails":
                return workq.Fail("no")
            case "skips":
                return workq.Skip("no")
            case "comes later" if task.attempt == 1:
                return workq.Retry("not now")
            case "is slow":
                await asyncio.sleep(60)
            case "is odd":
                return [password]
            case _:
                return None

    def blocks(task: workq.Task[Login]) -> None:
        secret = {"password": task.payload.password}
        raise KeyError(len(secret))

    users = ("works", "raises", "fails", "skips", "comes later", "is slow", "is odd")
    async with watched(database) as watch, queue_on(database, watch) as queue:
        handlers = [ends, workq.handler("blocks")(blocks)]
        async with workq.Executor(queue, handlers, **QUICK):
            for user in users:
                await queue.enqueue(None, ends, Login(user, CANARY))
            await queue.enqueue(None, "blocks", {"user": "x", "password": CANARY})
            await queue.wait(timeout=SOON)
        failed = await queue.find(state="failed")
        assert len(failed) == 5
        assert {CANARY in repr(row.payload) for row in failed} == {True}


class Model(pydantic.BaseModel):
    password: pydantic.SecretStr | int


class Colour(enum.Enum):
    RED = "red"


STORED = f'"{CANARY}"'
UNDECODABLE: dict[str, tuple[Any, str]] = {
    "int": (int, STORED),
    "float": (float, STORED),
    "bool": (bool, STORED),
    "none": (type(None), STORED),
    "list": (list[int], f"[{STORED}]"),
    "dict": (dict[str, int], f'{{"password": {STORED}}}'),
    "dataclass": (Login, f'{{"user": {STORED}}}'),
    "dataclass of a list": (Login, f"[{STORED}]"),
    "dataclass with a wrong field": (Login, f'{{"user": 1, "password": [{STORED}]}}'),
    "an enum": (Colour, STORED),
    "a literal": (Literal["a", "b"], STORED),
    "uuid": (UUID, STORED),
    "decimal": (Decimal, STORED),
    "bytes": (bytes, STORED),
    "union": (int | None, STORED),
    "a model": (Model, f'{{"password": [{STORED}]}}'),
    "a model of text": (Model, STORED),
}


@pytest.mark.parametrize("kind", UNDECODABLE)
async def test_a_payload_that_does_not_decode(database: Database, kind: str) -> None:
    """What the decoder says of it names the place and the type, not the value."""
    declared, stored = UNDECODABLE[kind]

    async def never(task: workq.Task[Any]) -> None:
        raise AssertionError

    handler = workq.handler(workq.Spec("never", declared))(never)
    async with watched(database) as watch, queue_on(database, watch) as queue:
        id = await queue.enqueue(None, "never", 1)
        await database.rows(f"update {{table}} set payload = '{stored}'")
        async with workq.Executor(queue, [handler], **QUICK):
            await watch.events.until("failed")
        assert id is not None
        row = await queue.get(id)
        assert row is not None
        assert row.state == "failed"
        assert row.error


@pytest.mark.parametrize("left", [{"password": CANARY, "x": float("nan")}, CANARY + "\ud800", {1: CANARY}, {CANARY}])
async def test_a_payload_that_cannot_be_stored_after_the_run(database: Database, left: Any) -> None:
    """Of a schedule: what the handler left is told by its place."""

    @workq.handler("tick")
    async def tick(task: workq.Task[Any]) -> None:
        task.payload = left

    async with watched(database) as watch, queue_on(database, watch) as queue:
        schedule = workq.Schedule(tick, lambda now: now, CANARY)
        async with workq.Executor(queue, [tick], schedules=[schedule], **QUICK):
            await watch.events.until("failed")


async def test_a_lost_lease_and_a_lost_reply(database: Database) -> None:
    async with watched(database) as watch, wired_queue(database, watch.events) as (wire, queue):
        go = asyncio.Event()

        @workq.handler("held")
        async def held(task: workq.Task[str]) -> None:
            secret = task.payload
            await go.wait()
            raise ValueError(len(secret))

        @workq.handler("quick")
        async def quick(task: workq.Task[str]) -> None: ...

        wire.replies[wire.sql.succeed] = DroppedReply()
        async with workq.Executor(queue, [held, quick], lease=0.6, **QUICK):
            id = await queue.enqueue(None, held, CANARY)
            await queue.enqueue(None, quick, CANARY)
            assert id is not None
            await watch.events.until("started", 2)
            await queue.delete(None, id)
            await watch.events.until("lost")
            await watch.events.until("completed")
        assert any("no longer ours" in line for line in watch.lines())


async def test_a_database_that_is_gone(postgres: PostgresDatabase) -> None:
    """The password is in the URL that is connected to again and again; what waits to be stored has the payload."""
    async with watched(postgres) as watch, proxy_to(postgres.url) as (proxy, url):
        parts = urlsplit(url)
        url = parts._replace(netloc=f"postgres:{CANARY}@{parts.hostname}:{parts.port}").geturl()
        async with workq.connect(url, schema=postgres.schema) as db:
            queue = workq.Queue(db, on_event=[watch.events])
            await queue.migrate()

            @workq.handler("note")
            async def note(task: workq.Task[str]) -> None:
                raise ValueError("at work")

            async with workq.Executor(queue, [note], **QUICK) as executor:
                await queue.enqueue(None, note, CANARY)
                await watch.events.until("failed")
                target = proxy._target  # pyright: ignore[reportPrivateUsage]
                proxy._target = ("127.0.0.1", 1)  # pyright: ignore[reportPrivateUsage]
                proxy.cut()

                async def gone() -> bool:
                    return executor.health().reachable is False and bool(watch.lines())

                await eventually(gone)
                queue.enqueue_soon(note, CANARY, headers={"token": CANARY})
                with pytest.raises((OSError, TimeoutError, workq.OutcomeUnknown)) as refused:
                    await queue.enqueue(None, note, CANARY)
                assert CANARY not in repr(refused.value)
                proxy._target = target  # pyright: ignore[reportPrivateUsage]

                async def back() -> bool:
                    return executor.health().reachable is True

                await eventually(back)
        assert any("failed and is tried again" in line for line in watch.lines())


@pytest.mark.parametrize("bad", ["host:port/name", "/ss@127.0.0.1:1/name", "#ss@127.0.0.1:1/name", "@[::1/name"])
async def test_a_url_that_cannot_be_used_is_not_repeated(bad: str) -> None:
    """Also where a password that was not escaped makes nonsense of the rest."""
    with pytest.raises((ValueError, OSError)) as refused:
        async with asyncio.timeout(SOON):
            await workq.connect(f"postgresql://user:{CANARY}{bad}").__aenter__()
    assert CANARY not in str(refused.value)
    assert CANARY[:7] not in str(refused.value)


async def test_a_row_that_the_database_refuses_is_not_shown(postgres: PostgresDatabase) -> None:
    """PostgreSQL tells the whole row as the error's DETAIL. Of a claim, and of a finish."""
    async with watched(postgres) as watch, queue_on(postgres, watch) as queue:

        @workq.handler("note")
        async def note(task: workq.Task[str]) -> None: ...

        @workq.handler("fails")
        async def fails(task: workq.Task[str]) -> None:
            raise ValueError("no")

        await queue.enqueue(None, note, CANARY)
        await postgres.rows("alter table {table} add constraint mine check (locked_by is null or name <> 'note')")
        await postgres.rows("alter table {table} add constraint ours check (attempt = 0)")
        async with workq.Executor(queue, [note], **QUICK):

            async def refused() -> bool:
                return any("mine" in line for line in watch.lines())

            await eventually(refused)
        async with workq.Executor(queue, [fails], **QUICK):
            await queue.enqueue(None, fails, CANARY)

            async def refused_too() -> bool:
                return any("ours" in line for line in watch.lines())

            await eventually(refused_too)
            await postgres.rows("alter table {table} drop constraint ours")
            await watch.events.until("failed")


@dataclass
class Alerts:
    """A hook with something to hide."""

    token: str

    def __call__(self, event: workq.Event) -> None:
        raise RuntimeError("the alert")

    def method(self, event: workq.Event) -> None:
        raise RuntimeError("the other alert")


async def test_a_hook_that_raises_is_named_and_not_shown(database: Database) -> None:
    """F40 beside: the task is not touched by it."""
    alerts = Alerts(CANARY)
    async with watched(database) as watch, workq.connect(with_password(database), schema=database.schema) as db:
        queue = workq.Queue(db, on_event=[alerts, alerts.method, watch.events])
        await queue.migrate()

        @workq.handler("note")
        async def note(task: workq.Task[str]) -> None: ...

        async with workq.Executor(queue, [note], **QUICK):
            await queue.enqueue(None, note, CANARY)
            await watch.events.until("completed")
        assert any("Alerts.method" in line for line in watch.lines())


async def test_a_redact_that_raises_shows_nothing(database: Database) -> None:
    def redact(text: str) -> str:
        raise ValueError(CANARY)

    async with watched(database) as watch, queue_on(database, watch, redact=redact) as queue:

        @workq.handler("fails")
        async def fails(task: workq.Task[str]) -> None:
            raise ValueError("no")

        async with workq.Executor(queue, [fails], **QUICK):
            await queue.enqueue(None, fails, CANARY)
            await watch.events.until("failed")


async def test_an_error_of_workqs_own_shows_no_payload(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that meets what nobody thought of, again and again."""
    monkeypatch.setattr(_life, "MAY_FAIL", 0.1)
    async with watched(database) as watch, wired_queue(database, watch.events) as (wire, queue):

        async def odd(rows: Rows) -> Rows:
            raise RuntimeError("nobody thought of this")

        async def broken(rows: Rows) -> Rows:
            raise Interrupted("broke") from ConnectionResetError("by the test")

        @workq.handler("note")
        async def note(task: workq.Task[str]) -> None: ...

        async with workq.Executor(queue, [note], **QUICK):
            await queue.enqueue(None, note, CANARY)
            wire.replies[wire.sql.claim] = odd

            async def told() -> bool:
                return any("nobody thought" in line for line in watch.lines())

            await eventually(told)
            wire.replies[wire.sql.claim] = broken
            await asyncio.sleep(0.1)
            del wire.replies[wire.sql.claim]
            await queue.wait(timeout=SOON)


async def test_what_promises_to_show_shows(queue: workq.Queue) -> None:
    """The other side: an exception's own message, its notes, and what `redact` makes of them are stored."""

    @workq.handler("fails")
    async def fails(task: workq.Task[str]) -> None:
        error = ValueError(f"bad password {task.payload}")
        error.add_note(f"a note on {task.payload}")
        raise error

    async with workq.Executor(queue, [fails], **QUICK):
        id = await queue.enqueue(None, fails, CANARY)
        await queue.wait(timeout=SOON)
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    assert str(row.error).count(CANARY) == 2


def test_reprs_show_no_credentials() -> None:
    assert CANARY not in repr(workq.connect(f"postgresql://user:{CANARY}@host/name"))
    assert workq_asyncpg.Postgres.__repr__ is object.__repr__
