"""A standby is promoted under load (F22), and the program goes on with it: nothing is restarted.

Replication is synchronous. To an asynchronous standby the last commits would be lost: that is not promised.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
import pytest
import pytest_asyncio

import workq
import workq_asyncpg
from crash.names import name_of
from crash.pair import Pair, pair_of_servers, value
from faults.flow import Flow, flow
from records import record
from support import Events, PostgresDatabase, eventually
from workq.dialect import Dialect
from workq.testing._server import Server, ServerMissing
from workq_asyncpg import _bell

RESUMED = 10.0
"""Seconds after the promotion."""
ASYNCHRONOUS = 0.6
"""Seconds for which a claim may not be on disk, nor on the standby."""


@pytest_asyncio.fixture
async def pair() -> AsyncGenerator[Pair]:
    try:
        async with pair_of_servers() as pair:
            yield pair
    except ServerMissing as missing:
        pytest.skip(str(missing))


async def killed(pair: Pair) -> None:
    """The primary's processes are gone; then the standby is promoted."""
    await asyncio.to_thread(pair.first.kill)
    await asyncio.sleep(0.5)
    await pair.promote()


async def switched(pair: Pair) -> None:
    """Both change places, and for a second nobody is primary."""
    await asyncio.to_thread(pair.demote)
    await asyncio.sleep(1)
    await pair.promote()


async def closed(pair: Pair) -> None:
    """The old one stays up, and its sessions too; it refuses writes. For a second, everybody does."""
    await pair.close_to_writers()
    await asyncio.sleep(1)
    await pair.promote()


async def frozen(pair: Pair) -> None:
    """The old one's machine says nothing any more, not even no. That takes somebody some seconds to find out."""
    await asyncio.to_thread(pair.first.freeze)
    await asyncio.sleep(3)
    await pair.promote()


WAYS: dict[str, tuple[Callable[[Pair], Awaitable[None]], str]] = {
    "killed": (killed, "primary"),
    "switched over": (switched, "primary"),
    "read-only": (closed, "read-write"),
    "frozen": (frozen, "primary"),
}


class Seconds(NamedTuple):
    """When it began, when the standby had become primary, and how long until work went on."""

    before: float
    promoted: float
    resumed: float


async def fail_over(tasks: Flow, pair: Pair, way: Callable[[Pair], Awaitable[None]]) -> Seconds:
    """Under load; ends when work goes on, and enqueues too."""
    await tasks.runs(since=0)
    await asyncio.sleep(0.5)
    before = time.monotonic()
    await way(pair)
    promoted = time.monotonic()
    resumed = await tasks.runs(since=promoted, timeout=2 * RESUMED)
    await eventually(tasks.healthy)
    acknowledged = len(tasks.enqueued)

    async def more() -> bool:
        return len(tasks.enqueued) > acknowledged

    await eventually(more)
    return Seconds(before, promoted, resumed)


def judged(way: str, name: str, tasks: Flow, seconds: Seconds, left: list[tuple[object, ...]], began: float) -> None:
    """Compare what was promised with what is there, and keep the figures."""
    completed = Counter(tasks.completed())
    lost = tasks.enqueued - set(completed)
    # A claim of the last moment may not have come over: then the task is free, and runs again.
    may_repeat = {id for at, id in tasks.started if seconds.before - ASYNCHRONOUS < at < seconds.promoted}
    twice = {id for id, times in completed.items() if times > 1} - may_repeat
    record(
        "crash",
        name,
        f"a standby is promoted under load; the primary is {way}",
        tasks=len(tasks.enqueued),
        took=time.monotonic() - began,
        violations={"no loss": len(lost), "fence": len(twice), "back again": int(seconds.resumed > RESUMED)},
        times={"back again": [seconds.resumed]},
    )
    assert left == []
    assert lost == set()
    assert twice == set()
    assert [event for event in tasks.events if event.kind == "failed"] == []
    assert seconds.resumed < RESUMED


