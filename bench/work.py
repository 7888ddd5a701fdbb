"""The tasks of the benchmarks, and a log of what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import workq
from watched import Watched
from workq.dialect import Dialect, Params, Rows, Statement


@dataclass
class Job:
    """What a task is to do. Times are time.monotonic_ns(), which all processes of a machine share on Linux."""

    sent: int
    """Before it was enqueued; 0: nobody asks for the delay."""
    seconds: float
    """How long it takes."""


WORK = workq.Spec("work", Job)


PATIENCE = 20.0
"""Seconds for what should come soon."""


async def until(reached: Callable[[], Awaitable[bool]], patience: float = PATIENCE) -> None:
    """Ask again and again until it is so. Raises TimeoutError."""
    async with asyncio.timeout(patience):
        while True:
            if await reached():
                return
            await asyncio.sleep(0.02)


class Happened(NamedTuple):
    """Something that a node did with a task."""

    what: str
    """claimed, started, ended, or written: deleted, or handed back."""
    id: int
    at: int
    """time.monotonic_ns()"""


class Log:
    """What the tasks of one executor did."""

    def __init__(self, *, keeps: bool) -> None:
        self.done: int = 0
        self.statements: int = 0
        self.delays: list[int] = []
        """Nanoseconds from before the enqueue to the handler's first line."""
        self.happened: list[Happened] = []
        self._keeps = keeps

    def watched(self, db: Dialect, *, wake_ups: bool = True) -> Watched:
        """The database, whose claims and finishes are logged."""
        claim, written = db.sql.claim, (db.sql.succeed, db.sql.settle)

        def seen(statement: Statement, params: Params, rows: Rows) -> None:
            self.statements += 1
            what = "claimed" if statement == claim else "written" if statement in written else None
            if self._keeps and what is not None:
                at = time.monotonic_ns()
                self.happened += [Happened(what, row[0], at) for row in rows]

        return Watched(db, seen, wake_ups=wake_ups)

    def handler(self, queue: str = "") -> workq.Handler[Job, Any]:
        """What runs the tasks of this queue."""

        async def work(task: workq.Task[Job]) -> None:
            started = time.monotonic_ns()
            if task.payload.seconds:
                await asyncio.sleep(task.payload.seconds)
            self.done += 1
            if self._keeps:
                ended = time.monotonic_ns()
                self.delays.append(started - task.payload.sent)
                self.happened += [Happened("started", task.id, started), Happened("ended", task.id, ended)]

        return workq.handler(workq.Spec(WORK.name, Job, queue=queue))(work)

    def answer(self, question: str) -> object:
        """What a benchmark may ask."""
        match question:
            case "done":
                return self.done
            case "cost":
                return {"statements": self.statements, "cpu": time.process_time(), "at": time.monotonic()}
            case "delays":
                return self.delays
            case "happened":
                return self.happened
            case _:
                raise ValueError(question)
