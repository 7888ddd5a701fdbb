"""Every operation there is, one after the other, and roles of PostgreSQL that may do no more than they must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

import workq
from support import SOON, PostgresDatabase, eventually
from workq.dialect import Statement, Statements

Transaction = Callable[[], Any]


@workq.handler("work")
async def work(task: workq.Task[object]) -> None: ...


@workq.handler("tick")
async def tick(task: workq.Task) -> None: ...


@workq.handler("fails")
async def fails(task: workq.Task[object]) -> None:
    raise ValueError


async def do_everything(queue: workq.Queue, transaction: Transaction) -> None:
    """Every statement there is but those of migrate; `transaction` gives a caller's connection in a transaction."""
    schedules = [workq.Schedule(tick, workq.every(hours=1))]
    later = datetime.now(UTC) + timedelta(hours=1)
    go, held = asyncio.Event(), asyncio.Event()
    moved: list[int] = []

    @workq.handler("completes")
    async def completes(task: workq.Task[object]) -> None:
        async with transaction() as tx:
            await task.complete(tx)

    @workq.handler("moves on")
    async def moves_on(task: workq.Task[int]) -> None:
        async with transaction() as tx:
            await task.complete(tx)
        moved.append(task.id)

    @workq.handler("repeats", retry=workq.linear(retries=1, delay=0))
    async def repeats(task: workq.Task[object]) -> None:
        if task.attempt == 1:
            raise ValueError

    @workq.handler("waits")
    async def waits(task: workq.Task[object]) -> None:
        held.set()
        await go.wait()

    handlers = [work, tick, fails, completes, moves_on, repeats, waits]
    schedules.append(workq.Schedule(moves_on, lambda now: later if moved else now, 1))
    executor = workq.Executor(queue, handlers, schedules=schedules, poll_interval=0.05, lease=0.6)
    async with executor:
        for handler in (work, completes, repeats, fails):
            await queue.enqueue(None, handler, 1)
        async with transaction() as tx:
            assert await queue.enqueue(tx, work, 2, key="once") is not None
            assert await queue.enqueue(tx, work, 2, key="once") is None
            assert len(await queue.find(key="once", tx=tx)) == 1
        await queue.wait(timeout=SOON)
        (failed,) = await queue.find(state="failed")
        assert await queue.retry(None, failed.id, payload={"again": 1})
        await queue.wait(timeout=SOON)
        async with transaction() as tx:
            assert await queue.retry_all(tx, target=fails, error_like="%ValueError%") == 1
        await queue.wait(timeout=SOON)
        assert await queue.enqueue_many(None, [workq.NewTask(work, n) for n in range(3)]) != []
        mixed = [workq.NewTask(work, 1), workq.NewTask(completes, 2, priority=1)]
        assert None not in await queue.enqueue_many(None, mixed)
        await queue.wait(work, timeout=SOON)
        waiting = await queue.enqueue(None, work, 3, run_at=later, key="later", headers={"a": "b"})
        assert waiting is not None
        assert await queue.reschedule(None, waiting, run_at=later)
        assert await queue.disable(None, waiting)
        taken = await queue.enqueue(None, work, 4, run_at=later, key="later")
        assert taken is not None
        with pytest.raises(workq.KeyTaken):
            await queue.retry(None, waiting)
        async with transaction() as tx:
            assert await queue.delete(tx, taken)
        assert (await queue.get(waiting)) is not None
        assert await queue.delete(None, waiting)
        assert await queue.delete(None, failed.id)
        # Long enough for heartbeats; then it is taken away, and its end finds nothing.
        lost = await queue.enqueue(None, waits, 1)
        assert lost is not None
        await held.wait()
        since = executor.health().beat_at

        async def beaten() -> bool:
            return executor.health().beat_at != since

        await eventually(beaten)
        assert await queue.delete(None, lost)
        go.set()
        await queue.wait(timeout=SOON)
    assert moved
    assert sorted(row.name for row in await queue.find()) == ["moves on", "tick"]


@contextmanager
def statements_sent(monkeypatch: pytest.MonkeyPatch) -> Generator[set[str]]:
    """The texts of the statements that are bound meanwhile."""
    texts: set[str] = set()
    positional = Statement.positional

    def noted(self: Statement, params: Any) -> list[object]:
        texts.add(self.text)
        return positional(self, params)

    with monkeypatch.context() as patch:
        patch.setattr(Statement, "positional", noted)
        yield texts


def never_sent(sql: Statements, texts: set[str]) -> set[str]:
    """The names of the others."""
    return {
        field.name
        for field in fields(sql)
        if isinstance(statement := getattr(sql, field.name), Statement) and statement.text not in texts
    }


@asynccontextmanager
async def role_on(postgres: PostgresDatabase) -> AsyncGenerator[str]:
    """A role of its own, that may do nothing yet."""
    name = f"role_{postgres.schema}"
    await postgres.rows(f"create role {name} login")
    try:
        yield name
    finally:
        await postgres.rows(f"drop owned by {name} cascade")
        await postgres.rows(f"drop role {name}")


@asynccontextmanager
async def pool_for(postgres: PostgresDatabase, role: str, **settings: str) -> AsyncGenerator[asyncpg.Pool[Any]]:
    """That role's pool."""
    parts = urlsplit(postgres.url)
    url = urlunsplit(parts._replace(netloc=f"{role}@{parts.hostname}:{parts.port}"))
    async with asyncpg.create_pool(url, min_size=0, max_size=10, server_settings=settings) as pool:
        yield pool


def transactions_of(pool: asyncpg.Pool[Any]) -> Transaction:
    """A caller's transaction."""

    @asynccontextmanager
    async def transaction() -> AsyncGenerator[Any]:
        async with pool.acquire() as conn, conn.transaction():
            yield conn

    return transaction
