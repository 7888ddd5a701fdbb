"""Separate worker pools for order and mail queues: python examples/two_queues.py [database URL]

Each queue has an executor of its own, so a heap of mails never holds up an order. Without a URL, here or in
DATABASE_URL, it works on an SQLite file in a temporary folder.
"""

import asyncio

import scratch

import workq


class Crowd:
    """Counts how many handlers of one kind run side by side."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0

    async def work(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        self.done += 1


ORDERS, MAILS = Crowd(), Crowd()


@workq.handler("ship-order", queue="orders")
async def ship_order(task: workq.Task[int]) -> None:
    await ORDERS.work()


@workq.handler("send-mail", queue="mail")
async def send_mail(task: workq.Task[str]) -> None:
    await MAILS.work()


async def main(url: str) -> None:
    async with workq.connect(url) as db:
        queue = workq.Queue(db)
        await queue.migrate()

        await queue.enqueue_many(None, [workq.NewTask(send_mail, f"news {number}") for number in range(10)])
        await queue.enqueue_many(None, [workq.NewTask(ship_order, number) for number in range(20)])

        orders = workq.Executor(queue, [ship_order], workers=8)
        mails = workq.Executor(queue, [send_mail], workers=1)

        # A worker process ends with `await workq.serve(orders, mails)`, which runs until SIGINT or SIGTERM and then
        # stops both at once. To be cancelled is the same.
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(workq.serve(orders, mails))
            await queue.wait(timeout=10)
            serving.cancel()

    print(f"{ORDERS.done} orders by 8 workers: {ORDERS.most} side by side at most")
    print(f"{MAILS.done} mails by 1 worker: {MAILS.most} side by side at most")


if __name__ == "__main__":
    with scratch.sqlite_or_postgres() as url:
        asyncio.run(main(url))
