"""A program that runs "work" tasks: one with the payload "poison" kills the process, another takes a moment.

It writes "start ID" and "end ID" lines to its output, and ends by itself when no task is left that it could run.
"""

from __future__ import annotations

import argparse
import asyncio
import os

import workq


@workq.handler("work")
async def work(task: workq.Task[str]) -> None:
    print("start", task.id, flush=True)
    # Long enough for everything of the same page to have begun.
    await asyncio.sleep(0.1 if task.payload == "poison" else 0.3)
    if task.payload == "poison":
        os._exit(9)
    print("end", task.id, flush=True)


async def main(args: argparse.Namespace) -> None:
    async with workq.connect(args.url, schema=args.schema, listen="WORKQ_TEST_POOLER" not in os.environ) as db:
        queue = workq.Queue(db)
        async with workq.Executor(queue, [work], workers=8, poll_interval=0.1, max_lost=args.max_lost):
            await queue.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--schema")
    parser.add_argument("--max-lost", type=int, default=5)
    asyncio.run(main(parser.parse_args()))
