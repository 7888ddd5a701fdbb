"""What applications ask of the queue in a story, and what is known afterwards of each task they sent."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import workq
from sim.wire import begun
from sim.world import Node, Sent, World

TROUBLE = (OSError, TimeoutError, workq.OutcomeUnknown, workq.LeaseLost)
"""What an application that is cut off from its database has to expect."""


class Applications:
    """Whoever enqueues, deletes and repairs: the processes' own code, and their handlers."""

    def __init__(self, world: World, draw: random.Random, *, calm: bool) -> None:
        self.world = world
        self.draw = draw
        self.calm = calm
        """Nobody does what the bounds of time do not allow for."""
        self.slow = draw.choice((0.01, 0.1, 1.0, 1.0))
        """How long handlers take."""
        self._numbers = 0

    def plan(self) -> dict[str, Any]:
        """The payload of a task: what its handler is to do."""
        draw = self.draw
        self._numbers += 1
        steps: list[Any] = []
        kinds = ["sleep"] * 6 + ["raise"] * 2 + ["enqueue", "book", "complete", "complete", "later", "retry", "fail"]
        if not self.calm:
            kinds += ["stubborn", "odd", "cancelled", "delete", "repair", "skip"]
        for _ in range(draw.choice((0, 1, 2, 3))):
            step = draw.choice(kinds)
            if step in ("sleep", "stubborn"):
                steps.append([step, round(draw.uniform(0, 5) * self.slow * draw.choice((0.1, 1)), 4)])
            elif step in ("book", "complete"):
                held = draw.choice((0, 0, 0.2, 2.0 if not self.calm else 0.05))
                steps.append([step, draw.choice(("commit", "commit", "roll back", "raise")), held])
            else:
                steps.append([step])
        return {"n": self._numbers, "do": steps, "fails": draw.choice((0, 1, 1, 5))}

    async def do(self, node: Node, what: str) -> None:
        """One wish, in a node."""
        draw = self.draw
        try:
            match what:
                case "one" | "cancelled":
                    await self.enqueue(node, delay=draw.choice((0, 0, 0.5)), priority=draw.choice((0, 0, -5, 5)))
                case "keyed":
                    await self.enqueue(node, name="keyed", key=draw.choice("xyz"))
                case "soon":
                    payload = self.plan()
                    self.world.sent[payload["n"]] = Sent(payload, "unknown")
                    node.queue.enqueue_soon(self.name(), payload)
                case "many":
                    await self.enqueue_many(node, draw.randint(2, 10))
                case "burst":
                    await asyncio.gather(*(self.enqueue(node) for _ in range(draw.randint(2, 8))))
                case "booked" | "rolled back":
                    async with begun(self.world, node) as tx:
                        sent = await self.enqueue_in(node, tx)
                        await self.end(tx, [sent], commit=what == "booked")
                case "delete":
                    await self.delete(node)
                case _:
                    await self.repair(node, what)
        except TROUBLE:
            pass

    def name(self) -> str:
        return self.draw.choice(("work", "work", "flaky", "timed"))

    async def enqueue(self, node: Node, *, name: str = "", **options: Any) -> None:
        """enqueue(None), and what is known of it afterwards."""
        payload = self.plan()
        sent = self.world.sent[payload["n"]] = Sent(payload, "unknown")
        id = await node.queue.enqueue(None, name or self.name(), payload, **options)
        sent.became, sent.id = ("refused", None) if id is None else ("stored", id)

    async def enqueue_many(self, node: Node, number: int) -> None:
        payloads = [self.plan() for _ in range(number)]
        several = [self.world.sent.setdefault(payload["n"], Sent(payload, "unknown")) for payload in payloads]
        ids = await node.queue.enqueue_many(None, [workq.NewTask(self.name(), payload) for payload in payloads])
        for sent, id in zip(several, ids, strict=True):
            sent.became, sent.id = "stored", id

    async def enqueue_in(self, node: Node, tx: Any) -> Sent:
        payload = self.plan()
        sent = self.world.sent[payload["n"]] = Sent(payload, "rolled back")
        sent.id = await node.queue.enqueue(tx, self.name(), payload)
        return sent

    async def end(self, tx: Any, several: list[Sent], *, commit: bool) -> None:
        """Commit, or leave it to be rolled back."""
        if not commit:
            return
        for sent in several:
            sent.became = "unknown"
        await tx.commit()
        for sent in several:
            sent.became = "stored"

    def some_id(self, where: str = "failed_at is null") -> int | None:
        """Of a task that is there; now and then, of one that was."""
        ids = [row[0] for row in self.world.database.rows(f"not scheduled and {where} order by id")]
        if not ids or self.draw.random() < 0.1:
            ids = [sent.id for sent in self.world.sent.values() if sent.id is not None and sent.became == "stored"]
        return self.draw.choice(ids) if ids else None

    async def delete(self, node: Node) -> None:
        id = self.some_id()
        if id is not None:
            self.world.deleted.add(id)
            await node.queue.delete(None, id)

    async def repair(self, node: Node, what: str) -> None:
        id = self.some_id("failed_at is not null" if what == "repair" else "failed_at is null")
        if id is None:
            return
        try:
            match what:
                case "reschedule":
                    await node.queue.reschedule(None, id)
                case "disable":
                    await node.queue.disable(None, id)
                case _:
                    await node.queue.retry(None, id)
        except workq.KeyTaken:
            pass
