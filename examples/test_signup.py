"""Testing application code that enqueues: pytest examples/test_signup.py

A file to copy. It needs pytest-asyncio and workq[aiosqlite], and no server: each test has an SQLite file of its own.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import aiosqlite
import pytest
import pytest_asyncio

import workq

# -- the application, which you would import


@dataclass
class Welcome:
    email: str


WELCOME = workq.Spec("send-welcome", Welcome, key=lambda welcome: welcome.email)


@dataclass
class Outbox:
    """Stands in for the mail server."""

    sent: list[str] = field(default_factory=list[str])
    broken: bool = False

    async def welcome(self, task: workq.Task[Welcome]) -> None:
        if self.broken:
            raise ConnectionError("the mail server is down")
        self.sent.append(task.payload.email)


async def sign_up(conn: aiosqlite.Connection, queue: workq.Queue, email: str) -> None:
    await conn.execute("insert into users (email) values (?)", [email])
    await queue.enqueue(conn, WELCOME, Welcome(email))


# -- its tests

pytestmark = pytest.mark.asyncio


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest_asyncio.fixture
async def conn(tmp_path: Path) -> AsyncGenerator[aiosqlite.Connection]:
    async with aiosqlite.connect(tmp_path / "test.db") as conn:
        await conn.execute("create table users (email text primary key)")
        yield conn


@pytest_asyncio.fixture
async def queue(tmp_path: Path, outbox: Outbox) -> AsyncGenerator[workq.Queue]:
    """A queue with an executor that runs while the test does."""
    async with workq.connect(f"sqlite:///{tmp_path}/test.db") as db:
        queue = workq.Queue(db)
        await queue.migrate()
        async with workq.Executor(queue, [workq.handler(WELCOME)(outbox.welcome)]):
            yield queue


async def test_a_new_user_gets_a_welcome(conn: aiosqlite.Connection, queue: workq.Queue, outbox: Outbox) -> None:
    await sign_up(conn, queue, "ann@example.org")
    await conn.commit()
    await queue.wait(timeout=5)
    assert outbox.sent == ["ann@example.org"]


async def test_who_does_not_sign_up_gets_none(conn: aiosqlite.Connection, queue: workq.Queue, outbox: Outbox) -> None:
    await sign_up(conn, queue, "ann@example.org")
    await conn.rollback()
    await queue.wait(timeout=5)
    assert outbox.sent == []


async def test_a_welcome_that_fails_is_kept(conn: aiosqlite.Connection, queue: workq.Queue, outbox: Outbox) -> None:
    outbox.broken = True
    await sign_up(conn, queue, "ann@example.org")
    await conn.commit()
    await queue.wait(WELCOME, timeout=5)  # a failed task does not count as one to wait for
    (failed,) = await queue.find(state="failed")
    assert "the mail server is down" in (failed.error or "")

    outbox.broken = False
    await queue.retry(None, failed.id)
    await queue.wait(WELCOME, timeout=5)
    assert outbox.sent == ["ann@example.org"]


async def test_the_welcome_of_tomorrow_can_be_run_today(queue: workq.Queue, outbox: Outbox) -> None:
    id = await queue.enqueue(None, WELCOME, Welcome("ann@example.org"), delay=86400)
    assert id is not None
    await queue.reschedule(None, id)  # due now
    await queue.wait(timeout=5)
    assert outbox.sent == ["ann@example.org"]


async def test_a_handler_can_be_called_without_any_database(outbox: Outbox) -> None:
    await outbox.welcome(workq.Task(Welcome("ann@example.org")))
    assert outbox.sent == ["ann@example.org"]