@pytest.mark.parametrize("way", WAYS)
async def test_a_standby_promoted_under_load_goes_on_with_the_work_and_nothing_is_lost(pair: Pair, way: str) -> None:
    """F22: no loss, back again (10 s after the promotion). One URL names both servers."""
    happens, attributes = WAYS[way]
    began, url, second = time.monotonic(), pair.url(attributes), PostgresDatabase(pair.second.url, "public")
    async with flow(PostgresDatabase(url, "public"), url, url, lease=300) as tasks:
        seconds = await fail_over(tasks, pair, happens)
        await tasks.end()
        left = await second.rows("select id, name, error from {table}")
    judged(way, f"{await name_of(second)}, primary and standby", tasks, seconds, left, began)


@pytest.mark.parametrize("way", ["killed", "read-only", pytest.param("frozen", marks=pytest.mark.slow)])
async def test_a_pool_of_the_applications_own_goes_over_to_the_standby_with_it(pair: Pair, way: str) -> None:
    """F22: the pool is shared by the executor and by the application, whose transactions lose nothing either.

    Where the old machine says nothing, asyncpg needs `connect=Hosts(url).connect` to get past it. The application then
    makes no transactions here: what it did on the old connections would wait for ever, which is its own to bound.
    """
    happens, attributes = WAYS[way]
    began, second = time.monotonic(), PostgresDatabase(pair.second.url, "public")
    options: dict[str, Any] = {"min_size": 0, "max_size": 20}
    pool: asyncpg.Pool[Any]
    if way == "frozen":
        url = pair.url(attributes)
        connect: Any = workq_asyncpg.Hosts(url).connect
        pool = asyncpg.create_pool(url, connect=connect, **options)
    else:
        ports = [pair.first.port, pair.second.port]
        hosts = {"host": ["127.0.0.1"] * 2, "port": ports, "target_session_attrs": attributes}
        pool = asyncpg.create_pool(user="postgres", database="postgres", **hosts, **options)
    orders, enough = set[int](), asyncio.Event()

    @asynccontextmanager
    async def opened(url: str) -> AsyncGenerator[Dialect]:
        yield workq_asyncpg.Postgres(pool)

    async def order(queue: workq.Queue) -> None:
        """The application: whatever goes wrong, it tries again."""
        while way != "frozen" and not enough.is_set():
            try:
                async with asyncio.timeout(3), pool.acquire() as conn, conn.transaction():
                    id = await queue.enqueue(conn, "work", 1)
                assert id is not None
                orders.add(id)
            except Exception:
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.01)

    await pool
    async with flow(PostgresDatabase("", "public"), "the pool", opened=opened, lease=300) as tasks:
        ordering = asyncio.create_task(order(tasks.queues[0]))
        seconds = await fail_over(tasks, pair, happens)
        before = len(orders)

        async def ordered() -> bool:
            return len(orders) > before or way == "frozen"

        await eventually(ordered)
        enough.set()
        await ordering
        await tasks.end()
        left = await second.rows("select id, name, error from {table}")
    pool.terminate()
    tasks.enqueued |= orders
    judged(f"{way}, own pool", f"{await name_of(second)}, primary and standby", tasks, seconds, left, began)


async def test_the_listening_connection_does_not_stay_with_a_demoted_primary(
    mortal: PostgresDatabase, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F19, F22: nobody rings there any more, and the connection itself looks as it always did."""
    monkeypatch.setattr(_bell, "ALIVE_EVERY", 0.1)
    events = Events()

    @workq.handler("work")
    async def work(task: workq.Task[object]) -> None: ...

    async def listener() -> object:
        rows = await mortal.rows("select pid from pg_stat_activity where query like '%transaction_read_only%off%'")
        mine = await mortal.rows("select pg_backend_pid()")
        return next((pid for (pid,) in rows if (pid,) not in mine), None)

    async with mortal.open() as db, mortal.open() as other:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        async with workq.Executor(queue, [work], poll_interval=600):
            await eventually(listener)
            before = await listener()

            async def read_only(setting: str) -> None:
                await value(server, f"alter system set default_transaction_read_only = {setting}")
                await value(server, "select pg_reload_conf()")

            async def gone() -> bool:
                return await listener() != before

            async def replaced() -> bool:
                return await listener() not in (None, before)

            await read_only("on")
            await eventually(gone)
            await read_only("off")
            await eventually(replaced)
            await workq.Queue(other).enqueue(None, work, 1)
            await events.until("completed")
