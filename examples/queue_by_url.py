"""A queue on a database URL: python examples/queue_by_url.py [database URL]

workq opens the database and closes it. Without a URL, here or in DATABASE_URL, this is an SQLite file in a temporary
folder; the same lines work on PostgreSQL.
"""

import asyncio

import scratch

import workq


@workq.handler("greet")
async def greet(task: workq.Task[str]) -> None:
    print(f"hello, {task.payload}")


@workq.handler("count-words")
def count_words(task: workq.Task[dict[str, str]]) -> None:
    """A plain function: it runs in a thread, so it may block."""
    print(f"{task.payload['title']}: {len(task.payload['text'].split())} words")


def show(event: workq.Event) -> None:
    """An event hook: sees everything that happens to tasks, for metrics, alerts or a history."""
    print(f"event: {event.kind} {event.name}")


async def main(url: str) -> None:
    async with workq.connect(url) as db:
        queue = workq.Queue(db, on_event=[show])
        await queue.migrate()

        # One worker, so that the output has one order. The default is 16.
        async with workq.Executor(queue, [greet, count_words], workers=1):
            await queue.enqueue(None, greet, "Ann")
            await queue.wait(timeout=10)

            # A producer that does not share code with the executor gives a name and JSON.
            await queue.enqueue(None, "count-words", {"title": "A short book", "text": "all is well"})
            await queue.wait(timeout=10)

            # This one is due in an hour: wait() does not wait for it, and leaving the block stops the executor.
            await queue.enqueue(None, greet, "Bob", delay=3600)
            await queue.wait(timeout=10)

        for row in await queue.find():
            print(f"still to do: {row.name} {row.payload}")


if __name__ == "__main__":
    with scratch.sqlite_or_postgres() as url:
        asyncio.run(main(url))
