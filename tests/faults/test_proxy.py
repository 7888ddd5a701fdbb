"""back again: networks that lose bytes without a word. Those that cut, and slow ones, are in tests/crash."""

from __future__ import annotations

import asyncio
import time

import pytest

import workq
import workq_asyncpg._bell
from crash.names import name_of
from faults.flow import flow
from faults.proxy import Link, Proxy, proxy_to
from records import record
from support import PostgresDatabase, Runs, eventually

BACK_AGAIN = 5.0
POLL = 0.2

Note = workq.Spec("note", str)


def listens(link: Link) -> bool:
    return b'LISTEN "workq_' in link.said


@pytest.mark.parametrize("seconds", [0.5, 3, pytest.param(9, marks=pytest.mark.slow)])
async def test_work_resumes_after_a_network_that_swallowed_everything(mortal: PostgresDatabase, seconds: float) -> None:
    """F21: however short it was. The old connections stay dead for ever."""
    async with proxy_to(mortal.url) as (proxy, url), flow(mortal, url, lease=4.5, poll_interval=POLL) as tasks:
        await tasks.runs(since=0)
        proxy.swallowing = True
        assert proxy.lose() >= 3
        await asyncio.sleep(seconds)
        proxy.swallowing = False
        back = time.monotonic()
        resumed = await tasks.runs(since=back, timeout=3 * BACK_AGAIN)
        record(
            "crash",
            await name_of(mortal),
            f"network swallows everything for {seconds:g} s, and the old connections stay dead",
            tasks=len(tasks.enqueued),
            took=resumed,
            violations={"back again": int(resumed > BACK_AGAIN)},
            times={"back again": [resumed]},
        )
        assert resumed < BACK_AGAIN
        await eventually(tasks.healthy)
        await tasks.end()
        assert await mortal.rows("select id from {table}") == []


async def test_stop_returns_in_time_from_a_network_that_swallows_everything(mortal: PostgresDatabase) -> None:
    """F36: clean stop, and leaving `connect` is bounded too."""
    runs = Runs()

    @workq.handler(Note)
    async def note(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with proxy_to(mortal.url) as (proxy, url):
        async with workq.connect(url, schema=mortal.schema) as db:
            queue = workq.Queue(db)
            await queue.migrate()
            executor = workq.Executor(queue, [note], poll_interval=POLL)
            await executor.start()
            await queue.enqueue(None, Note, "held")
            await runs.until(lambda: runs.running == {"held"})
            proxy.swallowing = True
            proxy.lose()
            await asyncio.sleep(2 * POLL)
            began = time.monotonic()
            await executor.stop(1)
            assert time.monotonic() - began < 2
            assert runs.running == set()
            began = time.monotonic()
        assert time.monotonic() - began < 5


async def test_polling_suffices_when_the_listening_connection_is_silently_dead(mortal: PostgresDatabase) -> None:
    """F19: nobody hears the ring, and the task runs all the same."""
    runs = Runs()
    runs.go.set()

    @workq.handler(Note)
    async def note(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with proxy_to(mortal.url) as (proxy, url), workq.connect(url, schema=mortal.schema) as db:
        queue = workq.Queue(db)
        await queue.migrate()
        async with workq.Executor(queue, [note], poll_interval=POLL), mortal.open() as elsewhere:
            await until_listening(proxy)
            assert proxy.lose(listens) == 1
            await workq.Queue(elsewhere).enqueue(None, Note, "unheard")
            await runs.until(lambda: runs.started["unheard"] == 1)


async def test_a_listening_connection_that_died_is_replaced_and_what_came_meanwhile_is_found(
    mortal: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F19: without polling, so that only the new connection can tell."""
    monkeypatch.setattr(workq_asyncpg._bell, "ALIVE_EVERY", 0.1)
    runs = Runs()
    runs.go.set()

    @workq.handler(Note)
    async def note(task: workq.Task[str]) -> None:
        await runs.hold(task.payload)

    async with proxy_to(mortal.url) as (proxy, url), workq.connect(url, schema=mortal.schema) as db:
        queue = workq.Queue(db)
        await queue.migrate()
        async with workq.Executor(queue, [note], poll_interval=600), mortal.open() as elsewhere:
            await until_listening(proxy)
            assert proxy.lose(listens) == 1
            await workq.Queue(elsewhere).enqueue(None, Note, "meanwhile")
            await runs.until(lambda: runs.started["meanwhile"] == 1)
            await until_listening(proxy)
            await workq.Queue(elsewhere).enqueue(None, Note, "after")
            await runs.until(lambda: runs.started["after"] == 1)


async def until_listening(proxy: Proxy) -> None:
    """Wait until a connection that is not lost listens."""

    async def one_does() -> bool:
        return any(listens(link) and not link.lost for link in proxy.links)

    await eventually(one_does)
