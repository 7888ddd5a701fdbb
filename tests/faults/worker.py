"""A program that runs an executor and writes down, a line each, what happens in it: for tests that kill processes.

It ends well when its standard input is closed, so it outlives no test. Lines: what, task id, process id, monotonic
time, wall time. What: ready, start, end (both by the handler), or the kind of an event.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time

import workq


class Journal:
    """A file that many processes append to: each line is a single write, so lines never mix."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, id: int = 0) -> None:
        line = f"{what} {id} {os.getpid()} {time.monotonic():.6f} {time.time():.6f}\n"
        os.write(self._file, line.encode())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("journal")
    parser.add_argument("--schema")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lease", type=float, default=30)
    parser.add_argument("--poll", type=float, default=0.1)
    parser.add_argument("--takes", type=float, default=0, help="seconds that a task takes")
    parser.add_argument("--produce", type=int, default=0, help="tasks that this process enqueues, one by one")
    parser.add_argument("--delay", type=float, default=0, help="seconds until these are due")
    parser.add_argument("--schedules", type=int, default=0, help="how many it registers, each for an hour from now")
    parser.add_argument("--migrate", action="store_true")
    parser.add_argument("--payload", type=int, default=0, help="size of the payloads that it produces")
    parser.add_argument("--stop", type=float, default=30, help="seconds for running tasks when it is to end")
    return parser.parse_args()


async def produce(queue: workq.Queue, number: int, size: int, delay: float) -> None:
    """Enqueue from four places at once, each task by itself."""
    counter = iter(range(number))

    async def some() -> None:
        for _ in counter:
            await queue.enqueue(None, "work", "x" * size, delay=delay)

    await asyncio.gather(*(some() for _ in range(4)))


async def main(args: argparse.Namespace) -> None:
    asked_to_end = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), asked_to_end.set)
    journal = Journal(args.journal)

    @workq.handler("work")
    async def work(task: workq.Task[object]) -> None:
        journal.write("start", task.id)
        await asyncio.sleep(args.takes)
        journal.write("end", task.id)

    @workq.handler("tick")
    async def tick(task: workq.Task) -> None:
        journal.write("tick", task.id)

    async with workq.connect(args.url, schema=args.schema) as db:
        queue = workq.Queue(db, on_event=[lambda event: journal.write(event.kind, event.id)])
        if args.migrate:
            await queue.migrate()
        executor = workq.Executor(
            queue,
            [work, tick],
            workers=args.workers,
            lease=args.lease,
            poll_interval=args.poll,
            schedules=[workq.Schedule(tick, workq.every(hours=1), key=f"k{n}") for n in range(args.schedules)],
            stop_timeout=args.stop,
        )
        async with executor:
            journal.write("ready")
            await produce(queue, args.produce, args.payload, args.delay)
            await asked_to_end.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(arguments()))
