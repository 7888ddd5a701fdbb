"""Between a node and the database: a Dialect whose statements may be late, lost, refused, or done and not answered.

What is sent is carried out by the world, not by the node: a process that was frozen or killed meanwhile has sent it all
the same (on a server; an SQLite statement runs in the process itself).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.database import WriterBusy
from workq.dialect import Busy, Interrupted, Rows, Statement, Statements, UniqueViolation, Unreachable, Urgency

if TYPE_CHECKING:
    from sim.world import Node, World


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one statement. Seconds on the way there and back, and what goes wrong."""

    there: float = 0.001
    back: float = 0.001
    refused: bool = False
    """No connection; nothing was sent."""
    broken: bool = False
    """The connection breaks before it is carried out."""
    unanswered: bool = False
    """It is carried out, and the connection breaks before the reply."""
    swallowed: bool = False
    """No reply ever comes; it is carried out all the same, `there` seconds later, unless it is dropped."""
    dropped: bool = False
    failed: bool = False
    """The database refuses the statement as a whole."""


class Line:
    """One connection of workq's own."""

    def __init__(self, world: World, node: Node, purpose: str) -> None:
        self._world = world
        self._node = node
        self._purpose = purpose
        self._busy = False

    async def fetch(self, statement: Statement, params: Mapping[str, Any], urgency: Urgency) -> Rows:
        """Send one statement, as the protocol of workq.dialect says."""
        if self._busy:
            self._world.broken("fence", f"two statements at once on {self._node}'s connection for {self._purpose}")
        self._busy = True
        # A file has no connection that could be dead: for its writer a statement waits as long as it would.
        patience = max(urgency.timeout, urgency.lock_wait or 0) if self._world.database.kind == "machine" else None
        try:
            async with asyncio.timeout(patience or urgency.timeout):
                return await self._persistently(statement, params, urgency)
        except TimeoutError as error:
            raise Interrupted("the statement took too long") from error
        finally:
            self._busy = False

    async def close(self) -> None:
        """Nothing is held."""

    async def _persistently(self, statement: Statement, params: Mapping[str, Any], urgency: Urgency) -> Rows:
        loop, pause = asyncio.get_running_loop(), 0.001
        wait = urgency.timeout if urgency.lock_wait is None else urgency.lock_wait
        until = loop.time() + wait
        while True:
            try:
                return await self._send(statement, params)
            except WriterBusy as error:
                if loop.time() + pause <= until:
                    await asyncio.sleep(pause * self._world.draw.uniform(0.5, 1))
                if loop.time() + pause > until:
                    raise Busy(f"busy for {wait:g} s") from error
            pause = min(pause * 2, 0.005)

    async def _send(self, statement: Statement, params: Mapping[str, Any]) -> Rows:
        world, node = self._world, self._node
        await world.alive(node)
        name = world.database.name_of(statement)
        fate, trouble = world.fate(node, name, params)
        if trouble is None:
            return await self._sent(name, statement, params, fate)
        trouble[1] = float("inf")
        try:
            return await self._sent(name, statement, params, fate)
        finally:
            trouble[1] = world.loop.time()

    async def _sent(self, name: str, statement: Statement, params: Mapping[str, Any], fate: Fate) -> Rows:
        world, node = self._world, self._node
        if fate.refused:
            await asyncio.sleep(fate.there)
            raise Unreachable("no connection") from ConnectionRefusedError("by the story")
        reply: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        number = world.call(node, name, params)
        world.outstanding[reply] = None
        reply.add_done_callback(lambda done: world.outstanding.pop(done, None))
        world.later(fate.there, self._carry_out, number, statement, params, fate, reply)
        return await reply

    def _carry_out(
        self, number: int, statement: Statement, params: Mapping[str, Any], fate: Fate, reply: asyncio.Future[Rows]
    ) -> None:
        world, node = self._world, self._node
        if world.database.kind == "machine":
            if node.dead:
                return
            if node.process.frozen:
                node.at_thaw.append(lambda: self._carry_out(number, statement, params, fate, reply))
                return
        elif (node.dead or reply.done()) and world.draw.random() < 0.5:
            return  # it was still in the process, or the server saw the connection close first
        if world.outage in ("refuses", "swallows"):
            if world.outage == "refuses":
                self._answer(reply, Interrupted("the connection broke"))
            return
        if fate.broken:
            self._answer(reply, Interrupted("the connection broke"))
            return
        if fate.dropped:
            return
        if fate.failed:
            self._answer(reply, sqlite3.DatabaseError("refused by the story"))
            return
        try:
            before = world.database.written
            rows = world.database.run(number, statement, params)
        except (WriterBusy, UniqueViolation, sqlite3.Error) as error:
            self._answer(reply, error)
            return
        if world.database.written != before:
            world.committed()
        if fate.unanswered:
            self._answer(reply, Interrupted("the connection broke"))
        elif not fate.swallowed and world.outage != "mute":
            world.later(fate.back, self._deliver, number, reply, rows)

    def _deliver(self, number: int, reply: asyncio.Future[Rows], rows: Rows) -> None:
        if not reply.done():
            reply.set_result(rows)
            self._world.answered(number, rows)

    def _answer(self, reply: asyncio.Future[Rows], error: Exception) -> None:
        if not reply.done():
            if isinstance(error, Interrupted):
                error.__cause__ = ConnectionResetError("by the story")
            reply.set_exception(error)


