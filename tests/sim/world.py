"""The world of one story: clock, database, nodes, the weather between them, and a journal of what was seen."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TypeAlias

import workq
import workq.dialect
from sim.database import Database, Kind
from sim.loop import NODE, Process, VirtualLoop
from sim.wire import Fate, Wire
from workq._clock import Clock
from workq._deadline import Deadline
from workq._held import Held
from workq.dialect import Rows, Statements

Token: TypeAlias = tuple[int, int, int]
"""A claim: id, version, token."""
Outage: TypeAlias = Literal["refuses", "swallows", "mute"]
"""How a database is gone: no connection; nothing is carried out nor answered; all is carried out, nothing answered."""
SLOW = 0.05
"""Seconds on the wire from which on a node counts as troubled."""


class Call(NamedTuple):
    """One statement that was sent."""

    node: Node
    name: str
    params: Mapping[str, Any]
    at: float


@dataclass(eq=False)
class Run:
    """One start of a handler."""

    claim: Token
    n: int
    name: str
    node: Node
    at: float
    payload: Any
    held: Held
    ended: float | None = None
    how: str = ""
    cancelled: float | None = None
    completed: list[str] = field(default_factory=list)
    """How each of its transactions with complete(tx) ended: committed, rolled back, unknown."""

    @property
    def lease(self) -> Token:
        """What it holds now: the claim, or a later one that renewed it."""
        return self.held.lease.id, self.held.lease.version, self.held.lease.token


@dataclass
class Sent:
    """One task that somebody enqueued, by the number in its payload."""

    payload: dict[str, Any]
    became: Literal["sent", "stored", "rolled back", "unknown", "refused"] = "sent"
    id: int | None = None


class Node:
    """One process: a queue, perhaps an executor, and what happened to it."""

    def __init__(self, world: World, name: str, skew: float = 0) -> None:
        self.world = world
        self.name = name
        self.skew = skew
        self.process = Process(name)
        self.dead = False
        self.died = 0.0
        self.troubles: list[list[float]] = []
        """From when to when something was wrong with it or its wire."""
        self.frozen: list[tuple[float, float]] = []
        self.stopped: float | None = None
        """When stop() was called."""
        self.heard: Callable[[str | None], None] | None = None
        self.at_thaw: list[Callable[[], None]] = []
        self.open: dict[Any, None] = {}
        self.events: list[tuple[float, workq.Event]] = []
        self.executor: workq.Executor | None = None
        self.began = 0.0
        """When its executor had started."""
        self.lease = 0.0
        self.poll = 0.0
        self.workers = 0
        self.names: tuple[str, ...] = ()
        self.schedules: tuple[str, ...] = ()
        self.made = 0.0
        """When its executor came into being: it notices what the clock does from then on."""
        self.wire = Wire(world, self)
        self.queue = workq.Queue(self.wire, on_event=[self._told])
        self.queue.hub.clock = self.queue.hub.store.clock = NodeClock(world, self)
        self.queue.hub.inserts = Deadline(self.queue.hub.clock)

    def __repr__(self) -> str:
        return self.name

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something in this node."""
        context = contextvars.copy_context()
        context.run(NODE.set, self.process)
        return asyncio.get_running_loop().create_task(coro, context=context)

    def _told(self, event: workq.Event) -> None:
        if not self.dead:
            self.events.append((self.world.loop.time(), event))

    def trouble(self) -> list[float]:
        """Something goes wrong now. Whoever knows how long sets the end."""
        now = self.world.loop.time()
        self.troubles.append([now, now])
        return self.troubles[-1]

    def lives(self, since: float, until: float) -> bool:
        """Was it neither dead, stopping nor frozen between these times?"""
        gone = (self.dead and self.died <= until) or (self.stopped is not None and self.stopped <= until)
        return not gone and not any(begin <= until and end >= since for begin, end in self.frozen)

    def calm(self, since: float, until: float) -> bool:
        """Did nothing go wrong with it between these times? It lived, ran, and was not asked to stop."""
        gone = (self.dead and self.died <= until) or (self.stopped is not None and self.stopped <= until)
        return not gone and not any(begin <= until and end >= since for begin, end in self.troubles)

    def die(self) -> None:
        """kill -9: nothing of it writes any more, and its open transactions are rolled back."""
        self.dead, self.died = True, self.world.loop.time()
        self.heard = None
        for tx in list(self.open):
            tx.abandon()

    def freeze(self) -> None:
        """SIGSTOP."""
        self._trouble = self.trouble()
        self._trouble[1] = float("inf")
        self.world.loop.freeze(self.process)

    def thaw(self) -> None:
        """SIGCONT."""
        self._trouble[1] = self.world.loop.time()
        self.frozen.append((self._trouble[0], self.world.loop.time()))
        self.world.loop.thaw(self.process)
        waiting, self.at_thaw = self.at_thaw, []
        for step in waiting:
            step()


