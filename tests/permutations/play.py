"""Plays an order of steps on PostgreSQL with workq's own statements, and judges every answer by the shadow."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeAlias, cast

import asyncpg

import workq
from permutations.orders import ENDS, OWN, Order
from permutations.shadow import Shadow
from support import SOON
from workq._clock import Clock
from workq._ending import Settled
from workq._place import PATIENT, Callers
from workq._store import Store, Wanted
from workq._task import Lease
from workq.dialect import Params, Rows, Statement
from workq_asyncpg import Postgres
from workq_asyncpg._connection import DID_NOTHING, PostgresConnection

LEVELS = ("read committed", "repeatable read", "serializable")
LEASE = timedelta(seconds=300)
AT_ONCE = timedelta(0)
"""A claim's lease is over at once, so that takeovers need no time; a beat's is not."""
Mistake: TypeAlias = tuple[str, str, str]


class Counted(PostgresConnection):
    """A loop's connection that counts the deadlocks and serialization failures it swallows."""

    swallowed: Counter[str]

    async def _once(self, statement: Statement, params: Params, deadline: float, lock_wait: float | None) -> Rows:
        try:
            return await super()._once(statement, params, deadline, lock_wait)
        except DID_NOTHING as error:
            self.swallowed[type(error).__name__] += 1
            raise


@dataclass
class Participant:
    """A node's loops and its application's connection."""

    loop: Counted
    app: asyncpg.Connection[Any]
    lease: Lease | None = None
    """Of the task, by the last claim that brought it."""
    completes: Lease | None = None
    """The lease that its open transaction completes."""
    neighbour: Lease | None = None
    broken: bool = False
    """Its transaction was aborted by an error."""
    waiting: asyncio.Task[bool | None] | None = None
    what: str = ""
    waited: bool = False
    """Its statement had to wait for a row lock."""


@dataclass
class Tally:
    """What came of all orders."""

    played: int = 0
    cut: int = 0
    """Orders that ended early: the next step was in a transaction that waited for a lock, or had been refused."""
    waited: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    """Errors that an application's transaction got."""
    swallowed: Counter[str] = field(default_factory=Counter[str])


