"""A process that runs an executor and writes down each lease, start and end: for tests that break it or its database.

SIGTERM ends it well. Run by `crash.company`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import workq
from crash import app
from crash.journal import Pen
from workq.dialect import Connection, Dialect, Params, Rows, Statement, Urgency

Task = workq.Task[str]

STALL = 0.1
"""Seconds of waiting from which on a claim makes its executor careful."""


class Watched:
    """The database, with each lease that it grants written down."""

    def __init__(self, db: Dialect, pen: Pen) -> None:
        self._db = db
        self._pen = pen
        self.claimed = asyncio.Event()
        """A claim was answered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def connection(self, purpose: str, *, first: bool = False) -> Connection:
        """One of the database's, watched."""
        inner = self._db.connection(purpose, first=first)
        return WatchedConnection(self, inner, self._pen, self._db.sql.claim, self._db.sql.extend)


class WatchedConnection:
    def __init__(self, of: Watched, inner: Connection, pen: Pen, claim: Statement, extend: Statement) -> None:
        self._of = of
        self._inner = inner
        self._pen = pen
        self._claim = claim
        self._extend = extend

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        sent = time.monotonic()
        now = params.get("now")  # SQLite's clock is the node's: the process may have stood still since it was read
        if isinstance(now, datetime):
            sent -= max(time.time() - now.timestamp(), 0)
        try:
            rows = await self._inner.fetch(statement, params, urgency)
        finally:
            waited = time.monotonic() - sent
            if statement is self._claim and waited > STALL:
                self._pen.note("waited", note=f"{waited:.3f}")
        if statement is self._claim:
            self._of.claimed.set()
            self._granted("claimed", sent, [row[0] for row in rows])
        elif statement is self._extend:
            self._granted("beat", sent, [row[0] for row in rows if row[2]])
        return rows

    def _granted(self, what: str, sent: float, ids: list[int]) -> None:
        received = f"{time.monotonic():.6f}"
        for id in ids:
            self._pen.note(what, id=id, note=received, at=sent)

    async def close(self) -> None:
        await self._inner.close()


class Executor(workq.Executor):
    """One whose stop is written down."""

    pen: Pen

    async def stop(self, timeout: float | None = None) -> None:
        """As it is."""
        self.pen.note("stopping")
        await super().stop(timeout)
        self.pen.note("stopped")


def journaled(pen: Pen) -> workq.Middleware:
    """Middleware that writes down every run: its start before anything is done, its end before it returns."""

    async def write(task: workq.Task[Any], call_next: Callable[[], Awaitable[Any]]) -> Any:
        token = task.payload if isinstance(task.payload, str) else task.name
        pen.note("start", token, task.id, f"{task.attempt} {task.name}")
        try:
            await pen.sure()
            outcome = await call_next()
        except asyncio.CancelledError:
            pen.note("cancelled", token, task.id)
            raise
        except Exception as error:
            pen.note("raised", token, task.id, type(error).__name__)
            raise
        pen.note("end", token, task.id)
        await pen.sure()
        return outcome

    return write


def handlers(args: argparse.Namespace) -> list[workq.Handler[Any, Any]]:
    """Fast, slow, failing, and those that end in a transaction of their own."""
    ledger = app.table(args.schema, "ledger")

    @workq.handler("fast")
    async def fast(task: Task) -> None:
        if random.random() < 0.5:
            await asyncio.sleep(random.uniform(0, 0.003))

    @workq.handler("slow")
    async def slow(task: Task) -> None:
        await asyncio.sleep(random.uniform(0, args.slow))

    @workq.handler("flaky", retry=workq.linear(retries=3, delay=0.2))
    async def flaky(task: Task) -> None:
        if task.attempt == 1:
            raise ValueError("not at the first time")

    @workq.handler("broken")
    async def broken(task: Task) -> None:
        raise ValueError("never")

    @workq.handler("pay", retry=workq.linear(retries=1000, delay=0.2))
    async def pay(task: Task) -> None:
        async with app.connected(args.app_url or args.url) as conn:
            await conn.execute(app.begin(args.url))
            await conn.execute(f"insert into {ledger} (token, task) values ('{task.payload}', {task.id})")
            await asyncio.sleep(random.uniform(0, 0.005))
            if not args.apart:
                await task.complete(conn)
            await asyncio.sleep(random.uniform(0, 0.005))
            await conn.execute("commit")
        await asyncio.sleep(random.uniform(0, 0.1 if args.apart else 0.005))

    @workq.handler("tick")
    async def tick(task: workq.Task) -> None: ...

    return [fast, slow, flaky, broken, pay, tick]


async def main(args: argparse.Namespace) -> None:
    pen = Pen(args.folder)
    async with workq.connect(args.url, schema=args.schema, listen=not args.no_listen) as db:
        watched: Any = Watched(db, pen)
        queue = workq.Queue(watched, on_event=[lambda event: told(pen, event)])
        served = handlers(args)
        executor = Executor(
            queue,
            served,
            workers=args.workers,
            lease=args.lease,
            poll_interval=args.poll,
            middleware=[journaled(pen)],
            schedules=[workq.Schedule(served[-1], workq.every(seconds=args.interval))],
            stop_timeout=args.stop,
            max_lost=args.max_lost,
        )
        executor.pen = pen
        serving = asyncio.create_task(workq.serve(executor))
        claimed = asyncio.create_task(watched.claimed.wait())
        await asyncio.wait([serving, claimed], return_when=asyncio.FIRST_COMPLETED)
        pen.note("ready")
        await serving


def told(pen: Pen, event: workq.Event) -> None:
    """Write an event down; starts and ends are known from the runs themselves."""
    if event.kind not in ("enqueued", "started"):
        pen.note(event.kind, id=event.id, note=str(event.attempt))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schema")
    parser.add_argument("--app-url", help="where the handlers' own transactions go, if not to the same")
    parser.add_argument("--no-listen", action="store_true", help="for poolers in transaction mode")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lease", type=float, default=1.5)
    parser.add_argument("--poll", type=float, default=0.2)
    parser.add_argument("--stop", type=float, default=1)
    parser.add_argument("--slow", type=float, default=2.5, help="seconds that a slow task takes at most")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds from the end of a tick to the next")
    parser.add_argument("--apart", action="store_true", help="leave the end of those that pay to workq: a fault")
    parser.add_argument("--max-lost", type=int, default=1000)
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(arguments()))