class NodeClock(Clock):
    """What a node takes for the time."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    def now(self) -> datetime:
        return self._world.database.now() + timedelta(seconds=self._node.skew)

    def monotonic(self) -> float:
        return self._world.loop.time()


class World:
    """Everything of one story."""

    def __init__(self, loop: VirtualLoop, folder: Path, kind: Kind, sql: Statements, seed: int) -> None:
        self.loop = loop
        self.draw = Random(seed ^ 0x5EED)
        self.context = contextvars.Context()
        self.database = Database(folder, kind, sql, loop.time)
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.runs: list[Run] = []
        self.sent: dict[int, Sent] = {}
        self.violations: list[tuple[str, str]] = []
        self.deleted: set[int] = set()
        """Ids for which somebody called delete."""
        self.epoch = 0
        """Crashes of the server so far."""
        self.outage: Outage | None = None
        self.outages: list[tuple[Outage | Literal["crashed"], float, float]] = []
        self.steps: list[float] = []
        """When the deciding clock was set."""
        self.stops: list[tuple[Node, float, float, float]] = []
        """Stops that came back: node, when, patience, seconds taken."""
        self.outstanding: dict[asyncio.Future[Rows], None] = {}
        self.weather: Callable[[Node, str, Mapping[str, Any]], Fate] = lambda node, name, params: Fate()
        self.missed: list[tuple[float, Run]] = []
        """A beat came back without the lease of a handler that ran."""
        self.replies: list[tuple[float, Node, str]] = []
        self.holds: list[tuple[float, float, frozenset[int]]] = []
        """When a transaction of the application was open, and which rows it had locked."""
        self.schedules: set[str] = set()
        """The keys of those that some node has started with."""
        self.crashed = False

    def broken(self, promise: str, what: str) -> None:
        """A promise was broken."""
        self.violations.append((promise, f"{what} (at {self.loop.time():.3f} s)"))

    def node(self, name: str, skew: float = 0) -> Node:
        node = Node(self, name, skew)
        self.nodes.append(node)
        return node

    def later(self, seconds: float, step: Callable[..., object], *args: Any) -> None:
        """Have something happen that is no node's doing."""
        self.loop.call_at(self.loop.time() + seconds, step, *args, context=self.context)

    def later_in(self, node: Node, seconds: float, step: Callable[[], object]) -> None:
        context = contextvars.Context()
        context.run(NODE.set, node.process)
        if not node.dead:
            self.loop.call_at(self.loop.time() + seconds, step, context=context)

    async def alive(self, node: Node) -> None:
        """A dead process never comes back from here."""
        if node.dead:
            await asyncio.Event().wait()

    async def moment(self, node: Node) -> None:
        """A few milliseconds, in which anything may happen."""
        await asyncio.sleep(self.draw.choice((0, 0.001, 0.003, 0.02)))
        await self.alive(node)

    def fate(self, node: Node, name: str, params: Mapping[str, Any]) -> tuple[Fate, list[float] | None]:
        """Draw what becomes of a statement, and note whom it troubles: until the caller knows the reply."""
        if self.outage == "refuses":
            return Fate(there=0.002, refused=True), node.trouble()
        fate = self.weather(node, name, params)
        wrong = self.outage or fate.there + fate.back > SLOW or fate != Fate(fate.there, fate.back)
        return fate, node.trouble() if wrong else None

    def call(self, node: Node, name: str, params: Mapping[str, Any]) -> int:
        self.calls.append(Call(node, name, params, self.loop.time()))
        return len(self.calls)

    def in_the_way(self, id: int, since: float, until: float) -> bool:
        """Did a transaction of the application hold the row, or on SQLite the writer, in this time?"""
        return any(
            begin <= until and end >= since and (self.database.kind == "machine" or id in ids)
            for begin, end, ids in self.holds
        )

    def count_of(self, payload: str) -> int:
        """How often a schedule has run, by its payload."""
        count: int = json.loads(payload)["count"]
        return count

    def schedule_ids(self) -> set[int]:
        return {row[0] for row in self.database.rows("scheduled")}

    def answered(self, number: int, rows: Rows) -> None:
        """A reply arrived."""
        call = self.calls[number - 1]
        self.replies.append((self.loop.time(), call.node, call.name))
        if call.name == "extend":
            alive = {(row[0], row[1]) for row in rows}
            gone = [lease for lease in call.params["leases"] if tuple(lease[:2]) not in alive]
            for run in self.runs if gone else ():
                if run.ended is None and run.node is call.node and run.held.lease in gone and not run.held.completing:
                    self.missed.append((self.loop.time(), run))

    def committed(self) -> None:
        """Others may hear of it."""
        for node in self.nodes:
            heard = node.heard
            if heard is not None and self.draw.random() < 0.8:
                self.later_in(node, self.draw.uniform(0.001, 0.02), lambda heard=heard: heard(None))  # type: ignore[misc]

    def crash_server(self) -> None:
        """The server is gone, and with it every connection and what it had not written yet."""
        self.epoch += 1
        self.crashed = True
        for node in self.nodes:
            node.trouble()
        for reply in list(self.outstanding):
            if not reply.done():
                error = workq.dialect.Interrupted("the connection broke")
                error.__cause__ = ConnectionResetError("by the story")
                reply.set_exception(error)
        self.database.crash(self.draw.randrange)
