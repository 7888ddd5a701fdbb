from collections.abc import AsyncGenerator
from pathlib import Path
from uuid import uuid4

import aiosqlite
import pytest
import pytest_asyncio
from signup import tasks
from signup.contracts import WELCOME, Welcome

import workq


class Outbox:
    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, to: str, text: str) -> None:
        self.sent.append(to)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest_asyncio.fixture
async def queue(tmp_path: Path, outbox: Outbox) -> AsyncGenerator[workq.Queue]:
    async with workq.connect(f"sqlite:///{tmp_path}/test.db") as db:
        queue = workq.Queue(db)
        await queue.migrate()
        async with workq.Executor(queue, tasks.mail_handlers(outbox)):
            yield queue
        assert not await queue.find(state="failed")


async def test_one_mail(queue: workq.Queue, outbox: Outbox, tmp_path: Path) -> None:
    welcome = Welcome(uuid4(), "ann@example.org")
    async with aiosqlite.connect(tmp_path / "test.db") as conn:
        assert await queue.enqueue(conn, WELCOME, welcome) is not None
        assert await queue.enqueue(conn, WELCOME, welcome) is None
        await conn.commit()
    await queue.wait(WELCOME, timeout=5)
    assert outbox.sent == ["ann@example.org"]


async def test_delayed(queue: workq.Queue, outbox: Outbox) -> None:
    id = await queue.enqueue(None, WELCOME, Welcome(uuid4(), "x"), delay=3600)
    assert id is not None
    await queue.reschedule(None, id)              # due now
    await queue.wait(timeout=5)
    assert outbox.sent == ["x"]


async def test_unit(outbox: Outbox) -> None:
    (welcome,) = tasks.mail_handlers(outbox)
    await welcome(workq.Task(Welcome(uuid4(), "bob@example.org"), attempt=3))
    assert outbox.sent == ["bob@example.org"]