class Stage:
    """A server with the table, and participants at one isolation level."""

    def __init__(
        self,
        store: Store,
        dialect: Postgres,
        everyone: Sequence[Participant],
        watch: asyncpg.Connection[Any],
        level: str,
    ) -> None:
        self._store = store
        self._dialect = dialect
        self._everyone = everyone
        self.watch = watch
        self._level = level
        self._tokens = 0
        self._pids = [participant.app.get_server_pid() for participant in everyone]
        self._table = dialect.sql.names.fill("{table}")
        self.tally = Tally(swallowed=everyone[0].loop.swallowed)

    async def play(self, order: Order, *, failed: bool) -> None:
        """One order, from a task that waits, or one that has failed."""
        queue = await self._set(failed=failed)
        shadow = Shadow(failed=failed)
        self.tally.played += 1
        try:
            for who, what in order:
                participant = self._everyone[who]
                if what in OWN:
                    await self._own(queue, shadow, participant, what)
                elif participant.waiting is not None or (participant.broken and what not in ENDS):
                    self.tally.cut += 1
                    break
                else:
                    participant.what, participant.waited = what, False
                    if what == "complete":
                        participant.completes = participant.lease
                    participant.waiting = asyncio.create_task(self._app(participant, what))
                    await self._settle(shadow, first=who)
        except BaseException as error:
            error.add_note(f"{self._level}, failed={failed}: {order}")
            raise
        finally:
            for participant in self._everyone:
                await self._clear(participant)

    async def _set(self, *, failed: bool) -> str:
        """A new task with a key and a neighbour, in a queue of their own."""
        queue = f"q{self.tally.played}"
        if self.tally.played % 500 == 0:
            await self.watch.execute(f"truncate {self._table}")
        rows = await self.watch.fetch(
            f"insert into {self._table} (queue, name, key, run_at, payload, failed_at) "
            "values ($1, 'note', 'k', 'epoch', 'null', case when $2 then now() end), "
            "($1, 'note', null, 'epoch', 'null', null) returning id",
            queue,
            failed,
        )
        self._id, self._beside = (row[0] for row in rows)
        return queue

    async def _clear(self, participant: Participant) -> None:
        if participant.waiting is not None:
            # It waits for another one's transaction, which this ends.
            for other in self._everyone:
                if other.waiting is None and other.app.is_in_transaction():
                    await other.app.execute("rollback")
            async with asyncio.timeout(SOON):
                await asyncio.wait([participant.waiting])
            participant.waiting.exception()
        if participant.app.is_in_transaction():
            await participant.app.execute("rollback")
        participant.lease = participant.completes = participant.neighbour = participant.waiting = None
        participant.broken = False

    # workq's own loops: none of them waits for a lock, and each answer is known.

    async def _own(self, queue: str, shadow: Shadow, participant: Participant, what: str) -> None:
        if what == "claim":
            work = self._claim(queue, shadow, participant)
        elif what == "beat":
            work = self._beat(shadow, participant)
        else:
            work = self._end(shadow, participant, what)
        raw = await participant.loop.raw()
        task = asyncio.create_task(work)
        waits = await self._waits(task, raw.get_server_pid())
        if waits:
            raw.terminate()
            await asyncio.wait([task])
            task.exception()
        assert not waits, f"a {what} of workq's own waits for a lock: {shadow}"
        await task

    async def _claim(self, queue: str, shadow: Shadow, participant: Participant) -> None:
        token = self._tokens = self._tokens + 1
        wanted = Wanted(queue, ["note"], 10, token, AT_ONCE, [], [], [], True, 99, False, False)
        page = await self._store.claim(participant.loop, wanted, PATIENT)
        found = {task.lease.id: task.lease for task in page}
        assert (self._id in found) == shadow.may_claim(), f"claim: {found}, {shadow}"
        if self._id in found:
            participant.lease = found[self._id]
            shadow.claimed(participant.lease)
        elif participant.lease is None:
            participant.lease = Lease(self._id, 1, token)  # that of nobody
        if self._beside in found:
            for other in self._everyone:
                other.neighbour = None
            participant.neighbour = found[self._beside]

    async def _beat(self, shadow: Shadow, participant: Participant) -> None:
        assert participant.lease is not None
        leases = [lease for lease in (participant.lease, participant.neighbour) if lease is not None]
        beaten = await self._store.extend(participant.loop, leases, LEASE, PATIENT)
        expected = {} if participant.neighbour is None else {participant.neighbour[:2]: True}
        if shadow.is_ours(participant.lease):
            expected[participant.lease[:2]] = not shadow.locked
            shadow.alive = shadow.alive or not shadow.locked
        assert beaten == expected, f"beat: {beaten}, {shadow}"

    async def _end(self, shadow: Shadow, participant: Participant, what: str) -> None:
        lease = participant.lease
        assert lease is not None
        if what == "finish":
            accepted = bool(await self._store.succeed(participant.loop, [lease], PATIENT))
        else:
            settled = Settled(failed=True, attempt=1, error="no")
            accepted = bool(await self._store.settle(participant.loop, [(lease, settled)], PATIENT))
        assert accepted == (shadow.is_ours(lease) and not shadow.locked), f"{what}: {accepted}, {shadow}"
        if accepted:
            shadow.ends(lease, what)

    # Applications' transactions: they may wait for each other, and at the higher levels they may be refused.

    async def _app(self, participant: Participant, what: str) -> bool | None:
        place = Callers(self._dialect, cast(workq.Transaction, participant.app))
        match what:
            case "begin":
                await participant.app.execute(f"begin isolation level {self._level}")
                await self._store.get(place, self._id)  # this takes the snapshot
            case "commit" | "rollback":
                await participant.app.execute(what)
            case "retry":
                return await self._store.retry(place, self._id, None, None) is not None
            case "delete":
                return await self._store.delete(place, self._id)
            case _:
                assert participant.lease is not None
                return await self._store.complete(place.tx, participant.lease)
        return None

    async def _settle(self, shadow: Shadow, *, first: int) -> None:
        """Until every application's statement is done or waits for a lock; first the one that let others go on."""
        again = True
        while again:
            again = False
            for who in sorted(range(len(self._everyone)), key=lambda who: who != first):
                participant = self._everyone[who]
                task = participant.waiting
                if task is None:
                    continue
                if await self._waits(task, participant.app.get_server_pid()):
                    self.tally.waited += 1
                    participant.waited = True
                if task.done():
                    participant.waiting = None
                    self._judge(shadow, who, participant, task)
                    again = True  # whoever waited for it may go on

    async def _waits(self, task: asyncio.Task[Any], pid: int) -> bool:
        """True when its backend waits for a lock, False when it is done."""
        await asyncio.wait([task], timeout=0.02)
        async with asyncio.timeout(SOON):
            while not task.done():
                # Not for autovacuum, say.
                if await self.watch.fetchval("select pg_blocking_pids($1) && $2::int[]", pid, self._pids):
                    return True
        return False

    def _judge(self, shadow: Shadow, who: int, participant: Participant, task: asyncio.Task[bool | None]) -> None:
        what = participant.what
        error = task.exception()
        if error is not None:
            # Never a deadlock; never anything at READ COMMITTED.
            assert isinstance(error, asyncpg.SerializationError), error
            assert self._level != "read committed", error
            self.tally.refused[what] += 1
            if what == "commit":
                shadow.rolled_back(who)
                participant.broken = False
            else:
                participant.broken = True
            return
        match what:
            case "begin":
                pass
            case "commit" if not participant.broken:
                shadow.committed(who, participant.completes)
            case "commit" | "rollback":
                shadow.rolled_back(who)
                participant.broken = False
            case _:
                changed = task.result()
                would = shadow.would(what, participant.completes) and not shadow.locked
                assert would or not changed, f"{what} changed what it may not: {shadow}"
                assert changed or not would or self._level != "read committed", f"{what} missed its row: {shadow}"
                if changed:
                    shadow.changed(who, what)
                elif participant.waited and shadow.exists and self._level == "read committed":
                    # PostgreSQL locks the row as it is now, and then sees that it does not fit any more.
                    shadow.changed(who, "")