class Wire:
    """The Dialect of one node."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._flushes: list[Callable[[], Awaitable[None]]] = []

    @property
    def sql(self) -> Statements:
        return self._world.database.sql

    async def fetch(self, statement: Statement, params: Mapping[str, Any], tx: Any) -> Rows:
        rows: Rows = await tx.fetch(statement, params)
        return rows

    def connection(self, purpose: str, *, first: bool = False) -> Line:
        return Line(self._world, self._node, purpose)

    def reserve(self, connections: int) -> Callable[[], None]:
        return lambda: None

    def transaction(self) -> Any:
        raise NotImplementedError("no story migrates")

    def after(self, tx: Any, callback: Callable[[], None]) -> None:
        tx.afterwards.append(callback)

    async def listen(self, heard: Callable[[str | None], None]) -> None:
        self._node.heard = heard
        try:
            await asyncio.Event().wait()
        finally:
            self._node.heard = None

    def at_close(self, flush: Callable[[], Awaitable[None]]) -> None:
        self._flushes.append(flush)

    async def close(self) -> None:
        """As leaving `connect` does."""
        for flush in self._flushes:
            await flush()


class FileTransaction:
    """The application's transaction on SQLite: it has the writer until it ends."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._conn = world.database.open()
        self.locked: set[int] = set()
        self.afterwards: list[Callable[[], None]] = []

    def execute(self) -> None:
        """What makes it a connection in the eyes of workq."""

    async def begin(self) -> None:
        while True:
            await self._world.alive(self._node)
            try:
                self._conn.execute("begin immediate")
                return
            except sqlite3.OperationalError:
                await asyncio.sleep(self._world.draw.uniform(0.001, 0.01))

    async def fetch(self, statement: Statement, params: Mapping[str, Any]) -> Rows:
        world = self._world
        await world.moment(self._node)
        number = world.call(self._node, world.database.name_of(statement), params)
        return world.database.run_in(self._conn, number, statement, params)

    async def commit(self) -> None:
        await self._world.moment(self._node)
        self._conn.execute("commit")
        self._world.committed()

    def abandon(self) -> None:
        """What was not committed is undone."""
        self._conn.close()


class ServerTransaction:
    """The application's transaction on a server: its changes are nobody else's to see, its rows nobody else's to lock.

    Its statements are tried when they are sent, and carried out when it commits; the rows they meet are locked.
    """

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._work: list[Callable[[], object]] = []
        self._epoch = world.epoch
        self.locked: set[int] = set()
        self.afterwards: list[Callable[[], None]] = []

    def execute(self) -> None:
        """What makes it a connection in the eyes of workq."""

    async def begin(self) -> None:
        await self._reach()

    async def fetch(self, statement: Statement, params: Mapping[str, Any]) -> Rows:
        world, database = self._world, self._world.database
        await self._reach()
        name = database.name_of(statement)
        number = world.call(self._node, name, params)
        if name.startswith("insert"):
            rows, made = database.reserved(statement, params)
            self._work.append(lambda: database.put(number, made))
            return rows
        id = params["id"]
        while database.locks.get(id, self) is not self:
            await asyncio.sleep(world.draw.uniform(0.001, 0.01))
            await self._reach()
        rows = database.tried(statement, params)
        if rows:
            database.locks[id] = self
            self.locked.add(id)
            self._work.append(lambda: database.run(number, statement, params))
        return rows

    async def commit(self) -> None:
        await self._reach()
        self._release()
        try:
            for step in self._work:
                step()
        except sqlite3.IntegrityError as error:
            self._world.broken("fence", f"an id is given a second time: {error}")
        self._world.committed()

    def abandon(self) -> None:
        """What was not committed is undone."""
        self._release()

    async def _reach(self) -> None:
        await self._world.moment(self._node)
        if self._epoch != self._world.epoch or self._world.outage is not None:
            raise ConnectionResetError("by the story")

    def _release(self) -> None:
        locks = self._world.database.locks
        for id in [id for id, holder in locks.items() if holder is self]:
            del locks[id]


@asynccontextmanager
async def begun(world: World, node: Node) -> AsyncGenerator[Any]:
    """A transaction of the application's in a node; it is rolled back unless `commit()` is called."""
    tx: Any = (FileTransaction if world.database.kind == "machine" else ServerTransaction)(world, node)
    node.open[tx] = None
    since = world.loop.time()
    try:
        await tx.begin()
        yield tx
    finally:
        node.open.pop(tx, None)
        world.holds.append((since, world.loop.time(), frozenset(tx.locked)))
        tx.abandon()
        for callback in tx.afterwards:
            if world.draw.random() < 0.9:  # the driver cannot always tell
                world.later_in(node, world.draw.uniform(0, 0.01), callback)
