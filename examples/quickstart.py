"""The main job of workq, in a small shop: python examples/quickstart.py [database URL]

Without a URL it makes an SQLite file in a temporary folder. With one it does the same there:

    postgresql://user:password@host/name   in a schema of its own, which it drops at the end
    sqlite:///shop.db                      in a new file, which stays for you to look into
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import aiosqlite

import workq

if TYPE_CHECKING:
    import asyncpg

# workq logs every failed task as a warning. This program prints them itself.
logging.getLogger("workq").setLevel(logging.ERROR)


@dataclass
class Mail:
    to: str
    text: str


class MailServer:
    up = True


@workq.handler("send-mail")
async def send_mail(task: workq.Task[Mail]) -> None:
    if not MailServer.up:
        raise ConnectionError("the mail server is down")
    print(f"   [send-mail] to {task.payload.to}: {task.payload.text}")


async def story(shop: Shop, queue: workq.Queue) -> None:
    await queue.migrate()
    await an_order_and_its_mail(shop, queue)
    async with workq.Executor(queue, [send_mail]):
        await what_is_due_runs(queue)
        await a_failure_is_kept_and_repaired(queue)
    await a_schedule_runs(queue)


async def an_order_and_its_mail(shop: Shop, queue: workq.Queue) -> None:
    print("1. An order and its mail are stored in one transaction.")

    async with shop.transaction() as tx:
        await tx.execute("insert into orders values ('Ann')")
        await queue.enqueue(tx, send_mail, Mail("ann@example.org", "thank you for your order"))
    print("   Ann's order is committed, and with it her mail.")

    try:
        async with shop.transaction() as tx:
            await tx.execute("insert into orders values ('Bob')")
            await queue.enqueue(tx, send_mail, Mail("bob@example.org", "thank you for your order"))
            raise ValueError("the card was declined")
    except ValueError as error:
        print(f"   Bob's order is rolled back ({error}), and with it his mail.")

    mails = [row.payload["to"] for row in await queue.find(target=send_mail)]
    print(f"   Orders in the database: {await shop.customers()}. Mails to send: {mails}.")


async def what_is_due_runs(queue: workq.Queue) -> None:
    print("2. An executor runs what is due.")
    await queue.wait(timeout=5)
    print(f"   Tasks left in the table: {len(await queue.find())}.")


async def a_failure_is_kept_and_repaired(queue: workq.Queue) -> None:
    print("3. A task that fails is kept with its error, until somebody repairs it.")
    MailServer.up = False
    await queue.enqueue(None, send_mail, Mail("cleo@example.org", "your parcel is on its way"))
    await queue.wait(timeout=5)

    for row in await queue.find(state="failed"):
        print(f"   Failed: {row.name} to {row.payload['to']}")
        print(f"   Error:  {(row.error or '').splitlines()[0]}")
        MailServer.up = True
        await queue.retry(None, row.id)
        print("   The mail server is up again. The task is retried.")

    await queue.wait(timeout=5)
    print(f"   Tasks left in the table: {len(await queue.find())}.")


async def a_schedule_runs(queue: workq.Queue) -> None:
    print("4. A schedule runs again and again.")
    runs = 0
    enough = asyncio.Event()

    @workq.handler("count-stock")
    async def count_stock(task: workq.Task) -> None:
        nonlocal runs
        runs += 1
        print(f"   [count-stock] run {runs}")
        if runs == 3:
            enough.set()

    often = workq.Schedule(count_stock, workq.every(seconds=0.2))
    async with workq.Executor(queue, [count_stock], schedules=[often], poll_interval=0.1):
        async with asyncio.timeout(10):
            await enough.wait()

    for row in await queue.find():
        print(f"   Tasks left in the table: 1, {row.name}, {row.state} for its next run.")


# What follows is the shop's own database code, for either kind of database. Your application has its own.


class Shop(Protocol):
    def transaction(self) -> AbstractAsyncContextManager[workq.Transaction]:
        """A connection whose transaction is committed at the end of the block, and rolled back by an error."""
        ...

    async def customers(self) -> list[str]: ...


class SQLiteShop:
    def __init__(self, path: Path) -> None:
        self.path = path

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[workq.Transaction]:
        async with aiosqlite.connect(self.path, isolation_level=None) as conn:
            await conn.execute("begin immediate")
            try:
                yield conn
            except BaseException:
                await conn.rollback()
                raise
            await conn.commit()

    async def customers(self) -> list[str]:
        async with aiosqlite.connect(self.path) as conn:
            return [row[0] for row in await conn.execute_fetchall("select customer from orders")]


class PostgresShop:
    def __init__(self, pool: asyncpg.Pool[Any]) -> None:
        self.pool = pool

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[workq.Transaction]:
        async with self.pool.acquire() as conn, conn.transaction():
            yield conn

    async def customers(self) -> list[str]:
        return [row[0] for row in await self.pool.fetch("select customer from orders")]


async def on_sqlite(path: Path) -> None:
    print(f"The database: SQLite, {path}")
    async with aiosqlite.connect(path) as conn:
        await conn.execute("create table orders (customer text)")
    async with workq.connect(f"sqlite:///{path}") as db:
        await story(SQLiteShop(path), workq.Queue(db))


async def on_postgres(url: str) -> None:
    import asyncpg  # from the extra workq[asyncpg]

    import workq_asyncpg

    schema = f"quickstart_{os.getpid()}"
    print(f"The database: PostgreSQL, schema {schema}")
    async with asyncpg.create_pool(url, server_settings={"search_path": schema}) as pool:
        await pool.execute(f"create schema {schema}")
        try:
            await pool.execute("create table orders (customer text)")
            await story(PostgresShop(pool), workq.Queue(workq_asyncpg.Postgres(pool, schema=schema)))
        finally:
            await pool.execute(f"drop schema {schema} cascade")


def main(url: str | None = None) -> None:
    if url is None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(on_sqlite(Path(folder, "shop.db")))
    elif url.startswith("postgres"):
        asyncio.run(on_postgres(url))
    else:
        path = Path(url.removeprefix("sqlite:///"))
        if path.exists():
            raise SystemExit(f"{path} is there already. Give a new file.")
        asyncio.run(on_sqlite(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