@asynccontextmanager
async def stage(
    url: str, schema: str, participants: int, level: str, default: str, mistake: Mistake | None = None
) -> AsyncGenerator[Stage]:
    """Applications at one level; workq's own connections at the server's default, which is another one perhaps.

    mistake: the statement of that name has one text in the place of another.
    """
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            asyncpg.create_pool(
                url,
                min_size=participants + 2,
                max_size=participants + 5,
                server_settings={"default_transaction_isolation": default},
            )
        )
        dialect = Postgres(pool, schema=schema, listen=False)
        await workq.Queue(dialect).migrate()
        if mistake is not None:
            name, *texts = mistake
            right, wrong = map(dialect.sql.names.fill, texts)
            statement: Statement = getattr(dialect.sql, name)
            assert right in statement.text
            planted = replace(statement, text=statement.text.replace(right, wrong))
            dialect._sql = replace(dialect.sql, **{name: planted})  # pyright: ignore[reportPrivateUsage]
        store = Store(dialect, Clock())
        swallowed = Counter[str]()
        everyone: list[Participant] = []
        for number in range(participants):
            loop = Counted(pool, f"participant {number}")
            loop.swallowed = swallowed
            stack.push_async_callback(loop.close)
            app = await asyncpg.connect(url)
            stack.push_async_callback(app.close)
            everyone.append(Participant(loop, app))
        watch = await asyncpg.connect(url)
        stack.push_async_callback(watch.close)
        yield Stage(store, dialect, everyone, watch, level)
