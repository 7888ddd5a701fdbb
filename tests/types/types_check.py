# ruff: noqa
"""Each line marked E must be an error, one marked M for mypy only, each without must not."""

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type
import asyncpg, aiosqlite
from sqlalchemy.ext.asyncio import AsyncSession, AsyncConnection, AsyncEngine, async_sessionmaker, async_scoped_session
from sqlalchemy.orm import Session
import workq


@dataclass
class Email:
    to: str
    subject: str


class EmailTD(TypedDict):
    to: str


@workq.handler("send-email", timeout=20)
async def send_email(task: workq.Task[Email]) -> None: ...
@workq.handler("td")
async def td(task: workq.Task[EmailTD]) -> None: ...
@workq.handler("cleanup")
async def cleanup(task: workq.Task) -> None: ...
@workq.handler("cleanup2")
async def cleanup2(task: workq.Task[None]) -> None: ...
@workq.handler("plain")
def plain(task: workq.Task[Email]) -> None: ...
@workq.handler("plain-later")
def plain_later(task: workq.Task[Email]) -> workq.Later | None: ...
@workq.handler("opt")
async def opt(task: workq.Task[int | None]) -> None: ...
@workq.handler("later")
async def later(task: workq.Task[list[int]]) -> workq.Later:
    return workq.Later(3)


@workq.handler("bad return")  # E
async def badret(task: workq.Task[Email]) -> int:
    return 3


@workq.handler("two args")  # E
async def two(task: workq.Task[Email], pool: object) -> None: ...
@workq.handler("untyped")
async def untyped(task: Any) -> None: ...


KEYED = workq.Spec("keyed", Email, key=lambda e: e.to, queue="mail")
KEYED_BAD = workq.Spec("keyed", Email, key=lambda e: e.too)  # E
NOTHING = workq.Spec("nothing")
TD = workq.Spec("td", EmailTD, key=lambda e: e["to"])
INTS = workq.Spec("ints", list[int])
UNION = workq.Spec[int | str]("union", int | str)  # E union types are no type[P] (PEP 747 not there yet)
assert_type(KEYED, workq.Spec[Email])
assert_type(NOTHING, workq.Spec[None])
assert_type(INTS, workq.Spec[list[int]])


@workq.handler(KEYED, retry=workq.linear())
async def keyed(task: workq.Task[Email]) -> None: ...
@workq.handler(KEYED)  # E
async def keyed_bad(task: workq.Task[str]) -> None: ...
@workq.handler(NOTHING)
async def nothing(task: workq.Task) -> None: ...


class Service:
    async def send(self, task: workq.Task[Email]) -> workq.Result: ...


bound = workq.handler(KEYED, timeout=3)(Service().send)
assert_type(keyed.name, str)


async def main(
    q: workq.Queue,
    tx: AsyncSession,
    c: asyncpg.Connection[Any],
    pool: asyncpg.Pool[Any],
    s: aiosqlite.Connection,
    engine: AsyncEngine,
    ac: AsyncConnection,
    sm: async_sessionmaker[AsyncSession],
    sc: async_scoped_session[AsyncSession],
    sync: Session,
) -> None:
    await q.enqueue(tx, send_email, Email("a", "b"))
    await q.enqueue(tx, bound, Email("a", "b"), delay=3)
    await q.enqueue(tx, send_email, {"to": "a"})  # E
    await q.enqueue(tx, send_email)  # E
    await q.enqueue(tx, KEYED, Email("a", "b"))
    await q.enqueue(tx, KEYED, "x")  # E
    await q.enqueue(tx, keyed, Email("a", "b"))
    await q.enqueue(tx, keyed, 3)  # E
    await q.enqueue(tx, NOTHING)
    await q.enqueue(tx, cleanup)
    await q.enqueue(tx, cleanup2)
    await q.enqueue(tx, cleanup, 3)  # E
    await q.enqueue(tx, nothing, 3)  # E
    await q.enqueue(tx, plain, Email("a", "b"))
    await q.enqueue(tx, plain, "x")  # E
    await q.enqueue(tx, td, EmailTD(to="x"))
    await q.enqueue(tx, td, {"to": "x"})  # M (mypy wants EmailTD(to="x"))
    await q.enqueue(tx, td, {"tox": "x"})  # E
    await q.enqueue(tx, opt, None)
    await q.enqueue(tx, opt, 3)
    await q.enqueue(tx, opt)  # E
    await q.enqueue(tx, later, [1, 2])
    await q.enqueue(tx, later, ["a"])  # E
    await q.enqueue(tx, later, [])
    await q.enqueue(tx, untyped, object())
    await q.enqueue(None, "send-email", {"to": "x"}, queue="mail")
    await q.enqueue("send-email", {"to": "x"})  # E tx forgotten
    await q.enqueue("send-email", "x")  # E tx forgotten
    await q.enqueue(send_email, Email("a", "b"))  # E tx forgotten
    await q.enqueue(cleanup)  # E tx forgotten
    await q.delete(3)  # E
    await q.retry(None, 3, payload={"to": "x"})
    await q.enqueue(c, cleanup)
    await q.enqueue(s, cleanup)
    await q.enqueue(ac, cleanup)
    await q.enqueue(sc, cleanup)
    await q.enqueue(engine, cleanup)  # E
    await q.enqueue(sm, cleanup)  # E
    await q.enqueue(pool, cleanup)  # (pool has execute: only the run time can tell)
    await q.enqueue(sync, cleanup)  # (sync session: only the run time can tell)
    async with pool.acquire() as conn, conn.transaction():
        await q.enqueue(conn, cleanup)
    await q.enqueue_many(
        tx,
        [workq.NewTask(send_email, Email("a", "b"), delay=i) for i in range(3)]
        + [workq.NewTask("x", {"a": 1}), workq.NewTask(cleanup)],
    )
    workq.NewTask(send_email, "x")  # E
    await send_email(workq.Task(Email("a", "b")))
    assert_type(await later(workq.Task([1])), workq.Later)
    assert_type(plain(workq.Task(Email("a", "b"))), None)
    await cleanup(workq.Task())
    await send_email(workq.Task("x"))  # E
    workq.Schedule(cleanup, workq.every(minutes=5))
    workq.Schedule(later, workq.every(minutes=5), [1], key="eu")
    workq.Schedule(later, workq.every(minutes=5))  # E
    workq.Schedule(later, workq.every(minutes=5), "x")  # E
    hs: list[workq.Handler] = [send_email, cleanup, plain, bound]
    workq.Executor(q, hs)
    workq.Executor(q, [send_email, cleanup, plain, bound])
    workq.Executor(q, [KEYED])  # E a spec has no function
    await q.wait(send_email, KEYED, "x", timeout=3)
