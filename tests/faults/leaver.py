"""A program that uses workq, returns from asyncio.run, and says when: does the interpreter end then?"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack, suppress

import workq


@workq.handler("work")
async def work(task: workq.Task[object]) -> None:
    pass


class OnPurposeError(Exception):
    """What the application raised."""


KEPT: list[object] = []


async def use(queue: workq.Queue, stack: AsyncExitStack) -> None:
    await queue.migrate()
    await stack.enter_async_context(workq.Executor(queue, [work], poll_interval=0.05))
    await queue.enqueue(None, "work", 1)
    await queue.wait(timeout=10)


async def main(how: str, url: str, schema: str | None) -> None:
    opened = workq.connect(url, schema=schema)
    stack = AsyncExitStack()
    match how:
        case "closed":
            async with opened as db, stack:
                await use(workq.Queue(db), stack)
        case "raised":
            async with opened as db, stack:
                await use(workq.Queue(db), stack)
                raise OnPurposeError
        case "never closed":
            db = await opened.__aenter__()
            await use(workq.Queue(db), stack)
            KEPT.extend([opened, stack])
        case _:
            raise ValueError(how)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how")
    parser.add_argument("url")
    parser.add_argument("--schema")
    args = parser.parse_args()
    with suppress(OnPurposeError):
        asyncio.run(main(args.how, args.url, args.schema))
    print(time.monotonic(), flush=True)
