"""The handlers of a story's nodes: each does what its task's payload says."""

from __future__ import annotations

import asyncio
from typing import Any

import workq
from sim.applications import Applications
from sim.wire import begun
from sim.world import Node, Run, Sent, World


class Odd(BaseException):
    """What no handler should raise."""


def handlers(applications: Applications, node: Node) -> dict[str, workq.Handler[Any, Any]]:
    """The handlers of a node: each does what its task's payload says."""
    world = applications.world

    async def act(task: workq.Task[Any]) -> workq.Result:
        await world.alive(node)
        held: Any = task._run  # pyright: ignore[reportPrivateUsage]
        payload = task.payload
        run = Run(tuple(held.lease), payload["n"], task.name, node, world.loop.time(), payload, held)
        world.runs.append(run)
        try:
            result = await perform(applications, node, task, run)
        except BaseException as error:
            await world.alive(node)
            run.how = type(error).__name__
            raise
        else:
            await world.alive(node)
            run.how = "done" if result is None else type(result).__name__
            return result
        finally:
            if not node.dead:
                run.ended = world.loop.time()

    async def tick(task: workq.Task[Any]) -> workq.Result:
        await world.alive(node)
        held: Any = task._run  # pyright: ignore[reportPrivateUsage]
        run = Run(tuple(held.lease), 0, task.name, node, world.loop.time(), None, held)
        world.runs.append(run)
        try:
            task.payload["count"] += 1
            await asyncio.sleep(world.draw.choice((0, 0.01, 0.3)))
            await world.alive(node)
            run.how = "done"
        finally:
            if not node.dead:
                run.ended = world.loop.time()
        return None

    return {
        "work": workq.handler("work")(act),
        "flaky": workq.handler("flaky", retry=workq.linear(retries=2, delay=0.3))(act),
        "timed": workq.handler("timed", timeout=0.8)(act),
        "keyed": workq.handler("keyed", retry=workq.linear(retries=1, delay=0.1))(act),
        "tick": workq.handler("tick", retry=workq.linear(retries=1, delay=0.2))(tick),
    }


async def perform(applications: Applications, node: Node, task: workq.Task[Any], run: Run) -> workq.Result:
    """The steps of one payload."""
    world = applications.world
    failing = task.attempt <= task.payload["fails"]
    for kind, *args in task.payload["do"]:
        match kind:
            case "sleep":
                try:
                    await asyncio.sleep(args[0])
                except asyncio.CancelledError:
                    run.cancelled = run.cancelled or world.loop.time()
                    raise
            case "stubborn":
                await stubborn(world, args[0], run)
            case "raise" if failing:
                raise RuntimeError("by the story")
            case "odd" if failing:
                raise Odd
            case "cancelled" if failing:
                raise asyncio.CancelledError
            case "retry" if failing:
                return workq.Retry("by the story", after=0.1)
            case "later" if applications.draw.random() < 0.5:
                return workq.Later(0.2)
            case "fail":
                return workq.Fail("by the story")
            case "skip":
                return workq.Skip("by the story")
            case "enqueue":
                await applications.enqueue(node)
            case "book":
                async with begun(world, node) as tx:
                    sent = await applications.enqueue_in(node, tx)
                    await asyncio.sleep(args[1])
                    await leave(applications, tx, [sent], args[0])
            case "complete":
                await complete(applications, node, task, run, *args)
            case "delete":
                await applications.delete(node)
            case "repair":
                await applications.repair(node, "repair")
            case _:
                pass
    return None


async def stubborn(world: World, seconds: float, run: Run) -> None:
    """Ignores that it is cancelled."""
    until = world.loop.time() + seconds
    while (left := until - world.loop.time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            run.cancelled = run.cancelled or world.loop.time()


async def complete(
    applications: Applications, node: Node, task: workq.Task[Any], run: Run, how: str, seconds: float
) -> None:
    """The end of the task in a transaction of the handler's own, together with a new task."""
    run.completed.append("rolled back")
    async with begun(applications.world, node) as tx:
        sent = await applications.enqueue_in(node, tx)
        await task.complete(tx)
        await asyncio.sleep(seconds)
        if how == "commit":
            run.completed[-1] = "unknown"
        await leave(applications, tx, [sent], how)
        if how == "commit":
            run.completed[-1] = "committed"


async def leave(applications: Applications, tx: Any, several: list[Sent], how: str) -> None:
    """Commit, roll back, or raise out of the transaction."""
    if how == "raise":
        raise RuntimeError("by the story")
    await applications.end(tx, several, commit=how == "commit")
