"""A program that forks while it uses workq, and tries uses of it in children, one in each.

It prints a line for each: the use, and the error's type and message, or "nothing"; then a line for the parent: "fine",
or what went wrong when it used everything again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn

import workq
from workq.dialect import Dialect

CHILD = 2
"""Seconds after which the child says that what it tried hangs."""

runs: list[int] = []


@workq.handler("work")
async def work(task: workq.Task[int]) -> None:
    runs.append(task.payload)


class Parent:
    """What the process has before it forks."""

    def __init__(self, opened: AbstractAsyncContextManager[Dialect]) -> None:
        self.opened = opened
        self.db: Dialect
        self.queue: workq.Queue
        self.executor: workq.Executor
        self.unstarted: workq.Executor

    async def begin(self) -> None:
        self.db = await self.opened.__aenter__()
        self.queue = workq.Queue(self.db)
        await self.queue.migrate()
        self.executor = workq.Executor(self.queue, [work], poll_interval=0.05)
        self.unstarted = workq.Executor(self.queue, [work], poll_interval=0.05)
        await self.queue.enqueue(None, work, -1)

    async def run(self) -> None:
        await self.executor.start()
        await self.queue.wait(timeout=10)

    async def go_on(self) -> None:
        """Use all of it again."""
        for number in range(20):
            await self.queue.enqueue(None, work, number)
        await self.queue.wait(timeout=10)
        another = workq.Executor(self.queue, [work], poll_interval=0.05)
        async with another:
            await self.queue.enqueue(None, work, 20)
            await self.queue.wait(timeout=10)
        assert runs == list(range(-1, 21)), runs
        assert self.executor.health().ok

    async def end(self) -> None:
        await self.executor.stop(2)
        await self.opened.__aexit__(None, None, None)


async def start_another(parent: Parent) -> None:
    async with workq.Executor(workq.Queue(parent.db), [work]):
        await asyncio.sleep(0.2)


USES: dict[str, Callable[[Parent], Awaitable[Any]]] = {
    "enqueue": lambda parent: parent.queue.enqueue(None, work, 99),
    "enqueue_many": lambda parent: parent.queue.enqueue_many(None, [workq.NewTask(work, 99)]),
    "find": lambda parent: parent.queue.find(),
    "migrate": lambda parent: parent.queue.migrate(),
    "new queue": lambda parent: workq.Queue(parent.db).enqueue(None, work, 99),
    "start": lambda parent: parent.unstarted.start(),
    "start another": start_another,
    "leave connect": lambda parent: parent.opened.__aexit__(None, None, None),
}


async def tried(use: Callable[[Parent], Awaitable[Any]], parent: Parent) -> str:
    """What the child meets."""
    try:
        async with asyncio.timeout(CHILD):
            await use(parent)
    except TimeoutError:
        return "TimeoutError: it hangs"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def child(parent: Parent, name: str, loop: asyncio.AbstractEventLoop | None) -> NoReturn:
    """Try it, in a loop of the child's own or in the one it was born with, and leave without further ado."""
    signal.alarm(CHILD + 2)  # for what no timeout can end
    logging.disable()
    met = asyncio.run(tried(USES[name], parent)) if loop is None else loop.run_until_complete(tried(USES[name], parent))
    print(f"{name}: {' '.join(met.split())}", flush=True)
    os._exit(0)


def forked(parent: Parent, name: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """Fork, and wait until the child has left."""
    pid = os.fork()
    if not pid:
        child(parent, name, loop)
    _, status = os.waitpid(pid, 0)
    if status:
        print(f"{name}: ended by signal {status}, it hangs", flush=True)


async def forks_inside(parent: Parent, names: list[str]) -> None:
    """As ProcessPoolExecutor does: beside a running executor, and the child begins a loop of its own."""
    await parent.begin()
    await parent.run()
    for name in names:
        await asyncio.to_thread(forked, parent, name, None)
    await parent.go_on()
    await parent.end()


def forks_outside(parent: Parent, names: list[str]) -> None:
    """As a server that loads its application first: nothing is under way, and the child goes on with the same loop."""
    with asyncio.Runner() as runner:
        runner.run(parent.begin())
        runner.run(asyncio.sleep(0.3))
        for name in names:
            forked(parent, name, runner.get_loop())
        runner.run(parent.run())
        runner.run(parent.go_on())
        runner.run(parent.end())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=["inside", "outside"])
    parser.add_argument("url")
    parser.add_argument("uses", nargs="+", choices=USES)
    parser.add_argument("--schema")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    made = Parent(workq.connect(args.url, schema=args.schema))
    try:
        if args.where == "inside":
            asyncio.run(forks_inside(made, args.uses))
        else:
            forks_outside(made, args.uses)
    except BaseException as error:
        print(f"parent: {type(error).__name__}: {error}", flush=True)
        raise
    print("parent: fine", flush=True)
