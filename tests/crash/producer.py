"""A process that enqueues tasks in every way there is, and writes down which of them it may count on.

It goes on through whatever the database does to it, and ends when enough were acknowledged. Run by `crash.company`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import workq
from crash import app
from crash.journal import Pen

KINDS = {"fast": 86, "pay": 5, "flaky": 4, "slow": 4, "broken": 1}
"""How many of a hundred, unless the story wants more that pay."""


class Producer:
    """Enqueues tasks, and the truth about each."""

    def __init__(self, args: argparse.Namespace, queue: workq.Queue, pen: Pen) -> None:
        self._url: str = args.app_url or args.url
        self._queue = queue
        self._pen = pen
        self._name: str = args.name
        self._pay: float = args.pay
        self._random = random.Random(f"{args.seed} {args.name}")
        self._left: int = args.tasks
        self._number = 0
        self._stack = AsyncExitStack()
        self._conn: Any = None

    async def produce(self, seconds: float) -> None:
        """Spread all tasks over so many seconds."""
        began, all = time.monotonic(), self._left
        ways = {self.at_once: 4, self.in_a_transaction: 3, self.many: 3, self.and_delete: 1}
        while self._left > 0:
            way = self._random.choices(list(ways), list(ways.values()))[0]
            try:
                await way()
            except Exception as error:  # what was not acknowledged is not counted on
                logging.info("%r", error)
                await self._disconnect()
                await asyncio.sleep(0.1)
            await asyncio.sleep(began + seconds * (1 - self._left / all) - time.monotonic())
        await self._disconnect()

    def _token(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    def _kind(self) -> tuple[str, dict[str, Any]]:
        """What a task is called, and its options."""
        options: dict[str, Any] = {}
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        if self._random.random() < self._pay:
            kind = "pay"
        if self._random.random() < 0.1:
            options["key"] = f"{self._random.randrange(100)}"
        if self._random.random() < 0.05:
            options["delay"] = self._random.uniform(0, 1)
        return kind, options

    def _tasks(self, tokens: Iterable[str]) -> list[workq.NewTask]:
        kinds = [(token, *self._kind()) for token in tokens]
        return [workq.NewTask(kind, token, **options) for token, kind, options in kinds]

    async def _answered(self, way: str, ids: Iterable[tuple[str, int | None]]) -> None:
        for token, id in ids:
            self._pen.note("refused" if id is None else "acked", token, id or 0, way)
            self._left -= id is not None
        await self._pen.sure()

    async def at_once(self) -> None:
        """Several at the same time, each by itself."""

        async def one() -> None:
            token = self._token()
            kind, options = self._kind()
            self._pen.note("sent", token)
            id = await self._queue.enqueue(None, kind, token, **options)
            await self._answered("at once", [(token, id)])

        some = [one() for _ in range(self._random.randint(1, 8))]
        for error in await asyncio.gather(*some, return_exceptions=True):
            if error is not None:
                raise error

    async def many(self) -> None:
        """One statement for many."""
        tokens = [self._token() for _ in range(self._random.randint(1, 40))]
        for token in tokens:
            self._pen.note("sent", token)
        ids = await self._queue.enqueue_many(None, self._tasks(tokens))
        await self._answered("many", zip(tokens, ids, strict=True))

    async def in_a_transaction(self) -> None:
        """Some in a transaction of the application, which commits, rolls back, or does so to a savepoint."""
        if self._conn is None:
            self._conn = await self._stack.enter_async_context(app.connected(self._url))
        conn = self._conn
        await conn.execute(app.begin(self._url))
        kept = await self._open(conn)
        if self._random.random() < 0.3:
            await conn.execute("savepoint here")
            await self._open(conn)
            await conn.execute("rollback to savepoint here")
        if self._random.random() < 0.25:
            await conn.execute("rollback")
            return
        for token, id in kept:
            if id is not None:
                self._pen.note("sent", token)
        await conn.execute("commit")
        await self._answered("in a transaction", kept)

    async def _open(self, conn: Any) -> list[tuple[str, int | None]]:
        tokens = [self._token() for _ in range(self._random.randint(1, 4))]
        ids = await self._queue.enqueue_many(conn, self._tasks(tokens))
        for token, id in zip(tokens, ids, strict=True):
            self._pen.note("open", token, id or 0)
        return list(zip(tokens, ids, strict=True))

    async def and_delete(self) -> None:
        """One that is deleted soon after: before it starts, while it runs, or when it is gone."""
        token = self._token()
        self._pen.note("sent", token)
        id = await self._queue.enqueue(None, "slow", token)
        await self._answered("and delete", [(token, id)])
        await asyncio.sleep(self._random.uniform(0, 0.1))
        if id is not None:
            self._pen.note("deleting", token, id)
            await self._pen.sure()
            if await self._queue.delete(None, id):
                self._pen.note("deleted", token, id)

    async def _disconnect(self) -> None:
        self._conn = None
        await self._stack.aclose()


async def main(args: argparse.Namespace) -> None:
    pen = Pen(args.folder)
    async with workq.connect(args.url, schema=args.schema, listen=not args.no_listen) as db:
        pen.note("ready", note="producer")
        await Producer(args, workq.Queue(db), pen).produce(args.seconds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--schema")
    parser.add_argument("--app-url", help="where its own transactions go, if not to the same")
    parser.add_argument("--no-listen", action="store_true", help="for poolers in transaction mode")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pay", type=float, default=0, help="how many of all end in their own transaction, 0 to 1")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(arguments()))
